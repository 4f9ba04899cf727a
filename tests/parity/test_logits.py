# SPDX-License-Identifier: Apache-2.0
"""Logits equal those of transformers on random checkpoints of many shapes."""

import numpy as np
import pytest
from torch_models import (
    FAMILIES,
    edit_config,
    our_logits,
    random_tokens,
    read_theirs,
    their_logits,
    write_checkpoint,
)

import lora_tune

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
CASES = {
    "one value head a key head, 5 layers": {
        "num_hidden_layers": 5,
        "mlp_only_layers": [],
        "linear_num_value_heads": 2,
    },
    "two value heads a key head, 6 layers, dense among sparse, one kv head": {
        "num_hidden_layers": 6,
        "mlp_only_layers": [2, 5],
        "num_key_value_heads": 1,
        "head_dim": 20,
        "linear_value_head_dim": 12,
        "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "four value heads a key head, 7 layers, sparse every other, tied, not normalised": {
        "num_hidden_layers": 7,
        "mlp_only_layers": [],
        "decoder_sparse_step": 2,
        "linear_num_value_heads": 8,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
    },
}


def assert_same(ours: np.ndarray, theirs: np.ndarray, real: np.ndarray | None = None) -> None:
    assert np.isfinite(ours).all()
    real = np.ones(ours.shape[:2], bool) if real is None else real
    assert theirs[real].std() > 0.5
    np.testing.assert_allclose(ours[real], theirs[real], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_shapes(tmp_path, name):
    folder = write_checkpoint(tmp_path, **CASES[name])
    tokens = random_tokens(2, 131)
    model, _ = lora_tune.load_model(folder, dtype="float32")
    assert_same(our_logits(model, tokens), their_logits(read_theirs(folder), tokens))


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    folder = write_checkpoint(
        tmp_path_factory.mktemp("two"),
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[1],
    )
    return lora_tune.load_model(folder, dtype="float32")[0], read_theirs(folder)


@pytest.mark.parametrize("length", [1, 2, 65])
def test_odd_lengths(two_layers, length):
    ours, theirs = two_layers
    tokens = random_tokens(3, length, seed=length)
    assert_same(our_logits(ours, tokens), their_logits(theirs, tokens))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By family; Qwen3-Next has two blocks of two stacks each, and a dense layer after them."""
    folders = {
        name: write_checkpoint(tmp_path_factory.mktemp(name), model_type=name) for name in FAMILIES
    }
    return {name: (folder, read_theirs(folder)) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_next", {}),
        ("qwen3_next", {"param_scan_axis": 1, "remat": "none"}),
        ("qwen3_next", {"scan_layers": False}),
        ("llama", {"param_scan_axis": 1, "remat": "none"}),
        ("llama", {"scan_layers": False}),
    ],
    ids=str,
)
def test_layouts_and_left_padding(checkpoints, family, layout):
    folder, theirs = checkpoints[family]
    tokens = random_tokens(4, 131)
    real = np.arange(131)[None, :] >= np.array([0, 1, 66, 128])[:, None]
    model, _ = lora_tune.load_model(folder, dtype="float32", **layout)
    ours = our_logits(model, tokens, real.astype(np.int32))
    assert_same(ours, their_logits(theirs, tokens, mask=real), real)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_next", {"rope_theta": 100.0, "partial_rotary_factor": 0.5}),
        (
            "gemma3_text",
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_theta": 100.0,
                "rope_local_base_freq": 20.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            "llama",
            {
                "max_position_embeddings": 24,
                "rope_theta": 100.0,
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 2.0,
                },
            },
        ),
    ],
)
def test_legacy_rope_fields(tmp_path, family, fields):
    """transformers 4 wrote rope_theta and its factor at the top, and scaling under another name."""
    layers = {"mlp_only_layers": [0, 1], "full_attention_interval": 1}
    layers = layers if family == "qwen3_next" else {}
    folder = write_checkpoint(tmp_path, model_type=family, num_hidden_layers=2, **layers)
    tokens = random_tokens(2, 33)
    default = their_logits(read_theirs(folder), tokens)
    edit_config(folder, rope_parameters=None, **fields)
    theirs = their_logits(read_theirs(folder), tokens)
    assert np.abs(theirs - default).max() > 0.05
    assert_same(our_logits(lora_tune.load_model(folder, dtype="float32")[0], tokens), theirs)
