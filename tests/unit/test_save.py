# SPDX-License-Identifier: Apache-2.0
import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_cases import (
    CONFIG,
    EVERYWHERE,
    FAMILY,
    deltas,
    leaves_of,
    random_adapters,
    random_tensors,
    tiny,
    write_folder,
)
from safetensors import safe_open
from safetensors.numpy import load_file

from lora_tune.errors import InputError
from lora_tune.hf import header
from lora_tune.hf.files import INDEX, open_checkpoint
from lora_tune.hf.load import ignored_tensors, load_params
from lora_tune.hf.save import save_full, save_merged
from lora_tune.hf.shards import shard_bytes
from lora_tune.lora.config import LoraConfig

LORA = LoraConfig(
    r=3, lora_alpha=4, target_modules=EVERYWHERE, exclude_modules=r"model\.layers\.1\..*"
)
EXTRA = {
    "mtp.fc.weight": np.arange(6, dtype=np.int8).reshape(2, 3),
    "mtp.norm.weight": np.full(3, np.nan, np.float32),
    "mtp.empty": np.zeros((0, 4), np.float16),
}


def every_tensor(folder):
    return {t.name: (t.dtype, t.shape, t.bytes().tobytes()) for t in all_of(folder)}


def all_of(folder):
    return open_checkpoint(folder).tensors.values()


@pytest.fixture(scope="module")
def base_tensors():
    return random_tensors(tiny(), ml_dtypes.bfloat16) | EXTRA


@pytest.mark.parametrize(
    ("psa", "scan", "shards", "pieces"),
    [(0, True, 3, "whole"), (1, True, 1, "whole"), (0, False, 2, "whole"), (0, True, 3, "small")],
)
def test_merge_is_one_rounding_of_the_exact_sum(
    tmp_path, base_tensors, monkeypatch, psa, scan, shards, pieces
):
    if pieces == "small":  # as the tensors of large models are read and computed
        monkeypatch.setattr("lora_tune.hf.merge.CHUNK", 500)
        monkeypatch.setattr("lora_tune.hf.merge._VALUES", 101)
    leaves = leaves_of(tiny(psa=psa, scan=scan))
    base = write_folder(tmp_path / "base", base_tensors, shards=shards)
    arrays = random_adapters(leaves, LORA)
    report = save_merged(arrays, leaves, FAMILY, base, tmp_path / "out")

    expected = deltas(leaves, arrays)
    before, after = every_tensor(base), every_tensor(tmp_path / "out")
    assert set(after) == set(before)
    merged = {t.name: t.array() for t in all_of(tmp_path / "out") if t.name in expected}
    for name, delta in expected.items():
        exact = base_tensors[name].astype(np.float64) + delta
        near = np.abs(merged[name].astype(np.float64) - exact)
        half_unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)  # in the last place of bfloat16
        assert (near <= half_unit + 1e-5).all(), name
    for name in set(before) - set(expected):
        assert after[name] == before[name], name
    assert report.merged == len(expected)
    assert report.untouched == len(before) - len(expected)
    assert 0 < report.max_rounding < 0.5


def test_layers_that_are_not_adapted_stay_byte_for_byte(tmp_path, base_tensors):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors)
    save_merged(random_adapters(leaves, LORA), leaves, FAMILY, base, tmp_path / "out")
    before, after = every_tensor(base), every_tensor(tmp_path / "out")
    untouched = [n for n in before if n.startswith(("model.layers.1.", "mtp.", "lm_head"))]
    assert len(untouched) > 20
    assert all(before[n] == after[n] for n in untouched)
    assert (
        before["model.layers.2.mlp.experts.3.up_proj.weight"]
        != (after["model.layers.2.mlp.experts.3.up_proj.weight"])
    )


def test_files_metadata_and_companions_come_along(tmp_path, base_tensors):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors, shards=3)
    (base / "generation_config.json").write_text('{"eos_token_id": 1}')
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool.jinja").write_text("x")
    (base / "training_args.bin").write_bytes(b"x")
    save_merged(random_adapters(leaves, LORA), leaves, FAMILY, base, tmp_path / "out")
    names = {str(p.relative_to(base)) for p in base.rglob("*") if p.is_file()}
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")}
    assert found - {"additional_chat_templates", "lora_tune_export.json"} == (
        names - {"training_args.bin"}
    )
    for name in names - {"training_args.bin"}:
        if not name.endswith(".safetensors"):
            assert (base / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert list(load_file(path))  # a header that safetensors itself accepts
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}


