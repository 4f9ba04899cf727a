# SPDX-License-Identifier: Apache-2.0
"""Odd shapes of every family, drawn from a seed: sizes that nobody would think of."""

import random
from typing import Any

from torch_models import VOCAB

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
BIASED = ("gemma3", "gemma4", "llama", "olmo_hybrid", "qwen3", "qwen3_moe")
SPARSE = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
HYBRID = ("olmo_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe")


def random_shape(family: str, seed: int) -> dict[str, Any]:
    """Fields of a `config.json` to put into the tiny one of `torch_models.FAMILIES`."""
    rng, family = random.Random(f"{family} {seed}"), family.removesuffix("_text")
    heads, kv_heads = rng.choice([(1, 1), (3, 1), (3, 3), (4, 2), (5, 1), (6, 2), (6, 3)])
    layers = rng.randint(1, 7)
    shape: dict[str, Any] = {
        "vocab_size": rng.choice([VOCAB, VOCAB + 5, VOCAB + 13]),
        # transformers wants a multiple of the heads, though heads have a width of their own.
        "hidden_size": heads * rng.randint(-(-28 // heads), 41 // heads),
        "intermediate_size": rng.choice([7, 17, 23, 40]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 16, 24] if family in HYBRID else [6, 10, 14, 22]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if family in BIASED:
        shape["attention_bias"] = rng.random() < 0.5
    if family in SPARSE:
        shape |= _experts(rng, layers)
        shape["hidden_size"] = 4 * heads * rng.randint(1, 40 // (4 * heads))
    if family in HYBRID:
        shape |= _hybrid(rng, layers) | {"rms_norm_eps": 1e-2}
    more = {"gemma3": _gemma3, "gemma4": _gemma4, "mistral": _mistral, "olmo_hybrid": _olmo_hybrid}
    more |= {"qwen2": _windows, "qwen3": _windows, "qwen3_moe": _sparse_windows}
    shape |= more[family](rng, shape) if family in more else {}
    if family == "qwen3_5_moe":  # which has no dense layers, and always normalises
        for field in ("intermediate_size", "mlp_only_layers", "norm_topk_prob"):
            del shape[field]
    return shape


def _experts(rng: random.Random, layers: int) -> dict[str, Any]:
    experts = rng.randint(2, 7)
    return {
        "num_experts": experts,
        "num_experts_per_tok": rng.randint(1, experts),
        # Grouped products of torch want rows of whole 16 bytes.
        "moe_intermediate_size": rng.choice([4, 12, 20]),
        "norm_topk_prob": rng.random() < 0.5,
        "mlp_only_layers": sorted(rng.sample(range(layers), rng.randint(0, layers - 1))),
    }


def _hybrid(rng: random.Random, layers: int) -> dict[str, Any]:
    keys = rng.randint(1, 3)
    return {
        "layer_types": [rng.choice([LINEAR, LINEAR, FULL]) for _ in range(layers)],
        "linear_key_head_dim": rng.choice([5, 8, 12]),
        "linear_value_head_dim": rng.choice([6, 8, 13]),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.randint(1, 3),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4]),
    }


def _olmo_hybrid(rng: random.Random, shape: dict[str, Any]) -> dict[str, Any]:
    types = shape["layer_types"]
    if len({*types}) == 1:  # transformers wants both
        types = [*types, FULL if types[0] == LINEAR else LINEAR]
    width = shape["num_attention_heads"] * rng.choice([6, 8, 10])
    return {"hidden_size": width, "layer_types": types, "num_hidden_layers": len(types)}


def _gemma3(rng: random.Random, shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": rng.choice([3, 8, 50]),
        "sliding_window_pattern": rng.choice([2, 3, 5]),
        "query_pre_attn_scalar": rng.choice([9, 20]),
    }


def _gemma4(rng: random.Random, shape: dict[str, Any]) -> dict[str, Any]:
    layers = shape["num_hidden_layers"]
    types = [*(rng.choice([SLIDING, FULL]) for _ in range(layers - 1)), FULL]
    # Those that share keys and values come after one of each type.
    first = max(types.index(kind) for kind in {*types}) + 1
    shared = rng.randint(0, layers - first)
    return {
        "layer_types": types,
        "sliding_window": rng.choice([3, 8, 50]),
        "global_head_dim": rng.choice([12, 20]),
        "attention_k_eq_v": rng.random() < 0.5,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": rng.random() < 0.5,
        # transformers 5.24 cannot share keys and values without them.
        "hidden_size_per_layer_input": rng.choice([5, 8, 11] if shared else [0, 5, 8, 11]),
        "vocab_size_per_layer_input": shape["vocab_size"] + rng.choice([0, 3]),
    }


def _mistral(rng: random.Random, shape: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": rng.choice([None, 3, 8, 50])}


def _windows(rng: random.Random, shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_sliding_window": rng.random() < 0.7,
        "sliding_window": rng.choice([3, 8, 50]),
        "max_window_layers": rng.randint(0, shape["num_hidden_layers"]),
    }


def _sparse_windows(rng: random.Random, shape: dict[str, Any]) -> dict[str, Any]:
    return _windows(rng, shape) | {"decoder_sparse_step": rng.choice([1, 2])}
