# SPDX-License-Identifier: Apache-2.0
"""What the configurations of Qwen3-Next and Qwen3.5 may say; tests/parity compares the numbers."""

import pytest

from lora_tune.errors import InputError
from lora_tune.models import FAMILIES
from lora_tune.models.fields import max_positions
from lora_tune.models.qwen3_next_config import FULL, LINEAR

# As the published Qwen3.5 checkpoints have them, beside the sizes.
PUBLISHED = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "mlp_only_layers": [],
    "full_attention_interval": 4,
    "model_type": "qwen3_5_text",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}


def read(family, fields):
    return FAMILIES[family].read_config(fields)


def test_the_text_model_of_a_multimodal_configuration():
    text = {"num_hidden_layers": 6, "hidden_size": 64, **PUBLISHED}
    whole = {"text_config": text, "vision_config": {"depth": 1}, "image_token_id": 7}
    config = read("qwen3_5", whole | {"model_type": "qwen3_5", "tie_word_embeddings": True})
    assert config.layer_types == (LINEAR,) * 3 + (FULL,) + (LINEAR,) * 2
    assert (config.hidden_size, config.tie_word_embeddings) == (64, True)
    assert not any(config.sparse_layers)
    assert (config.rope.theta, config.rope.rotary_dim) == (1e7, 64)
    assert read("qwen3_5_text", text).layer_types == config.layer_types


def test_positions_of_both_kinds_of_configuration():
    assert max_positions({"max_position_embeddings": 7}) == 7
    assert max_positions({"text_config": {"max_position_embeddings": 9}}) == 9
    assert max_positions({"text_config": {}}) is None


def test_the_sparse_model_has_experts_in_every_layer():
    text = {**PUBLISHED, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
    config = read("qwen3_5_moe", {"text_config": text, "vision_config": {}})
    assert config.sparse_layers == (True,) * 4
    assert config.norm_topk_prob


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("qwen3_next", {"attention_sinks": 4}, "attention_sinks=4 is unknown to this family"),
        ("qwen3_next", {"rope_scaling": {"type": "longrope"}}, "rope_scaling.type='longrope'"),
        ("qwen3_next", {"rope_scaling": {"mrope_section": [1]}}, "mrope_section=[1] is unknown"),
        ("qwen3_next", {"partial_rotary_factor": 0}, "partial_rotary_factor is 0"),
        ("qwen3_next", {"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0, expected at"),
        (
            "qwen3_next",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 8},
            "partial_rotary_factor is 2, expected at least 4",
        ),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, expected at"),
        ("qwen3_next", {"layer_types": [3]}, "layer_types is [3]"),
        ("qwen3_next", {"layer_types": [FULL]}, "layer_types lists 1 layers"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ("qwen3_5", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] is not supported"),
        ("qwen3_5", {"full_attention_layer_offset": 1}, "full_attention_layer_offset=1 is unknown"),
        ("qwen3_5", {"num_experts": 8}, "num_experts=8 is unknown"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ("qwen3_5_moe", {"num_experts": 4}, "num_experts_per_tok must be between 1"),
        ("qwen3_5", {"text_config": 3}, "text_config is 3"),
        ("qwen3_5", {"text_config": {}, "per_layer_inputs": 2}, "per_layer_inputs=2 is unknown"),
        ("qwen3_5", {"text_config": {"head_dim": "a"}}, "head_dim is 'a'"),
        (
            "qwen3_5",
            {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True},
            "tie_word_embeddings is True, but text_config.tie_word_embeddings is False",
        ),
        ("qwen3_5", {"text_config": {}, "quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_the_layers_lack_is_named(family, fields, named):
    with pytest.raises(InputError, match=r"config\.json \(qwen3_") as caught:
        read(family, fields)
    assert named in str(caught.value)
