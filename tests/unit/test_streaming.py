# SPDX-License-Identifier: Apache-2.0
"""The files of an 80B model, as holes: names, time and memory without the bytes."""

import json
import time
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_cases import FAMILY, leaves_of, random_adapters, tiny
from sparse_case import qwen3_next_80b, write_sparse

from lora_tune import assets
from lora_tune.errors import InputError
from lora_tune.hf import tensors
from lora_tune.hf.load import Loader, check_tensors, ignored_tensors, load_params, open_base
from lora_tune.hf.save import save_merged
from lora_tune.hf.table import bind
from lora_tune.hf.tensors import CHUNK, THREADS, Reader, reading
from lora_tune.lora.config import LoraConfig
from lora_tune.models.decoder import Decoder, DecoderOptions

BF16 = tensors.DTYPES["BF16"]
IN_FLIGHT = 2 * THREADS * CHUNK + 2**24
"""Bytes that reading and computing may take beside what is made of them."""


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """The folder, the bound table and the shapes of the published model."""
    shapes, folder = qwen3_next_80b(), tmp_path_factory.mktemp("80b")
    write_sparse(folder, shapes, shards=41)
    config = Path(assets.__file__).parent / "configs" / "qwen3-next-80b-a3b.json"
    read = FAMILY.read_config(json.loads(config.read_text()))
    return folder, bind(FAMILY, Decoder(FAMILY, read, DecoderOptions())), shapes


def test_every_tensor_of_the_80b_is_accounted_for(big):
    folder, leaves, shapes = big
    begun = time.process_time()
    checkpoint = open_base(folder, FAMILY)
    check_tensors(checkpoint, leaves, FAMILY)
    assert time.process_time() - begun < 15  # about 1.5 alone
    held = {name: leaf.hf_shape for leaf in leaves for name in leaf.names.ravel()}
    left = {t.name: t.shape for t in ignored_tensors(folder, FAMILY)}
    assert held | left == shapes == {t.name: t.shape for t in checkpoint.tensors.values()}
    assert not held.keys() & left.keys()
    assert (len(held), len(left), len(checkpoint.files)) == (74_391, 1_553, 41)


class OneDevice:
    """A sharding of which this host holds one device's slice: 4 of 512 experts."""

    def addressable_devices_indices_map(self, shape):
        [axis] = [i for i, n in enumerate(shape) if n == 512 and i < len(shape) - 2]
        index = [slice(None)] * len(shape)
        index[axis] = slice(100, 104)
        return {jax.devices()[0]: tuple(index)}


@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_a_device_slice_of_stacked_experts_reads_only_its_bytes(big, monkeypatch, name):
    folder, leaves, _ = big
    checkpoint = open_base(folder, FAMILY)
    stacked = [leaf for leaf in leaves if leaf.dotted.endswith(f"experts.{name}.kernel")]
    leaf = max(stacked, key=lambda leaf: leaf.names.size)
    assert leaf.names.size == 36 * 512
    read, kept = [], []
    whole = Reader.read

    def counted(self, tensor, start=0, stop=None, **how):
        read.append((tensor.name, stop - start))
        return whole(self, tensor, start, stop, **how)

    monkeypatch.setattr(Reader, "read", counted)
    monkeypatch.setattr(jax, "device_put", lambda values, _: kept.append(values.shape) or values)
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda *_: None)
    tracemalloc.start()
    with reading() as (reader, pool):
        Loader(checkpoint, reader, pool, lambda _: None).load(leaf, BF16, OneDevice())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    share = 36 * 4 * 512 * 2048 * 2
    assert 2 * np.prod(kept[0]) == share == sum(size for _, size in read)
    assert {int(name.split("experts.")[1].split(".")[0]) for name, _ in read} == {*range(100, 104)}
    assert peak < share + IN_FLIGHT


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of which one tensor has 256 MB; its folder takes no disk."""
    model = tiny(vocab_size=8_000_000, tie_word_embeddings=True)
    shapes = {str(n): leaf.hf_shape for leaf in leaves_of(model) for n in leaf.names.ravel()}
    folder = tmp_path_factory.mktemp("wide")
    write_sparse(folder, shapes, shards=2)
    (folder / "config.json").write_text("{}")
    return folder, model


def peak_of(work):
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_merging_holds_a_few_pieces_of_a_tensor(wide, tmp_path):
    folder, model = wide
    leaves = leaves_of(model)
    arrays = random_adapters(leaves, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    assert (
        peak_of(lambda: save_merged(arrays, leaves, FAMILY, folder, tmp_path / "out")) < IN_FLIGHT
    )


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_loading_holds_the_parameters_and_a_few_pieces(wide, dtype):
    folder, model = wide
    peak = peak_of(lambda: load_params(model, FAMILY, folder, dtype=dtype))
    assert peak < 128e6 * np.dtype(dtype).itemsize + IN_FLIGHT


def test_a_merge_that_does_not_fit_the_disk_is_not_begun(wide, tmp_path, monkeypatch):
    folder, model = wide
    usage = type("Usage", (), {"free": 200_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    arrays = random_adapters(leaves_of(model), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(InputError, match=r"0\.3 GB are to be written and the disk has 0\.2 GB"):
        save_merged(arrays, leaves_of(model), FAMILY, folder, tmp_path / "out")
    assert not list(tmp_path.iterdir())
