# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: one of them (`files`) and the folder that holds them (`folder`)."""
