# SPDX-License-Identifier: Apache-2.0
"""Proof that what a run has written is what it has trained, wherever it is loaded."""
