# SPDX-License-Identifier: Apache-2.0
"""Layers: the maths of a decoder, without any model's configuration."""
