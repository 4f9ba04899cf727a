# SPDX-License-Identifier: Apache-2.0
"""Which programs take an adapter, and why not: rules of vLLM and SGLang, applied to its files.

Nothing is started here. vLLM's rules are those of its `PEFTHelper`: it reads `r`, `lora_alpha` and
`use_rslora`, and gives all modules the one scale that follows from them.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_tune.hf.card import VLLM_RANKS, largest_rank, serve_command
from lora_tune.hf.fused import Pair
from lora_tune.hf.peft_config import FUSED_TYPES, PARAMETER_TYPES, split_expert
from lora_tune.lora.config import scaling

SERVERS = ("vllm", "sglang")
_HEADS = ("lm_head", "embed_tokens")


def reasons_against(
    config: Mapping[str, Any], pairs: Mapping[str, Pair], model_type: str
) -> dict[str, list[str]]:
    """Why a server would not serve the adapter as it was trained: server -> reasons.

    Args:
      config: what `adapter_config.json` says of rank, scale and base.
      pairs: the adapter by module.
      model_type: that of the base.
    """
    scale = scaling(config["r"], config["lora_alpha"], config["use_rslora"])
    odd = [m for m, pair in pairs.items() if not math.isclose(pair.scale, scale, rel_tol=1e-6)]
    heads = [module for module in pairs if module.rpartition(".")[2] in _HEADS]
    both, vllm = [], []
    if odd:
        both.append(
            f"{odd[0]}{_more(odd)} has a scale of its own (rank_pattern or alpha_pattern), and "
            f"every module would be served with {scale:g}"
        )
    if heads:
        both.append(f"{', '.join(heads)} is adapted; leave it out of lora.target_modules")
    rank = largest_rank(config)
    if rank > VLLM_RANKS[-1]:
        vllm.append(f"rank {rank} is above its largest, {VLLM_RANKS[-1]}")
    routed = any(split_expert(module) for module in pairs)
    if routed and model_type not in FUSED_TYPES | PARAMETER_TYPES:
        vllm.append(f"adapters on routed experts of {model_type} have no layout that it reads")
    sglang = ["adapters on fused experts (target_parameters) are not known to load"]
    return {
        "vllm": [*both, *vllm],
        "sglang": [*both, *(sglang if routed and model_type in PARAMETER_TYPES else [])],
    }


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def vllm_command(
    config: Mapping[str, Any] | None, adapter: Path, merged: Path | None, *, takes: bool
) -> str | None:
    """The command that serves the adapter on its base, or else the merged folder, if any."""
    if config is not None and takes:
        base = str(config["base_model_name_or_path"])
        return serve_command(base, largest_rank(config), str(adapter))
    return None if merged is None else f"vllm serve {merged}"
