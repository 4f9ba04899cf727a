# SPDX-License-Identifier: Apache-2.0
"""What a recipe needs on hardware that is not here: its step, compiled ahead of time and read."""
