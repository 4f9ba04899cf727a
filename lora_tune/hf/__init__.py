# SPDX-License-Identifier: Apache-2.0
"""Hugging Face in both directions: one table, checkpoints in and out, PEFT adapters in and out."""
