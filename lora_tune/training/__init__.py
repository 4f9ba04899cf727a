# SPDX-License-Identifier: Apache-2.0
"""Training: a pure step, the loop around it, and what watches over both."""