def test_without_an_effective_adapter_the_weights_are_the_base(tmp_path, base_tensors):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors)
    arrays = random_adapters(leaves, LORA)
    for path, array in arrays.items():
        if path[-1] == "kernel_lora_b":
            array[:] = 0
    report = save_merged(arrays, leaves, FAMILY, base, tmp_path / "out")
    assert report.max_rounding == 0
    assert every_tensor(base) == every_tensor(tmp_path / "out")


def test_a_diverged_adapter_is_not_merged(tmp_path, base_tensors):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors)
    arrays = random_adapters(leaves, LORA)
    arrays["blocks", "runs", 1, "self_attn", "q_proj", "kernel_lora_b"][0, 0, 0, 0] = np.nan
    with pytest.raises(InputError, match=r"layers\.3\.self_attn\.q_proj\.weight.*not finite"):
        save_merged(arrays, leaves, FAMILY, base, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["base"]


def test_adapters_that_fit_no_projection_are_refused(tmp_path, base_tensors):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors)
    arrays = random_adapters(leaves, LORA)
    stray = {("elsewhere", "kernel_lora_a"): np.zeros(3)}
    with pytest.raises(ValueError, match=r"beside no projection.*elsewhere\.kernel_lora_a"):
        save_merged(arrays | stray, leaves, FAMILY, base, tmp_path / "out")
    path = ("blocks", "runs", 1, "self_attn", "q_proj", "kernel_lora_a")
    with pytest.raises(ValueError, match=r"q_proj\.kernel: A, B and scale have shapes"):
        save_merged(arrays | {path: arrays[path][:, :, :8]}, leaves, FAMILY, base, tmp_path / "out")


@pytest.mark.parametrize("existing", ["file", "folder"])
def test_what_is_not_ours_is_not_overwritten(tmp_path, base_tensors, existing):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors)
    out = tmp_path / "out"
    if existing == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="choose another output"):
        save_merged(random_adapters(leaves, LORA), leaves, FAMILY, base, out)
    mine = out if existing == "file" else out / "thesis.txt"
    assert mine.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]


def test_an_empty_folder_and_an_earlier_result_are_replaced(tmp_path, base_tensors):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors)
    out = tmp_path / "out"
    out.mkdir()
    save_merged(random_adapters(leaves, LORA, seed=1), leaves, FAMILY, base, out)
    first = every_tensor(out)
    save_merged(random_adapters(leaves, LORA, seed=2), leaves, FAMILY, base, out)
    assert every_tensor(out) != first
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_full_disk_leaves_nothing_and_keeps_the_earlier_result(
    tmp_path, base_tensors, monkeypatch, earlier
):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors)
    arrays = random_adapters(leaves, LORA)
    if earlier:
        save_merged(arrays, leaves, FAMILY, base, tmp_path / "out")
    listed = sorted(str(p) for p in tmp_path.rglob("*"))
    written = []

    def full(descriptor, data, offset):
        written.append(data.nbytes)
        if len(written) > 10:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_tune.hf.merge.write_at", full)
    with pytest.raises(InputError, match="No space left on device"):
        save_merged(arrays, leaves, FAMILY, base, tmp_path / "out")
    assert sorted(str(p) for p in tmp_path.rglob("*")) == listed


