# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import shutil
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hf_cases import FAMILY, leaves_of, random_tensors, tiny, write_folder
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from lora_tune.errors import InputError
from lora_tune.hf import load
from lora_tune.hf.adapters import flat_arrays
from lora_tune.hf.files import open_checkpoint
from lora_tune.hf.load import load_params, stored_names
from lora_tune.hf.table import base_params, hf_state


def exported(model, state):
    arrays = flat_arrays(state)
    return {n: t for leaf in leaves_of(model) for n, t in hf_state(leaf, arrays[leaf.path])}


def assert_same_bytes(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].tobytes() == tensor.tobytes(), name


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(tiny(), ml_dtypes.bfloat16)


@pytest.fixture
def folder(tmp_path, tensors):
    return write_folder(tmp_path / "model", tensors, shards=3)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("psa", "scan"), [(0, True), (1, True), (0, False)])
def test_import_then_export_is_bit_exact(tmp_path, tensors, psa, scan, shards):
    model = tiny(psa=psa, scan=scan)
    folder = write_folder(tmp_path / "model", tensors, shards=shards)
    state = load_params(model, FAMILY, folder, dtype=jnp.bfloat16)
    assert_same_bytes(exported(model, state), tensors)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model, nnx.Param))
    for path, variable in base_params(model).items():
        assert dict(nnx.to_flat_state(state))[path].get_metadata() == variable.get_metadata()


@pytest.mark.parametrize("pieces", ["whole", "small"])
def test_values_land_where_a_hand_written_loop_puts_them(folder, tensors, monkeypatch, pieces):
    if pieces == "small":  # as the tensors of large models are read and transposed
        monkeypatch.setattr("lora_tune.hf.load.CHUNK", 500)
        monkeypatch.setattr("lora_tune.hf.load._VALUES", 101)
    arrays = flat_arrays(load_params(tiny(), FAMILY, folder))
    experts = arrays["blocks", "runs", 0, "mlp", "experts", "up_proj", "kernel"]
    for block in range(2):
        for layer in range(3):
            for e in range(4):
                name = f"model.layers.{4 * block + layer}.mlp.experts.{e}.up_proj.weight"
                expected = tensors[name].T.astype(np.float32)
                np.testing.assert_array_equal(experts[block, layer, e], expected)
    conv = arrays["suffix", 0, "linear_attn", "conv1d", "kernel"]
    expected = tensors["model.layers.8.linear_attn.conv1d.weight"][:, 0, :].T
    np.testing.assert_array_equal(conv[0], expected.astype(np.float32))


def test_each_device_reads_its_own_slice(folder, tensors):
    model = tiny(psa=1)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    specs = {}
    for leaf in leaves_of(model):
        free = ["a", "b"]
        spec = [free.pop() if free and n % 2 == 0 else None for n in leaf.shape]
        specs[leaf.path] = NamedSharding(mesh, PartitionSpec(*spec))
    state = load_params(model, FAMILY, folder, dtype=jnp.bfloat16, shardings=specs)
    for path, array in flat_arrays(state).items():
        assert array.sharding == specs[path]
    assert_same_bytes(exported(model, state), tensors)


def test_the_model_decides_the_type_when_none_is_asked(folder):
    assert {a.dtype for a in flat_arrays(load_params(tiny(), FAMILY, folder)).values()} == {
        np.dtype(np.float32)
    }


