# SPDX-License-Identifier: Apache-2.0
"""Model families, by the `model_type` of their Hugging Face configuration."""

from collections.abc import Mapping

from lora_tune.models import qwen3_next
from lora_tune.models.decoder import Family
from lora_tune.models.dialects import GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE
from lora_tune.models.transformer import make_family

_DIALECTS = (GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)
FAMILIES: Mapping[str, Family] = {
    **{dialect.model_type: make_family(dialect) for dialect in _DIALECTS},
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), qwen3_next.QWEN3_5_FAMILY),
    "qwen3_next": qwen3_next.FAMILY,
}
"""Every family that can be loaded, trained and exported."""