def test_a_base_in_float64_is_merged_in_float64(tmp_path):
    leaves, tensors = leaves_of(tiny()), random_tensors(tiny(), np.float64)
    name = "model.layers.3.self_attn.q_proj.weight"
    tensors[name] += 1e-12
    arrays = random_adapters(leaves, LORA)
    save_merged(arrays, leaves, FAMILY, write_folder(tmp_path / "b", tensors), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")[name]
    exact = tensors[name] + deltas(leaves, arrays)[name]
    assert np.abs(merged - exact).max() < 1e-14


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_full_export_is_the_state(tmp_path, base_tensors, dtype):
    tensors = {k: v.astype(dtype) for k, v in base_tensors.items() if k not in EXTRA}
    base = write_folder(tmp_path / "base", tensors)
    model = tiny(psa=1)
    state = load_params(model, FAMILY, base, dtype=dtype)
    save_full(state, leaves_of(model), FAMILY, base, tmp_path / "one")
    save_full(state, leaves_of(model), FAMILY, base, tmp_path / "many", max_shard_bytes=4000)
    for out, count in ((tmp_path / "one", 1), (tmp_path / "many", 10)):
        saved = {t.name: t for t in all_of(out)}
        assert set(saved) == set(tensors)
        assert len(list(out.glob("*.safetensors"))) >= count
        for name, tensor in tensors.items():
            assert saved[name].array().dtype == tensor.dtype
            assert saved[name].bytes().tobytes() == tensor.tobytes(), name
        assert (out / "tokenizer.json").exists()
        config = json.loads((out / "config.json").read_text())
        assert config == CONFIG | {"dtype": np.dtype(dtype).name}
    sizes = [p.stat().st_size for p in (tmp_path / "many").glob("*.safetensors")]
    assert len(sizes) > 10


@pytest.mark.parametrize("most", [5 * 10**9, 4000])
def test_full_export_carries_what_the_model_ignores(tmp_path, base_tensors, most):
    """Byte for byte and in its own type, NaN, integers and empty tensors alike."""
    base = write_folder(tmp_path / "base", base_tensors, shards=3)
    model = tiny()
    state = load_params(model, FAMILY, base, dtype=np.float32)
    carried = ignored_tensors(base, FAMILY)
    save_full(
        state,
        leaves_of(model),
        FAMILY,
        base,
        tmp_path / "out",
        carried=carried,
        max_shard_bytes=most,
    )
    before, after = every_tensor(base), every_tensor(tmp_path / "out")
    assert set(after) == set(before)
    assert {name for name in before if after[name] == before[name]} == set(EXTRA)
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert list(load_file(path))  # a header that safetensors itself accepts


def test_exports_spell_out_the_place_of_full_attention(tmp_path, base_tensors):
    base = write_folder(tmp_path / "base", base_tensors)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "full_attention_layer_offset": -1}))
    leaves, state = leaves_of(tiny()), load_params(tiny(), FAMILY, base)
    save_full(state, leaves, FAMILY, base, tmp_path / "full")
    save_merged(random_adapters(leaves, LORA), leaves, FAMILY, base, tmp_path / "merged")
    for kind in ("full", "merged"):
        written = json.loads((tmp_path / kind / "config.json").read_text())
        cycle = [*["linear_attention"] * 3, "full_attention"]
        assert written["layer_types"] == [*cycle, *cycle, "linear_attention"]
        assert "full_attention_layer_offset" not in written


def test_full_export_refuses_what_is_not_finite(tmp_path, base_tensors):
    base = write_folder(tmp_path / "base", base_tensors)
    model = tiny()
    state = load_params(model, FAMILY, base)
    state["norm"]["weight"].set_value(jnp.full(16, jnp.inf))
    with pytest.raises(InputError, match=r"model\.norm\.weight: holds a NaN or an infinity"):
        save_full(state, leaves_of(model), FAMILY, base, tmp_path / "out")
    del state["norm"]
    with pytest.raises(ValueError, match=r"lacks norm\.weight"):
        save_full(state, leaves_of(model), FAMILY, base, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["base"]


def test_a_tied_model_is_written_without_a_head(tmp_path, base_tensors):
    tensors = {k: v for k, v in base_tensors.items() if k != "lm_head.weight"}
    base = write_folder(tmp_path / "base", tensors)
    model = tiny(tie_word_embeddings=True)
    save_full(load_params(model, FAMILY, base), leaves_of(model), FAMILY, base, tmp_path / "out")
    assert "lm_head.weight" not in every_tensor(tmp_path / "out")


def test_header_is_written_as_safetensors_reads_it(tmp_path):
    path = tmp_path / "x.safetensors"
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    with path.open("wb") as out:
        out.write(header.header_bytes([("ä", "F32", (3, 2), 24)], {"format": "pt"}))
        header.write_array(out, array.T)
    np.testing.assert_array_equal(load_file(path)["ä"], array.T)


@pytest.mark.parametrize("size", [None, 4000, 10**9])
def test_merged_files_have_the_size_that_is_asked_for(tmp_path, base_tensors, size):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors, shards=3)
    arrays = random_adapters(leaves, LoraConfig(r=2, target_modules=["q_proj"]))
    save_merged(arrays, leaves, FAMILY, base, tmp_path / "own")
    report = save_merged(arrays, leaves, FAMILY, base, tmp_path / "out", max_shard_bytes=size)
    assert every_tensor(tmp_path / "out") == every_tensor(tmp_path / "own")
    written = sorted((tmp_path / "out").glob("*.safetensors"))
    index = tmp_path / "out" / "model.safetensors.index.json"
    total = sum(tensor.nbytes for tensor in all_of(base))
    if size == 10**9:
        assert [path.name for path in written] == ["model.safetensors"]
        assert not index.exists()
        return
    found = json.loads(index.read_text())
    assert found["metadata"]["total_size"] == total
    for path in written:
        held = load_file(path)  # a header that safetensors itself accepts
        assert {name for name, file in found["weight_map"].items() if file == path.name} == {*held}
        if size:
            assert sum(t.nbytes for t in held.values()) <= size or len(held) == 1
    if size is None:
        names = [path.name for path in written]
        assert names == sorted(path.name for path in base.glob("*.safetensors"))
    else:
        assert len(written) > total // size
    assert report.merged == 2


