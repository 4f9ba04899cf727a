# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: which modules get them, how Qwix injects them, what they are called."""
