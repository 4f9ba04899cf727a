# SPDX-License-Identifier: Apache-2.0
"""What the configuration of Olmo Hybrid may say; tests/parity compares the numbers."""

import pytest

from lora_tune.errors import InputError
from lora_tune.models.olmo_hybrid import FULL, LINEAR, read_config


def test_sizes_that_follow_from_others():
    config = read_config({})
    # Those of the published 7B model.
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (30, 30)
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (96, 192)
    assert (config.num_key_value_heads, config.head_dim) == (30, 128)
    assert config.layer_types == ((LINEAR,) * 3 + (FULL,)) * 8
    assert read_config({"num_hidden_layers": 2}).layer_types == (LINEAR, FULL)


def test_positions_are_off_where_the_base_is_null():
    assert read_config({}).rope is not None
    assert read_config({"rope_theta": None}).rope is None
    assert read_config({"rope_parameters": {"rope_theta": None}}).rope is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_sinks": 4}, "attention_sinks=4 is unknown"),
        ({"linear_num_key_heads": "a"}, "linear_num_key_heads is 'a'"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ({"linear_num_key_heads": 4}, "linear_num_value_heads must be a multiple"),
        ({"num_key_value_heads": 4}, "num_attention_heads must be a multiple"),
        ({"layer_types": ["mamba"] * 32}, "layer_types may hold"),
        ({"layer_types": [FULL]}, "layer_types lists 1 layers"),
        ({"linear_allow_neg_eigval": 1}, "linear_allow_neg_eigval is 1"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, expected at least 2"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
    ],
)
def test_what_the_layers_lack_is_named(fields, named):
    with pytest.raises(InputError, match=r"config\.json \(olmo_hybrid\)") as caught:
        read_config(fields)
    assert named in str(caught.value)
