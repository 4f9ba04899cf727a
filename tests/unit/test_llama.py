# SPDX-License-Identifier: Apache-2.0
"""What the configuration of Llama may say; its numbers are compared in tests/parity."""

import pytest

from lora_tune.errors import InputError
from lora_tune.models.llama import read_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_sizes_that_follow_from_others():
    config = read_config({"hidden_size": 96, "num_attention_heads": 6, "head_dim": None})
    assert (config.num_key_value_heads, config.head_dim) == (6, 16)
    assert len(set(config.layer_kinds())) == 1


def test_llama3_stretches_slow_rotations_only():
    # Wavelengths of Llama 3.1: dimensions that turn more than 4 times within 8192 positions keep
    # their frequency, those that turn less than once have it divided by 8.
    sizes = {"rope_theta": 500000.0, "head_dim": 128}
    plain = read_config(sizes).frequencies()
    scaled = read_config({**sizes, "rope_scaling": LLAMA3}).frequencies()
    turns = 8192 * plain / 6.283185307
    assert (scaled[turns > 4] == plain[turns > 4]).all()
    assert scaled[turns < 1] == pytest.approx(plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"quantization_config": {}}, "quantization_config={}"),
        ({"hidden_size": "96"}, "hidden_size is '96'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        ({"head_dim": 5}, "head_dim is 5, expected an even number"),
        ({"head_dim": "a"}, "head_dim is 'a'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": 2.0}, "rope_parameters is 2.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "above low_freq_factor"),
    ],
)
def test_what_the_layers_lack_is_named(fields, named):
    with pytest.raises(InputError, match=r"config\.json \(llama\)") as caught:
        read_config(fields)
    assert named in str(caught.value)
