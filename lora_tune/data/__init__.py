# SPDX-License-Identifier: Apache-2.0
"""From files of conversations to batches: read, render, mask, pack, iterate."""
