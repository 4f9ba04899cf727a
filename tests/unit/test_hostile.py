# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files: one sentence each, and nothing read or written elsewhere."""

import json
import os
import re
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hf_cases import FAMILY, leaves_of, random_adapters, random_tensors, tiny, write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import share
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lora_tune.errors import InputError
from lora_tune.export.write import not_finite_note
from lora_tune.hf import tensors as reading
from lora_tune.hf.files import INDEX, SINGLE, open_checkpoint
from lora_tune.hf.header import read_header
from lora_tune.hf.load import load_params
from lora_tune.hf.save import save_merged
from lora_tune.hf.tensors import Tensor
from lora_tune.lora.config import LoraConfig

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])


def one_sentence(error: InputError) -> str:
    text = str(error)
    assert text.isprintable(), text
    text.encode()
    return text


def refused(path: Path, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        read_header(path)
    assert str(path) in one_sentence(caught.value)


def with_header(
    path: Path, text: bytes | str, data: bytes = b"", length: int | None = None
) -> Path:
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ({"a": entry(offsets=(0, 8), shape=(2,))}, "ends at byte"),
        ({"a": entry(), "b": entry()}, "'b': it overlaps"),
        ({"a": entry(offsets=(4, 8))}, "'a': it follows unused bytes"),
        ({}, "4 bytes at its end belong to no tensor"),
        ({"a": entry(dtype="BF16")}, "BF16 of shape .* has 2 bytes, its offsets say 4"),
        ({"a": entry(offsets=(4, 0))}, "its offsets say -4"),
        ({"a": entry(offsets=(-4, 0))}, "must be counts"),
        ({"a": entry(shape=(1.0,))}, "must be counts"),
        ({"a": entry(shape=(True,))}, "must be counts"),
        ({"a": entry(shape=(2**63,))}, "must be counts"),
        ({"a": entry(shape=(2**40, 2**40, 0))}, "no file can hold"),
        ({"a": entry(shape=(2**62,) * 10_000)}, "no file can hold"),
        ({"a": entry(offsets=(0, 2, 4))}, "must be counts"),
        ({"a": entry(dtype="F33")}, "unknown type 'F33'"),
        ({"a": entry(dtype=["F32"])}, "unknown type"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "expected dtype, shape"),
        ({"a": {**entry(), "more": 1}}, "expected dtype, shape"),
        ({"a": []}, "expected dtype, shape"),
        ({"\x1b[2J\n": entry(dtype="F33")}, r"at tensor '\\x1b\[2J\\n'"),
        ({"a": entry(), "__metadata__": {"format": 1}}, "metadata is not texts"),
        ({"a": entry(), "__metadata__": []}, "metadata is not texts"),
        ({"\ud800": entry()}, "surrogates not allowed"),
    ],
)
def test_a_header_that_lies(tmp_path, header, fault):
    path = with_header(tmp_path / SINGLE, json.dumps(header), b"\0" * 4)
    refused(path, f"not a valid safetensors file .*{fault}")
    if "more" not in header.get("a", {}):  # which the library does not mind
        with pytest.raises(SafetensorError), safe_open(path, "numpy"):
            pass


@pytest.mark.parametrize(
    ("text", "length", "fault"),
    [
        (b"", 2**63, "claims 9,223,372,036,854,775,808 bytes, at most"),
        (b"{}", 90_000_000, "the file ends after 2"),
        (b"[" * 200_000, None, "not a JSON object"),
        (b'{"a":' * 200_000, None, "nested without end"),
        (b"[]", None, "not a JSON object"),
        (b'{"\xff": 1}', None, "can't decode"),
        (b'{"a": ' + b"9" * 5000 + b"}", None, "digit"),
        (b"{}x", None, "Extra data"),
    ],
)
def test_a_header_that_is_none(tmp_path, text, length, fault):
    refused(with_header(tmp_path / SINGLE, text, length=length), fault)


def test_an_empty_file_and_a_folder(tmp_path):
    (tmp_path / SINGLE).write_bytes(b"")
    refused(tmp_path / SINGLE, "it has 0 bytes")
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(InputError, match=rf"{SINGLE} is a folder, expected a file"):
        open_checkpoint(tmp_path)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m", {"a": np.zeros(1, np.float32)})

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match=rf"{SINGLE}: cannot be read \(Permission denied\)"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("beside", "advice"),
    [
        ({"lora_tune_export.json": '{"kind": "merged"}'}, "write the folder again"),
        ({"adapter_config.json": "{}"}, "save the adapter again"),
        ({}, "copy or download it again"),
    ],
)
def test_the_advice_is_for_the_kind_of_folder(tmp_path, beside, advice):
    for name, text in beside.items():
        (tmp_path / name).write_text(text)
    refused(with_header(tmp_path / SINGLE, "{}", b"\0"), advice)


def test_the_advice_for_the_hubs_cache(tmp_path):
    folder = tmp_path / "models--o--n" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    refused(with_header(folder / SINGLE, "{}", b"\0"), "hub's cache and download it again")


