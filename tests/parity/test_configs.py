# SPDX-License-Identifier: Apache-2.0
"""Configurations against the classes of transformers: what both assume, and what they write."""

import json
from typing import Any

import pytest
from safetensors import safe_open

from lora_tune.hf.table import bind
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.models.kinds import FULL, SLIDING

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

HEADS: dict[str, dict[str, Any]] = {
    "as published": {},
    "all alike": {"head_dim": 512},
    "fewer": {"num_global_key_value_heads": 2, "attention_k_eq_v": True},
    "fewer, of equal width": {
        "head_dim": 16,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
    },
    "fewer, but not counted": {"num_global_key_value_heads": 2},
    "fewer, though keys are not the values": {
        "per_layer_config": {i: {"num_key_value_heads": 2} for i in (5, 10)}
    },
}


def written(config: Any, *, use_diff: bool) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=use_diff))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_configuration_leaves_out(family):
    """A `config.json` that says nothing is read as what transformers makes of nothing."""
    theirs = written(transformers.AutoConfig.for_model(family), use_diff=False)
    read = FAMILIES[family].read_config
    assert read(theirs) == read({})


@pytest.mark.parametrize("use_diff", [True, False])
@pytest.mark.parametrize("heads", HEADS)
def test_heads_of_gemma4_as_written(heads, use_diff):
    theirs = transformers.AutoConfig.for_model("gemma4_text", num_hidden_layers=11, **HEADS[heads])
    read = FAMILIES["gemma4_text"].read_config(written(theirs, use_diff=use_diff))
    layers = {kind: theirs.per_layer_config[kind] for kind in (SLIDING, FULL)}
    for kind, layer in layers.items():
        assert read.heads(kind) == (layer.num_key_value_heads, layer.head_dim)
    assert read.layer_types == tuple(theirs.layer_types)


def test_a_gemma4_checkpoint_whose_heads_are_alike(tmp_path):
    """transformers leaves `per_layer_config` empty there; every tensor has to fit."""
    config = transformers.AutoConfig.for_model(
        "gemma4_text",
        hidden_size_per_layer_input=0,
        vocab_size=40,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        layer_types=[SLIDING, FULL],
        pad_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["per_layer_config"] == {}
    family = FAMILIES["gemma4_text"]
    leaves = bind(family, Decoder(family, family.read_config(raw), DecoderOptions()))
    ours = {name: tuple(leaf.hf_shape) for leaf in leaves for name in leaf.names.ravel()}
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in [*file.keys()]}
    assert ours == theirs
