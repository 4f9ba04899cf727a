# SPDX-License-Identifier: Apache-2.0
"""The command `data`: what training will see of the rows, and whether that can be trusted."""
