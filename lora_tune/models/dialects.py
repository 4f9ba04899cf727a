# SPDX-License-Identifier: Apache-2.0
"""The families that `lora_tune.models.transformer` runs, each by what differs from the others.

Values are those of the configuration classes of transformers 5.24.
"""

import dataclasses

from lora_tune.models.transformer_config import Dialect

_COMMON = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
}

LLAMA = Dialect(
    model_type="llama",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    },
    only=_COMMON,
    ignored=("pretraining_tp",),
    biases=("attention_bias", "mlp_bias"),
)
QWEN2 = Dialect(
    model_type="qwen2",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    only=_COMMON | {"use_mrope": (False, None)},
    qkv_bias=True,
    windows="late",
)
QWEN3 = Dialect(
    model_type="qwen3",
    defaults={**QWEN2.defaults, "head_dim": 128},
    only=_COMMON,
    biases=("attention_bias",),
    qk_norm=True,
    windows="late",
)
MISTRAL = Dialect(
    model_type="mistral",
    defaults={
        **LLAMA.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    only=_COMMON,
    windows="all",
)
QWEN3_MOE = Dialect(
    model_type="qwen3_moe",
    defaults={
        **QWEN2.defaults,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    only=_COMMON | {"shared_expert_intermediate_size": (0, None), "use_qk_norm": (True, None)},
    synonyms={"num_local_experts": "num_experts"},
    biases=("attention_bias",),
    qk_norm=True,
    windows="switched",
)
_GEMMA = Dialect(
    model_type="",  # what Gemma 3 and 4 have in common
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_dropout": (0, 0.0, None),
        "quantization_config": (None,),
    },
    biases=("attention_bias",),
    qk_norm=True,
    windows="cycle",
    theta=1e6,
    local_theta=1e4,
    activation="gelu_pytorch_tanh",
    sandwiched=True,
    scaled_embeddings=True,
)
GEMMA3 = dataclasses.replace(
    _GEMMA,
    model_type="gemma3_text",
    defaults={
        **_GEMMA.defaults,
        "vocab_size": 262208,
        "num_hidden_layers": 26,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    only={
        **_GEMMA.only,
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    zero_centred=True,
)
GEMMA3_MULTIMODAL = dataclasses.replace(
    GEMMA3,
    model_type="gemma3",
    multimodal=True,
    prefix="model.language_model.",
    renamed=(
        (r"^language_model\.model\.", "model.language_model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    ),
    passed_by=(
        (
            r"(model\.)?(vision_tower|multi_modal_projector)\..*",
            "the vision tower, which text does not pass through",
        ),
    ),
)
GEMMA4 = dataclasses.replace(
    _GEMMA,
    model_type="gemma4_text",
    defaults={
        **_GEMMA.defaults,
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "final_logit_softcapping": None,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "sliding_window": 512,
    },
    only={
        **_GEMMA.only,
        "use_bidirectional_attention": (None, "vision"),
        "enable_moe_block": (False, None),
    },
    ignored=("num_experts", "top_k_experts", "moe_intermediate_size"),
    unscaled=True,
    global_rope=(("rope_type", "proportional"), ("partial_rotary_factor", 0.25)),
    global_heads=True,
    older_rope=False,
    value_norm=True,
    exact_norms=True,
    scaled_layers=True,
)
GEMMA4_MULTIMODAL = dataclasses.replace(
    GEMMA4,
    model_type="gemma4",
    multimodal=True,
    prefix="model.language_model.",
    passed_by=(
        (
            r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
            "the towers of pictures and sounds, which text does not pass through",
        ),
    ),
)

ALL = (
    *(GEMMA3, GEMMA3_MULTIMODAL, GEMMA4, GEMMA4_MULTIMODAL),
    *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE),
)