@pytest.fixture
def folder(tmp_path):
    tensors = random_tensors(tiny(), ml_dtypes.bfloat16)
    return write_folder(tmp_path / "model", tensors, shards=3)


def merge(folder: Path, out: Path, **options):
    leaves = leaves_of(tiny())
    return save_merged(random_adapters(leaves, LORA), leaves, FAMILY, folder, out, **options)


def test_links_may_lead_to_the_blobs_of_the_hubs_cache_alone(tmp_path, folder):
    cache = tmp_path / "models--o--n"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / f"{number:040d}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040d}")
    merge(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    (tmp_path / "linked").symlink_to(snapshot)
    open_checkpoint(tmp_path / "linked")  # the folder itself may be a link

    shard = next(snapshot.glob("*.safetensors"))
    outside = tmp_path / "elsewhere.safetensors"
    shutil.copyfile(shard, outside)
    shard.unlink()
    shard.symlink_to(outside)
    with pytest.raises(InputError, match=rf"{shard.name}: is a link to {outside}, outside"):
        open_checkpoint(snapshot)
    shard.unlink()
    shard.symlink_to(shard.name)  # to itself
    with pytest.raises(InputError, match=rf"names {shard.name}, which is not in the folder"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize("name", ["LICENSE.txt", "additional_chat_templates/x.jinja"])
def test_a_companion_that_is_a_link_outside_is_not_copied(tmp_path, folder, name):
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(InputError, match=rf"{name}: is a link to {secret}, outside its folder"):
        merge(folder, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["id_rsa", "model"]


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        ({"a": 1}, "expected the name of a file for each tensor: a"),
        ({"a": None, "\x1b]": []}, r"expected the name of a file .*'\\x1b\]'"),
        ({"a": ".."}, "plain names"),
        ({"a": "/etc/passwd"}, "plain names"),
        ({"a": "x\n.safetensors"}, r"plain names of .*'x\\n\.safetensors'"),
        ({"a": "sub/x.safetensors"}, "plain names"),
    ],
)
def test_an_index_that_names_what_it_may_not(tmp_path, weights, fault):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(InputError, match=fault) as caught:
        open_checkpoint(tmp_path)
    one_sentence(caught.value)


def test_names_are_names_and_no_paths(tmp_path):
    tensors = random_tensors(tiny()) | {
        f"mtp.{name}": np.full(shape, 7, np.int16)
        for name, shape in (("../../up", (2,)), ("/etc/x", ()), ("ü\u202e", (0, 3)))
    }
    folder = write_folder(tmp_path / "model", tensors)
    merge(folder, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]
    out = open_checkpoint(tmp_path / "out").tensors
    for name, values in tensors.items():
        if name.startswith("mtp."):
            assert (out[name].shape, out[name].bytes().tobytes()) == (
                values.shape,
                values.tobytes(),
            )
    folder = write_folder(tmp_path / "unknown", tensors | {"x\x1b[2J": np.zeros(1)})
    with pytest.raises(InputError, match=r"'x\\x1b\[2J' in .* is unknown") as caught:
        load_params(tiny(), FAMILY, folder)
    one_sentence(caught.value)


@pytest.mark.parametrize("fault", ["shrinks", "vanishes"])
def test_a_file_that_changes_while_it_is_read(folder, tmp_path, monkeypatch, fault):
    """Mapped, a file that shrinks would end the process with SIGBUS."""
    path = sorted(folder.glob("*.safetensors"))[1]
    opened = open_checkpoint

    def change(*args, **kwargs):
        found = opened(*args, **kwargs)
        if fault == "shrinks":
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.unlink()
        return found

    monkeypatch.setattr("lora_tune.hf.load.open_checkpoint", change)
    with pytest.raises(
        InputError, match=rf"{re.escape(str(path))}: tensor .* cannot be read"
    ) as caught:
        load_params(tiny(), FAMILY, folder)
    one_sentence(caught.value)
    if fault == "shrinks":
        assert "the file has become shorter" in str(caught.value)


def test_a_merge_of_a_file_that_shrinks_leaves_nothing(folder, tmp_path, monkeypatch):
    path = sorted(folder.glob("*.safetensors"))[1]
    pieces = reading.row_ranges
    monkeypatch.setattr(
        "lora_tune.hf.merge.row_ranges",
        lambda *args: os.truncate(path, 5000) or pieces(*args),
    )
    with pytest.raises(InputError, match="the file has become shorter"):
        merge(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model"]


def test_all_damaged_weights_are_named_at_once(tmp_path):
    tensors = random_tensors(tiny())
    names = ["model.norm.weight", "model.layers.3.mlp.experts.1.up_proj.weight", "lm_head.weight"]
    for name, value in zip(names, (np.nan, np.inf, -np.inf), strict=True):
        tensors[name].flat[1] = value
    with pytest.raises(InputError, match="weights hold a NaN or an infinity") as caught:
        load_params(tiny(), FAMILY, write_folder(tmp_path / "m", tensors))
    assert all(repr(name) in str(caught.value) for name in names)


def test_what_is_copied_with_a_nan_is_named(tmp_path):
    tensors = random_tensors(tiny()) | {"mtp.norm.weight": np.full(3, np.nan, np.float32)}
    base = write_folder(tmp_path / "m", tensors)
    report = merge(base, tmp_path / "out")
    assert report.not_finite == ("mtp.norm.weight",)
    [note] = not_finite_note(report, base)
    assert note.startswith("warning: mtp.norm.weight hold a NaN or an infinity")
    assert (
        not_finite_note(
            merge(write_folder(tmp_path / "n", random_tensors(tiny())), tmp_path / "out"), base
        )
        == []
    )


def test_a_nan_in_the_base_is_not_blamed_on_the_adapter(tmp_path):
    tensors = random_tensors(tiny())
    tensors["model.layers.3.self_attn.q_proj.weight"][3, 2] = np.inf
    base = write_folder(tmp_path / "m", tensors)
    with pytest.raises(InputError, match=r"3\.self_attn\.q_proj.*the base holds a NaN"):
        merge(base, tmp_path / "out")


@pytest.mark.parametrize("code", ["F8_E4M3", "I8", "F4", "BOOL"])
def test_other_types_are_refused_for_weights_and_carried_otherwise(tmp_path, code):
    tensors = random_tensors(tiny())
    name = "model.layers.3.self_attn.q_proj.weight"
    shape, size = tensors[name].shape, tensors[name].size // (2 if code == "F4" else 1)
    del tensors[name]
    for held in (name, "mtp.q_proj.weight"):
        folder = write_folder(tmp_path / held, tensors)
        raw = (folder / SINGLE).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        header[held] = entry(code, shape, (len(data), len(data) + size))
        if held != name:
            at = len(data) + size
            header[name] = entry("F32", shape, (at, at + 4 * np.prod(shape).item()))
            data += b"\1" * size + b"\0" * (4 * np.prod(shape).item())
        else:
            data += b"\1" * size
        with_header(folder / SINGLE, json.dumps(header), data)
        if held == name:
            with pytest.raises(InputError, match=rf"{name} in .* has type {code}, .*quantised"):
                merge(folder, tmp_path / "out")
        else:
            merge(folder, tmp_path / "out")
            out = open_checkpoint(tmp_path / "out").tensors[held]
            assert (out.dtype, out.bytes().tobytes()) == (code, b"\1" * size)


SMALL = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.ones((4, 2), ml_dtypes.bfloat16),
    "c": np.zeros((), np.float16),
    "d": np.zeros((0, 5), np.float32),
}


def bytes_of(folder: Path) -> dict[str, tuple]:
    held = open_checkpoint(folder).tensors
    return {n: (t.file, t.dtype, t.shape, t.bytes().tobytes()) for n, t in held.items()}


@settings(max_examples=share(1.5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_changed_bytes_are_refused_or_change_nothing(tmp_path_factory, data):
    """Of headers and the index; where ours is read, so is the library's, and alike."""
    folder = tmp_path_factory.mktemp("mutated")
    write_folder(folder, SMALL, shards=2)
    before = bytes_of(folder)
    file = data.draw(st.sampled_from(sorted(p.name for p in folder.glob("model*"))))
    raw = bytearray((folder / file).read_bytes())
    end = len(raw) if file == INDEX else 8 + struct.unpack("<Q", raw[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(end, len(raw)) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "grow"]))
        value = data.draw(st.sampled_from(b'0129-[]{}",:. eF\x00\xff\x1b'))
        if how == "set":
            raw[at] = value
        elif how == "cut":
            del raw[at]
        else:
            raw.insert(at, value)
    (folder / file).write_bytes(raw)
    try:
        after = bytes_of(folder)
    except InputError as error:
        one_sentence(error)
        return
    if after != before:  # a type, shape or name that fits as well: the model's table tells
        assert file != INDEX
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as theirs:
            ours = {t.name: t for t in read_header(path)[0]}
            assert set(theirs.keys()) == set(ours)
            for name, tensor in ours.items():
                assert tuple(theirs.get_slice(name).get_shape()) == tensor.shape
                assert theirs.get_slice(name).get_dtype() == tensor.dtype


def test_our_types_are_those_of_the_library(tmp_path):
    """Every type that we let pass has the size that the library gives it."""
    from lora_tune.hf.header import _BITS

    for code, bits in _BITS.items():
        path = with_header(
            tmp_path / SINGLE, json.dumps({"a": entry(code, (8,), (0, bits))}), b"\0" * bits
        )
        with safe_open(path, "numpy") as theirs:
            assert theirs.get_slice("a").get_dtype() == code
        [tensor] = read_header(path)[0]
        assert isinstance(tensor, Tensor)
    save_file(SMALL, tmp_path / SINGLE)
    assert {t.name for t in read_header(tmp_path / SINGLE)[0]} == set(SMALL)