def test_files_without_a_merged_tensor_stay_as_they_are(tmp_path, base_tensors):
    leaves = leaves_of(tiny())
    base = write_folder(tmp_path / "base", base_tensors, shards=40)
    arrays = random_adapters(leaves, LoraConfig(r=2, target_modules=["q_proj"]))
    save_merged(arrays, leaves, FAMILY, base, tmp_path / "out")
    same = [
        path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
        for path in sorted(base.glob("*.safetensors"))
    ]
    assert same.count(False) == 2


def test_a_wrong_total_size_is_put_right(tmp_path, base_tensors):
    base = write_folder(tmp_path / "base", base_tensors, shards=3)
    path = base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"metadata": {"total_size": 7, "more": "kept"}}))
    leaves = leaves_of(tiny())
    save_merged(random_adapters(leaves, LORA), leaves, FAMILY, base, tmp_path / "out")
    written = json.loads((tmp_path / "out" / path.name).read_text())
    assert written == index | {"metadata": index["metadata"] | {"more": "kept"}}


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5e9), ("5GiB", 5 * 2**30), ("500MB", 5e8), ("1.5KB", 1500), ("700", 700), (700, 700)],
)
def test_sizes_are_those_of_transformers(text, size):
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 GB", "-5GB", "5gb", "0GB", "5GBs", "nan", "9" * 400])
def test_what_is_no_size(text):
    with pytest.raises(InputError, match="max_shard_size must be a size such as 5GB"):
        shard_bytes(text)


def test_a_nan_in_a_weight_without_adapter_ends_a_merge(tmp_path):
    leaves, tensors = leaves_of(tiny()), random_tensors(tiny())
    tensors["model.norm.weight"][3] = np.nan
    base = write_folder(tmp_path / "m", tensors)
    with pytest.raises(InputError, match=r"hold a NaN or an infinity.*'model\.norm\.weight'"):
        save_merged(random_adapters(leaves, LORA), leaves, FAMILY, base, tmp_path / "out")
    assert os.listdir(tmp_path) == ["m"]


def test_links_beside_the_weights_are_refused_before_any_work(tmp_path, monkeypatch):
    leaves, base = leaves_of(tiny()), write_folder(tmp_path / "m", random_tensors(tiny()))
    (tmp_path / "elsewhere.json").write_text("{}")
    (base / "vocab.json").symlink_to(tmp_path / "elsewhere.json")
    monkeypatch.setattr("lora_tune.hf.save.Merger", None)  # what would do the work
    with pytest.raises(InputError, match=r"vocab\.json: is a link to"):
        save_merged(random_adapters(leaves, LORA), leaves, FAMILY, base, tmp_path / "out")
    (base / "model.safetensors").unlink()
    (base / INDEX).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(InputError, match=r"index\.json: is a link to"):
        open_checkpoint(base)
