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
from family_shapes import FAMILIES
from flax import nnx
from random_shapes import random_shape
from safetensors.numpy import load_file, save_file
from torch_models import FAMILIES as MODEL_TYPES
from torch_models import exact, random_tokens, read_theirs, their_logits, write_checkpoint

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
WHOLE = [(family, next(iter(row.shapes))) for family, row in FAMILIES.items()]
REST = [(f, name) for f, row in FAMILIES.items() for name in row.shapes if (f, name) not in WHOLE]
DRAWN = [(family, seed) for family in MODEL_TYPES for seed in range(3)]
HEADS = [(family, tied) for family in MODEL_TYPES for tied in (False, True)]
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


def make(folder: Path, family: str, shape: str | int, **fields: Any) -> Checkpoint:
    """Of a shape by its name, or of the one that a number draws."""
    named = isinstance(shape, str)
    fields = (FAMILIES[family].shapes[shape] if named else random_shape(family, shape)) | fields
    write_checkpoint(folder, model_type=family, **fields)
    theirs = read_theirs(folder) if named else exact(read_theirs(folder))
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


@pytest.mark.parametrize(("family", "shape"), [*REST, *DRAWN], ids=str)
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
    kinds = {module.rpartition(".")[2] for module in modules}
    assert kinds - {"lm_head"} == set(targets), "a kind of projection is not tested"
    assert changed == {stored[f"{m}.weight"] for m in modules if m.rpartition(".")[2] in targets}

    fresh, _ = lora_tune.load_model(whole.folder, dtype="float32")
    lora_tune.load_adapter(fresh, tmp_path / "adapter")
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(m, nnx.LoRAParam))) for m in (model, fresh))
    assert ours.keys() == theirs.keys()
    for path, variable in ours.items():
        np.testing.assert_array_equal(variable[...], theirs[path][...], err_msg=str(path))


@pytest.mark.parametrize(("family", "tied"), HEADS, ids=str)
def test_adapters_of_other_shapes(tmp_path, family, tied):
    """Of every projection, under a head that is the embedding and one that is not."""
    seed = 3 + tied
    base = make(tmp_path / "base", family, seed, tie_word_embeddings=tied)
    model, _ = lora_tune.load_model(base.folder, dtype="float32")
    lora_tune.add_lora(model, lora_tune.LoraConfig(r=3, lora_alpha=9, target_modules="all-linear"))
    # At 0.2 one unit of rounding in the weights of a hybrid alone moves exact logits by 4e-4.
    engine_cases.randomise_b(model, 0.1)
    lora_tune.save_adapter(model, tmp_path / "adapter")
    lora_tune.save_merged(model, tmp_path / "merged")
    logits = np.asarray(run(model))
    wrapped = peft.PeftModel.from_pretrained(read_theirs(base.folder), tmp_path / "adapter")
    wanted = alone(exact(wrapped.eval()))
    assert np.abs(wanted[0] - base.logits[0]).max() > 0.1
    assert_same(logits, wanted)
    assert_same(logits, alone(exact(read_theirs(tmp_path / "merged"))))
    old, new = raw_tensors(base.folder), raw_tensors(tmp_path / "merged")
    assert list(new) == list(old)
    stored = stored_names(base.folder, model.family)
    modules = adaptable_modules(bind(model.family, model))
    changed = {name for name in old if new[name] != old[name]}
    assert changed == {stored[f"{m}.weight"] for m in modules if m != "lm_head"}


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


def test_unused_keys_and_values_of_gemma4(tmp_path):
    """Published files hold them for layers that share those of earlier ones, too."""
    shape = FAMILIES["gemma4"].shapes["untied, shared keys and values"]
    write_checkpoint(tmp_path, model_type="gemma4", **shape)
    path, prefix = tmp_path / "model.safetensors", "model.language_model.layers"
    tensors = load_file(path)
    for layer in (4, 5):
        for part in ("k_proj", "v_proj", "k_norm"):
            name = f"self_attn.{part}.weight"
            assert f"{prefix}.{layer}.{name}" not in tensors
            tensors[f"{prefix}.{layer}.{name}"] = tensors[f"{prefix}.{layer - 2}.{name}"]
    save_file(tensors, path, {"format": "pt"})
    theirs = read_theirs(tmp_path)
    checkpoint = Checkpoint("gemma4", tmp_path, theirs, alone(theirs))
    model, _ = lora_tune.load_model(tmp_path, dtype="float32")
    assert_same(np.asarray(run(model)), checkpoint.logits)
    assert_exact_export(model, checkpoint, tmp_path / "full")
    tensors[f"{prefix}.6.self_attn.k_proj.weight"] = tensors.pop(
        f"{prefix}.3.self_attn.k_proj.weight"
    )
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(lora_tune.InputError) as caught:
        lora_tune.load_model(tmp_path, dtype="float32")
    assert "layers.3.self_attn.k_proj.weight is missing" in str(caught.value)
    assert "layers.6.self_attn.k_proj.weight in model.safetensors is unknown" in str(caught.value)


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
