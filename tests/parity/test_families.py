# SPDX-License-Identifier: Apache-2.0
"""Every family of attention-and-MLP models, one row each: all that holds for Llama holds for it.

A row lists small shapes. Each is compared with transformers; the first one, which has every kind of
layer and projection of the family, goes through all other tests as well: layouts, caches, exact
exports, and adapters in PEFT.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import engine_cases
import jax
import numpy as np
import pytest
from engine_cases import quick_jit
from flax import nnx
from safetensors.numpy import load_file, save_file
from torch_models import random_tokens, read_theirs, their_logits, write_checkpoint

import lora_tune
from lora_tune.hf.load import ignored_tensors, stored_names
from lora_tune.hf.save import save_full
from lora_tune.hf.table import bind
from lora_tune.lora.targets import adaptable_modules

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.parity,
    # peft 0.21 reads a property that transformers 5.24 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # peft 0.21 looks for pattern keys among modules only, and applies those of parameters.
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module"),
]

TOLERANCE = 1e-4
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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
            }
        }
    ),
    "gemma4_text": Row(
        {
            "keys are values, capped logits, five layers": {
                "num_hidden_layers": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
                "sliding_window": 6,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "final_logit_softcapping": 3.0,
                "tie_word_embeddings": False,
            },
            "own values, tied, window longer than the text": {
                "num_hidden_layers": 7,
                "sliding_window": 400,
                "tie_word_embeddings": True,
                "attention_bias": True,
            },
        }
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
WHOLE = [(family, next(iter(row.shapes))) for family, row in FAMILIES.items()]
REST = [(f, name) for f, row in FAMILIES.items() for name in row.shapes if (f, name) not in WHOLE]
LENGTH = 37
TOKENS = random_tokens(2, LENGTH, seed=5)
# One text, and a row of padding, two texts and padding again.
SEGMENTS = np.ones((2, LENGTH), np.int32)
SEGMENTS[1] = np.repeat([0, 1, 2, 0], [3, 11, 20, 3])
TEXTS = [(0, 0, LENGTH), (1, 3, 14), (1, 14, 34)]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A random checkpoint in transformers, and its logits for each text alone."""

    family: str
    folder: Path
    theirs: Any
    logits: list[np.ndarray]


def make(folder: Path, family: str, shape: str) -> Checkpoint:
    write_checkpoint(folder, model_type=family, **FAMILIES[family].shapes[shape])
    theirs = read_theirs(folder)
    return Checkpoint(family, folder, theirs, alone(theirs))


def alone(model: Any) -> list[np.ndarray]:
    return [their_logits(model, TOKENS[row : row + 1, a:b])[0] for row, a, b in TEXTS]


def run(model: Any, *, cache: Any = None, tokens: Any = TOKENS, ids: Any = SEGMENTS) -> Any:
    return _forward(model)(nnx.state(model), tokens, ids, cache)


def _forward(model: Any) -> Any:
    graphdef = nnx.graphdef(model)

    def forward(state: Any, tokens: Any, ids: Any, cache: Any) -> Any:
        return nnx.merge(graphdef, state, copy=True)(tokens, ids, cache=cache)

    return quick_jit(forward)


def assert_same(ours: np.ndarray, wanted: list[np.ndarray]) -> None:
    for (row, a, b), want in zip(TEXTS, wanted, strict=True):
        assert want.std() > 0.4
        np.testing.assert_allclose(ours[row, a:b], want, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=WHOLE, ids=lambda case: case[0])
def whole(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("whole"), *request.param)


@pytest.fixture(scope="module")
def ours(whole):
    return lora_tune.load_model(whole.folder, dtype="float32")[0]


@pytest.fixture(scope="module")
def logits(ours):
    return np.asarray(run(ours))


def test_logits_of_texts_alone_and_packed(whole, logits):
    assert_same(logits, whole.logits)


@pytest.mark.parametrize(("family", "shape"), REST, ids=lambda name: name)
def test_logits_of_other_shapes(tmp_path, family, shape):
    checkpoint = make(tmp_path, family, shape)
    model, _ = lora_tune.load_model(tmp_path, dtype="float32")
    assert_same(np.asarray(run(model)), checkpoint.logits)
    assert_exact_export(model, checkpoint, tmp_path / "full")


