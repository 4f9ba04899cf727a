# SPDX-License-Identifier: Apache-2.0
"""Small shapes of every family of `torch_models`, and the projections that take adapters."""

import dataclasses
from typing import Any

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GEMMA4_LINEARS = (
    *(*LINEARS, "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
)
HYBRID_LINEARS = (*LINEARS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
SPARSE_HYBRID_LINEARS = (*HYBRID_LINEARS, "shared_expert_gate")
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, all fields": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
}


def rope(name: str, theta: float = 500.0) -> dict[str, Any]:
    return {"rope_parameters": {**ROPES[name], "rope_theta": theta}}


@dataclasses.dataclass(frozen=True)
class Row:
    """A family: its shapes, the whole one first, and the projections that take adapters."""

    shapes: dict[str, dict[str, Any]]
    targets: tuple[str, ...] = LINEARS


FAMILIES = {
    "gemma3_text": Row(
        {
            "cycle of two and a rest, five layers": {
                "num_hidden_layers": 5,
                "sliding_window_pattern": 2,
                "sliding_window": 6,
                "query_pre_attn_scalar": 20,
                "tie_word_embeddings": False,
            },
            "tied, biases, window longer than the text, ropes by type": {
                "attention_bias": True,
                "tie_word_embeddings": True,
                "sliding_window": 400,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "rope_parameters": {
                    "full_attention": {**ROPES["linear"], "rope_theta": 700.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
                },
            },
        }
    ),
    "gemma3": Row(
        {
            "with a vision tower, tied": {
                "sliding_window_pattern": 2,
                "sliding_window": 6,
                "tie_word_embeddings": True,
            },
            "untied": {"num_hidden_layers": 2, "tie_word_embeddings": False},
        }
    ),
    "gemma4": Row(
        {
            "with a vision tower, tied": {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 6,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
            "untied, shared keys and values": {
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "num_kv_shared_layers": 2,
                "sliding_window": 6,
                "tie_word_embeddings": False,
            },
        },
        GEMMA4_LINEARS,
    ),
    "gemma4_text": Row(
        {
            "shared keys and values, as E2B has them": {
                "num_hidden_layers": 9,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
                "num_kv_shared_layers": 5,
                "use_double_wide_mlp": True,
                "sliding_window": 6,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
            "keys are values, capped logits, five layers": {
                "num_hidden_layers": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
                "sliding_window": 6,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "final_logit_softcapping": 3.0,
                "tie_word_embeddings": False,
            },
            "no inputs of single layers": {
                "num_hidden_layers": 3,
                "hidden_size_per_layer_input": 0,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                "sliding_window": 6,
            },
            "own values, tied, window longer than the text": {
                "num_hidden_layers": 7,
                "sliding_window": 400,
                "tie_word_embeddings": True,
                "attention_bias": True,
            },
        },
        GEMMA4_LINEARS,
    ),
    "llama": Row(
        {
            "biases": {"attention_bias": True, "mlp_bias": True},
            "heads of the default size, a kv head each": {
                "num_key_value_heads": None,
                "head_dim": None,
            },
            "one kv head, tied, linear rope": {
                "num_key_value_heads": 1,
                "head_dim": 20,
                "tie_word_embeddings": True,
                **rope("linear"),
            },
            "llama3 rope": rope("llama3"),
            "yarn rope": rope("yarn"),
            "yarn rope, all fields": rope("yarn, all fields"),
            "dynamic rope": {"max_position_embeddings": 16, **rope("dynamic")},
        }
    ),
    "mistral": Row(
        {
            "window": {"sliding_window": 6},
            "no window, tied": {"sliding_window": None, "tie_word_embeddings": True},
            "window longer than the text, two layers": {
                "sliding_window": 4096,
                "num_hidden_layers": 2,
                "num_key_value_heads": 4,
                "head_dim": None,
            },
        }
    ),
    "olmo_hybrid": Row(
        {
            "no positions, two heads a key head": {"rope_theta": None},
            "positions, tied, biases, no negative eigenvalues": {
                "num_hidden_layers": 4,
                "num_key_value_heads": 4,
                "linear_value_head_dim": 8,
                "linear_num_value_heads": 2,
                "tie_word_embeddings": True,
                "attention_bias": True,
                "linear_allow_neg_eigval": False,
                **rope("llama3"),
            },
        },
        (*LINEARS, "g_proj", "a_proj", "b_proj"),
    ),
    "qwen2": Row(
        {
            "windows in late layers": {
                "use_sliding_window": True,
                "sliding_window": 5,
                "max_window_layers": 2,
            },
            "window longer than the text, tied": {
                "use_sliding_window": True,
                "sliding_window": 500,
                "max_window_layers": 1,
                "tie_word_embeddings": True,
            },
            "listed layers, no window, three layers": {
                "num_hidden_layers": 3,
                "num_key_value_heads": 4,
                "layer_types": ["full_attention"] * 3,
            },
        }
    ),
    "qwen3": Row(
        {
            "windows in listed layers": {
                "use_sliding_window": True,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                **rope("yarn"),
            },
            "biases, tied, one kv head, three layers": {
                "attention_bias": True,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
                "head_dim": 12,
            },
        }
    ),
    "qwen3_moe": Row(
        {
            "dense among sparse, normalised": {"mlp_only_layers": [2], "norm_topk_prob": True},
            "sparse every other, windows, tied, biases": {
                "decoder_sparse_step": 2,
                "use_sliding_window": True,
                "sliding_window": 6,
                "tie_word_embeddings": True,
                "attention_bias": True,
            },
            "all experts, three layers": {"num_experts_per_tok": 6, "num_hidden_layers": 3},
        }
    ),
    "qwen3_5": Row(
        {
            "with a vision tower": {"num_hidden_layers": 5},
            "tied, two heads a key head, yarn rope": {
                "num_hidden_layers": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 2,
                "tie_word_embeddings": True,
                **rope("yarn"),
            },
        },
        HYBRID_LINEARS,
    ),
    "qwen3_5_text": Row(
        {
            "without": {
                "num_hidden_layers": 4,
                "linear_num_value_heads": 8,
                "linear_value_head_dim": 8,
                "num_key_value_heads": 1,
            },
        },
        HYBRID_LINEARS,
    ),
    "qwen3_5_moe": Row(
        {
            "with a vision tower": {"num_hidden_layers": 5},
            "tied": {"num_hidden_layers": 4, "tie_word_embeddings": True},
        },
        SPARSE_HYBRID_LINEARS,
    ),
    "qwen3_5_moe_text": Row({"without": {"num_hidden_layers": 4}}, SPARSE_HYBRID_LINEARS),
}
