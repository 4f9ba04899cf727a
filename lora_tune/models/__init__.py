# SPDX-License-Identifier: Apache-2.0
"""Model families, by the `model_type` of their Hugging Face configuration."""

from collections.abc import Mapping

from lora_tune.models import llama, qwen3_next
from lora_tune.models.decoder import Family

FAMILIES: Mapping[str, Family] = {"llama": llama.FAMILY, "qwen3_next": qwen3_next.FAMILY}
"""Every family that can be loaded, trained and exported."""
