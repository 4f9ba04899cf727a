# SPDX-License-Identifier: Apache-2.0
"""Model families, by the `model_type` of their Hugging Face configuration."""

from collections.abc import Mapping

from lora_tune.models import dialects, olmo_hybrid, qwen3_next
from lora_tune.models.family import Family
from lora_tune.models.transformer import make_family

FAMILIES: Mapping[str, Family] = {
    **{dialect.model_type: make_family(dialect) for dialect in dialects.ALL},
    "olmo_hybrid": olmo_hybrid.FAMILY,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), qwen3_next.QWEN3_5_FAMILY),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), qwen3_next.QWEN3_5_MOE_FAMILY),
    "qwen3_next": qwen3_next.FAMILY,
}
"""Every family that can be loaded, trained and exported."""
