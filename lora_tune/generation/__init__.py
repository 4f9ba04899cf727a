# SPDX-License-Identifier: Apache-2.0
"""Text from a model: prompts to ids, prefill and decode with a cache, sampling, text back."""