def test_scored_targets(ours, logits):
    """The loss by parts of the vocabulary is that of the logits, a cap on them included."""
    targets = np.roll(TOKENS, -1, axis=1)

    @quick_jit
    def score(state):
        model = nnx.merge(nnx.graphdef(ours), state, copy=True)
        return model(TOKENS, SEGMENTS, targets=targets)

    nll, correct = score(nnx.state(ours))
    likely = np.asarray(jax.nn.log_softmax(logits))
    wanted = -np.take_along_axis(likely, targets[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(nll, wanted, atol=2e-5, rtol=0)
    np.testing.assert_array_equal(correct, logits.argmax(axis=2) == targets)


def test_layers_in_a_loop(whole, logits):
    layout = {"scan_layers": False, "remat": "none"}
    model, _ = lora_tune.load_model(whole.folder, dtype="float32", **layout)
    np.testing.assert_allclose(np.asarray(run(model)), logits, atol=1e-5, rtol=0)


def test_a_cache_filled_piece_by_piece(ours, logits):
    """A prompt in one call, each further token in a call of its own."""
    forward, cache, found = _forward(ours), ours.create_cache(2, LENGTH), []
    state, first = nnx.state(ours), LENGTH - 17
    for a, b in [(0, first), *((t, t + 1) for t in range(first, LENGTH))]:
        piece, cache = forward(state, TOKENS[:, a:b], SEGMENTS[:, a:b], cache)
        found.append(np.asarray(piece))
    for row, a, b in TEXTS:
        got = np.concatenate(found, axis=1)[row, a:b]
        np.testing.assert_allclose(got, logits[row, a:b], atol=2e-5, rtol=0)


def test_import_then_export_is_exact(ours, whole, tmp_path):
    assert_exact_export(ours, whole, tmp_path / "full")


def assert_exact_export(model: Any, checkpoint: Checkpoint, folder: Path) -> None:
    leaves = bind(model.family, model)
    save_full(
        nnx.state(model),
        leaves,
        model.family,
        checkpoint.folder,
        folder,
        carried=ignored_tensors(checkpoint.folder, model.family),
        stored=stored_names(checkpoint.folder, model.family),
    )
    assert raw_tensors(folder) == raw_tensors(checkpoint.folder)


def raw_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> type, shape and bytes of every tensor, from the format's definition."""
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__")
    return {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            content[slice(*(start + n for n in entry["data_offsets"]))],
        )
        for name, entry in header.items()
    }


def test_adapter_in_peft_and_merged(whole, tmp_path):
    model, _ = lora_tune.load_model(whole.folder, dtype="float32")
    targets = FAMILIES[whole.family].targets
    lora_tune.add_lora(model, lora_tune.LoraConfig(r=3, lora_alpha=9, target_modules=targets))
    engine_cases.randomise_b(model, 0.2)
    lora_tune.save_adapter(model, tmp_path / "adapter")
    lora_tune.save_merged(model, tmp_path / "merged")
    logits = np.asarray(run(model))

    # A warning, as of missing or unexpected keys, is an error.
    wrapped = peft.PeftModel.from_pretrained(read_theirs(whole.folder), tmp_path / "adapter")
    wanted = alone(wrapped.eval())
    assert np.abs(wanted[0] - whole.logits[0]).max() > 0.1
    assert_same(logits, wanted)
    assert_same(logits, alone(read_theirs(tmp_path / "merged")))
    old, new = raw_tensors(whole.folder), raw_tensors(tmp_path / "merged")
    assert list(new) == list(old)
    changed = {name for name in old if new[name] != old[name]}
    stored, modules = (
        stored_names(whole.folder, model.family),
        adaptable_modules(bind(model.family, model)),
    )
    assert changed == {stored[f"{m}.weight"] for m in modules if m.rpartition(".")[2] in targets}

    fresh, _ = lora_tune.load_model(whole.folder, dtype="float32")
    lora_tune.load_adapter(fresh, tmp_path / "adapter")
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(m, nnx.LoRAParam))) for m in (model, fresh))
    assert ours.keys() == theirs.keys()
    for path, variable in ours.items():
        np.testing.assert_array_equal(variable[...], theirs[path][...], err_msg=str(path))


def test_experts_fused_in_the_files(tmp_path):
    """As published: all experts of a layer in two tensors. transformers reads both forms."""
    shape = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    write_checkpoint(tmp_path / "a", model_type="qwen3_5_moe", **shape)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    save_file(fuse(tensors), tmp_path / "b" / "model.safetensors", {"format": "pt"})
    apart, joined = (lora_tune.load_model(tmp_path / n, dtype="float32")[0] for n in "ab")
    for variable, other in zip(
        *(jax.tree.leaves(nnx.state(m)) for m in (apart, joined)), strict=True
    ):
        np.testing.assert_array_equal(variable, other)
    lora = lora_tune.LoraConfig(r=3, target_modules=("up_proj", "down_proj", "o_proj"))
    lora_tune.add_lora(joined, lora)
    engine_cases.randomise_b(joined, 0.2)
    lora_tune.save_merged(joined, tmp_path / "merged")
    assert_same(np.asarray(run(joined)), alone(read_theirs(tmp_path / "merged")))
    old, new = raw_tensors(tmp_path / "b"), raw_tensors(tmp_path / "merged")
    assert list(new) == list(old)
    assert {n.rpartition(".")[2] for n in old if new[n] != old[n]} == {
        "gate_up_proj",
        "down_proj",
        "weight",
    }


def fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    homes = {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}
    for home in homes:
        gates, ups, downs = (
            [tensors[f"{home}.{e}.{name}_proj.weight"] for e in range(6)]
            for name in ("gate", "up", "down")
        )
        both = [np.concatenate(pair) for pair in zip(gates, ups, strict=True)]
        out |= {f"{home}.gate_up_proj": np.stack(both), f"{home}.down_proj": np.stack(downs)}
    return out