class Half:
    """A sharding of two hosts, this one of which holds the first half of the longest axis."""

    def addressable_devices_indices_map(self, shape):
        longest = shape.index(max(shape))
        halves = [slice(n // 2) if i == longest else slice(None) for i, n in enumerate(shape)]
        return {None: tuple(halves)}


def test_progress_is_of_what_the_first_process_reads(tmp_path, tensors, monkeypatch):
    found = open_checkpoint(write_folder(tmp_path, tensors)).tensors
    for leaf in leaves_of(tiny()):
        whole = sum(found[name].nbytes for name in leaf.names.ravel())
        assert load._own_bytes(leaf, None, found) == whole
        assert load._own_bytes(leaf, Half(), found) == whole // 2
    monkeypatch.setattr("lora_tune.distributed.is_first", lambda: False)
    calls = []
    load_params(tiny(), FAMILY, tmp_path, progress=lambda *call: calls.append(call))
    assert calls == []


def test_ignored_tensors_may_be_there_and_progress_is_told(tmp_path, tensors):
    extra = {"mtp.layers.0.weight": np.zeros(3, np.int8)}
    folder = write_folder(tmp_path / "model", tensors | extra)
    calls = []
    load_params(tiny(), FAMILY, folder, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (sum(t.nbytes for t in tensors.values()),) * 2
    assert calls == sorted(calls)


def test_unknown_missing_and_misshapen_are_named_together(tmp_path, tensors):
    broken = dict(tensors)
    del broken["model.norm.weight"]
    del broken["model.layers.5.mlp.experts.2.up_proj.weight"]
    broken["model.layers.9.stray"] = np.zeros(1, np.float32)
    broken["lm_head.weight"] = broken["lm_head.weight"].T.copy()
    broken["model.layers.0.input_layernorm.weight"] = np.zeros(16, np.int32)
    folder = write_folder(tmp_path / "model", broken)
    with pytest.raises(InputError) as caught:
        load_params(tiny(), FAMILY, folder)
    for part in (
        "model.norm.weight is missing",
        "model.layers.5.mlp.experts.2.up_proj.weight is missing",
        "model.layers.9.stray in model.safetensors is unknown",
        "lm_head.weight in model.safetensors has shape [16, 40], expected [40, 16]",
        "input_layernorm.weight in model.safetensors has type I32",
    ):
        assert part in str(caught.value)


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path):
    folder = write_folder(tmp_path / "model", {"a": np.zeros(1, np.float32)})
    with pytest.raises(InputError, match=r"is missing; and \d+ more$"):
        load_params(tiny(), FAMILY, folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_non_finite_weights_are_named(tmp_path, value, dtype):
    tensors = random_tensors(tiny(), dtype)
    name = "model.layers.6.mlp.experts.3.down_proj.weight"
    tensors[name][1, 2] = value
    folder = write_folder(tmp_path / "model", tensors)
    with pytest.raises(InputError, match=r"safetensors: tensor 'model\.layers\.6\.mlp\.experts\.3"):
        load_params(tiny(), FAMILY, folder, dtype=dtype)


def test_a_value_too_large_for_the_type_is_named(tmp_path):
    tensors = random_tensors(tiny())
    tensors["model.norm.weight"][0] = 1e6
    folder = write_folder(tmp_path / "model", tensors)
    with pytest.raises(InputError, match=r"model\.norm\.weight.*read as float16"):
        load_params(tiny(), FAMILY, folder, dtype=np.float16)


def test_tied_head_may_be_there_only_when_equal(tmp_path, tensors):
    model = tiny(tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    tied = tensors | {"lm_head.weight": embedding.copy()}
    load_params(model, FAMILY, write_folder(tmp_path / "equal", tied))
    without = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    load_params(model, FAMILY, write_folder(tmp_path / "absent", without))
    with pytest.raises(InputError, match=r"lm_head\.weight .* differs from model\.embed_tok"):
        load_params(model, FAMILY, write_folder(tmp_path / "other", tensors))


def shard(folder, k):
    return folder / f"model-{k:05d}-of-00003.safetensors"


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_header(path, edit):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@pytest.mark.parametrize(
    "target", ["../elsewhere.safetensors", "/etc/x.safetensors", "a\\b.safetensors"]
)
def test_an_index_may_not_leave_its_folder(folder, target):
    shutil.copy(shard(folder, 1), folder.parent / "elsewhere.safetensors")
    edit_index(folder, lambda w: w.update({"lm_head.weight": target}))
    with pytest.raises(InputError, match="plain names of safetensors files"):
        open_checkpoint(folder)


def test_an_index_must_name_what_is_there(folder):
    def edit(weights):
        weights["ghost"] = shard(folder, 2).name
        weights["other"] = "model-00009-of-00003.safetensors"
        del weights["lm_head.weight"]

    edit_index(folder, edit)
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    for part in (
        "names model-00009-of-00003.safetensors, which is not in the folder",
        f"lists ghost, which {shard(folder, 2).name} does not hold",
        "tensor 'lm_head.weight' is not in model.safetensors.index.json",
    ):
        assert part in str(caught.value)


def test_a_tensor_in_two_shards_is_named(folder):
    name = "model.norm.weight"
    both = [k for k in (1, 2, 3) if name not in load_file(shard(folder, k))]
    extra = load_file(shard(folder, both[0])) | {name: np.zeros(16, np.float32)}
    save_file(extra, shard(folder, both[0]))
    with pytest.raises(InputError, match=r"model\.norm\.weight.* is also in model-"):
        open_checkpoint(folder)


@pytest.fixture
def nested(tmp_path, tensors):
    """As multimodal checkpoints name their text model."""
    stored = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    return write_folder(tmp_path / "nested", stored, shards=3)


RENAMING = dataclasses.replace(FAMILY, renamed=((r"^model\.language_model\.", "model."),))


def test_files_may_have_other_names(nested, tensors):
    model = tiny()
    state = load_params(model, RENAMING, nested, dtype=jnp.bfloat16)
    assert_same_bytes(exported(model, state), tensors)
    stored = stored_names(nested, RENAMING)
    assert stored["model.norm.weight"] == "model.language_model.norm.weight"
    assert stored["lm_head.weight"] == "lm_head.weight"


def test_errors_name_tensors_as_the_files_do(nested):
    path = nested / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"]["model.language_model.norm.weight"]
    held = load_file(nested / file)
    held["model.language_model.norm.weight"] = np.zeros(3, np.float32)
    held["model.embed_tokens.weight"] = np.zeros(3, np.float32)
    save_file(held, nested / file)
    index["weight_map"]["model.embed_tokens.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"embed_tokens.* is also in .* as 'model\..*embed_tokens"):
        load_params(tiny(), RENAMING, nested)
    del held["model.embed_tokens.weight"], index["weight_map"]["model.embed_tokens.weight"]
    save_file(held, nested / file)
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model\.language_model\.norm\.weight in .* has shape"):
        load_params(tiny(), RENAMING, nested)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder, keep):
    path = shard(folder, 2)
    raw = path.read_bytes()
    path.write_bytes(raw[:keep])
    with pytest.raises(InputError, match=f"{path}: not a valid safetensors file") as caught:
        open_checkpoint(folder)
    assert ("at tensor" in str(caught.value)) == (keep == -1)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1000000, 16]},
        {"dtype": "F64"},
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [-8, 4]},
        {"dtype": "NOPE"},
        {"shape": None},
    ],
)
def test_a_lying_header_is_refused(folder, change):
    path = shard(folder, 1)
    name = sorted(load_file(path))[0]
    edit_header(path, lambda header: header[name].update(change))
    with pytest.raises(InputError, match=f"{path}: not a valid safetensors file"):
        open_checkpoint(folder)


def test_overlapping_tensors_are_refused(folder):
    path = shard(folder, 1)
    first, second = sorted(load_file(path))[:2]
    edit_header(path, lambda h: h[first].update(data_offsets=h[second]["data_offsets"]))
    with pytest.raises(InputError, match="not a valid safetensors file"):
        open_checkpoint(folder)


def test_a_header_that_lists_a_tensor_twice_is_refused(tmp_path):
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = ("{" + entry + "," + entry + "}").encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(InputError, match="lists 'a' twice"):
        open_checkpoint(tmp_path)


def test_a_folder_without_readable_weights_says_so(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="only safetensors weights can be read"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(InputError, match="non-empty object under 'weight_map'"):
        open_checkpoint(tmp_path)


def test_quantised_weights_are_refused_by_name(tmp_path, tensors):
    name = "model.layers.3.self_attn.q_proj.weight"
    folder = write_folder(tmp_path / "m", tensors | {name: np.zeros((32, 16), np.int8)})
    with pytest.raises(InputError, match=rf"{name} in model.safetensors has type I8"):
        load_params(tiny(), FAMILY, folder)
