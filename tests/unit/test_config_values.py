# SPDX-License-Identifier: Apache-2.0
"""Any value in any field of `config.json`: a configuration with finite rope, or one sentence."""

from typing import Any

import numpy as np
import pytest
from test_family_tables import CONFIGS

from lora_tune.errors import InputError
from lora_tune.models import FAMILIES

VALUES: tuple[Any, ...] = (
    *(5, -1, 0, 1, 2, 2.5, -0.5, 1e-300, 10**400, float("nan"), float("inf"), True, None, "a"),
    *([], ["a"], [["a"]], [{}], ["full_attention"]),
    *({}, {"a": 1}, {"rope_type": ["a"]}, {"full_attention": 5}, {"5": {"head_dim": None}}),
)
# Of some families only; the others do not know them.
FIELDS = (
    *("layer_types", "mlp_only_layers", "sliding_window"),
    *("sliding_window_pattern", "max_window_layers", "use_sliding_window"),
    *("per_layer_config", "rope_parameters", "rope_scaling"),
    *("rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    *("full_attention_interval", "full_attention_layer_offset", "decoder_sparse_step"),
    *("linear_conv_kernel_dim", "max_position_embeddings", "rms_norm_eps"),
    *("query_pre_attn_scalar", "final_logit_softcapping", "num_global_key_value_heads"),
    *("attention_k_eq_v",),
)
STRETCHED = {"factor": 2.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": STRETCHED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": STRETCHED | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "truncate": True},
    "proportional": {"partial_rotary_factor": 0.5, "factor": 1.0},
}


def cases(base):
    """Configurations with one field changed."""
    for name in {*base, *FIELDS}:
        yield from ({**base, name: value} for value in VALUES)
    for kind, numbers in ROPES.items():
        whole = numbers | {"rope_type": kind, "rope_theta": 100.0}
        for name in whole:
            for value in VALUES:
                rope = {**whole, name: value}
                yield {**base, "rope_parameters": rope}
                yield {**base, "rope_scaling": rope}
                yield {**base, "rope_parameters": {"full_attention": rope}}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_in_any_field(family):
    text, read = "text_config" in CONFIGS[family], 0
    for fields in cases(CONFIGS[family].get("text_config", CONFIGS[family])):
        try:
            config: Any = FAMILIES[family].read_config({"text_config": fields} if text else fields)
        except InputError:
            continue
        read += 1
        ropes = [rope for _, rope in config.ropes] if hasattr(config, "ropes") else [config.rope]
        for rope in filter(None, ropes):
            assert np.isfinite(rope.frequencies()).all(), fields
            assert np.isfinite(rope.magnitude), fields
    assert read > 20  # some of these values are good ones
