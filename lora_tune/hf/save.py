# SPDX-License-Identifier: Apache-2.0
"""Writing whole models in the Hugging Face format: the base with its adapters merged, or ours."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lora_tune.errors import InputError
from lora_tune.hf.adapters import Adapter, collect_adapters, flat_arrays
from lora_tune.hf.files import (
    CODES,
    DTYPES,
    INDEX,
    SINGLE,
    Checkpoint,
    Tensor,
    nbytes,
    read_json,
    write_array,
    write_header,
)
from lora_tune.hf.folder import copy_companions, new_folder
from lora_tune.hf.load import check_tensors, open_base
from lora_tune.hf.table import Family, Leaf, Path, hf_state

Cell = tuple[Adapter, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What a merge did: tensors changed and copied, and the largest error of the one rounding."""

    merged: int
    untouched: int
    max_rounding: float


def save_merged(
    state: nnx.State | Mapping[Path, Any],
    leaves: Sequence[Leaf],
    family: Family,
    base_folder: FilePath | str,
    out_dir: FilePath | str,
    *,
    card: str | None = None,
) -> MergeReport:
    """Writes the base checkpoint with the adapters added to its weights.

    A merged tensor is `base + scale * A B`, computed in float32 from the base file's own values
    and rounded once to the file's type. Every other tensor, those the model does not hold
    included, is copied byte for byte, into the same shards, in the same order. Configuration,
    tokenizer and templates come along. One tensor at a time is in memory.

    Args:
      state: the adapters (see `collect_adapters`); base weights in it are not read.
      leaves: the bound table of the model.
      family: its table.
      base_folder: the checkpoint that the model was loaded from.
      out_dir: folder to write; may be an earlier result, which is then replaced.
      card: text of its README.md, None for none.

    Raises:
      InputError: the base does not fit the model, a merged value is not finite, `out_dir` is not
        ours to replace, or the disk is full (nothing is left behind).
    """
    base = open_base(base_folder, family)
    check_tensors(base, leaves, family)
    changes: dict[str, Cell] = {}
    for adapter in collect_adapters(state, leaves).values():
        changes |= {adapter.leaf.names[cell]: (adapter, cell) for cell in adapter.cells()}
    worst = 0.0
    with new_folder(FilePath(out_dir), kind="merged") as folder:
        for file in base.files:
            worst = max(worst, _merge_file(base, file, folder / file, changes))
        if base.index is not None:
            shutil.copyfile(base.folder / INDEX, folder / INDEX)
        copy_companions(base.folder, folder)
        config = read_json(base.folder / "config.json")
        if (portable := family.portable_config(config)) != config:
            _write_json(folder / "config.json", portable)
        _write_card(folder, card)
    return MergeReport(len(changes), len(base.tensors) - len(changes), worst)


def save_full(
    state: nnx.State | Mapping[Path, Any],
    leaves: Sequence[Leaf],
    family: Family,
    config_folder: FilePath | str,
    out_dir: FilePath | str,
    *,
    dtype: DTypeLike | None = None,
    carried: Sequence[Tensor] = (),
    stored: Mapping[str, str] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    card: str | None = None,
) -> None:
    """Writes every parameter of a model as a new checkpoint.

    Args:
      state: the parameters.
      leaves: the bound table of the model.
      family: its table.
      config_folder: where `config.json`, tokenizer and templates are copied from; the type in
        `config.json` becomes that of the files.
      out_dir: folder to write; may be an earlier result, which is then replaced.
      dtype: type of the files, None for that of each array.
      carried: tensors of other checkpoints to copy byte for byte, after ours.
      stored: name of a tensor in the table -> name to write, where that is another.
      max_shard_bytes: a shard is closed before it would grow beyond this.
      card: text of the folder's README.md, None for none.

    Raises:
      InputError: a weight is not finite, `out_dir` is not ours to replace, or the disk is full
        (nothing is left behind).
      ValueError: `state` lacks a parameter or holds one of the wrong shape.
    """
    arrays = flat_arrays(state)
    missing = [leaf.dotted for leaf in leaves if leaf.path not in arrays]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}")
    types = [np.dtype(dtype or arrays[leaf.path].dtype) for leaf in leaves]
    entries = [*_entries(leaves, types, stored or {}), *map(_entry, carried)]
    shards = _plan_shards(entries, max_shard_bytes)
    tensors = itertools.chain(
        _all_tensors(leaves, types, arrays), (tensor.bytes() for tensor in carried)
    )
    config_folder = FilePath(config_folder)
    with new_folder(FilePath(out_dir), kind="full") as folder:
        for name, entries in shards.items():
            with (folder / name).open("wb") as out:
                write_header(out, iter(entries), {"format": "pt"})
                for _ in entries:
                    write_array(out, next(tensors))
        if len(shards) > 1:
            _write_json(folder / INDEX, _index(shards))
        copy_companions(config_folder, folder, skip=("config.json",))
        config = family.portable_config(read_json(config_folder / "config.json"))
        _write_json(folder / "config.json", _with_dtype(config, types))
        _write_card(folder, card)


def _merge_file(
    base: Checkpoint, file: str, target: FilePath, changes: Mapping[str, Cell]
) -> float:
    worst = 0.0
    tensors = base.files[file]
    with target.open("wb") as out:
        write_header(out, map(_entry, tensors), {**base.metadata[file], "format": "pt"})
        for tensor in itertools.chain.from_iterable(map(base.cut, tensors)):
            if tensor.name in changes:
                merged, rounding = _merge(tensor, *changes[tensor.name])
                worst = max(worst, rounding)
                write_array(out, merged)
            else:
                write_array(out, tensor.bytes())
    return worst


def _merge(tensor: Tensor, adapter: Adapter, cell: tuple[int, ...]) -> tuple[np.ndarray, float]:
    a, b, scale = adapter.factors(cell)
    # Only projections carry adapters, and Hugging Face has their kernels transposed. Products in
    # that layout, and sums in place, take half the time.
    exact = b.T @ a.T
    exact *= np.float32(scale)
    exact += tensor.array()
    with np.errstate(over="ignore"):
        merged = exact.astype(DTYPES[tensor.dtype])
    exact -= merged
    rounding = float(np.abs(exact, out=exact).max(initial=0.0))
    if not np.isfinite(rounding):
        raise InputError(
            f"{tensor.where}: the merged weight is not finite in {tensor.dtype}; the adapter has "
            "diverged, use an earlier checkpoint"
        )
    return merged, rounding


def _all_tensors(
    leaves: Sequence[Leaf], types: Sequence[np.dtype], arrays: Mapping[Path, Any]
) -> Iterator[np.ndarray]:
    for leaf, dtype in zip(leaves, types, strict=True):
        for name, tensor in hf_state(leaf, arrays[leaf.path]):
            with np.errstate(over="ignore"):
                cast = tensor.astype(dtype)
            if not np.isfinite(cast).all():
                raise InputError(f"{name}: holds a NaN or an infinity as {dtype}; not written")
            yield cast


Entry = tuple[str, str, tuple[int, ...], int]


def _entry(tensor: Tensor) -> Entry:
    return tensor.stored, tensor.dtype, tensor.shape, tensor.stop - tensor.start


def _entries(
    leaves: Sequence[Leaf], types: Sequence[np.dtype], stored: Mapping[str, str]
) -> Iterator[Entry]:
    for leaf, dtype in zip(leaves, types, strict=True):
        for name in leaf.names.ravel():
            yield stored.get(name, name), CODES[dtype], leaf.hf_shape, nbytes(leaf.hf_shape, dtype)


def _plan_shards(entries: Sequence[Entry], most: int) -> dict[str, list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry[3] > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry[3]
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, start=1)}


def _index(shards: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    total = sum(entry[3] for entries in shards.values() for entry in entries)
    weights = {entry[0]: file for file, entries in shards.items() for entry in entries}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}


def _with_dtype(config: dict[str, Any], types: Sequence[np.dtype]) -> dict[str, Any]:
    """`config.json` with the type of most leaves, under the key that it already uses."""
    name = max(set(types), key=types.count).name
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {**config, key: name}


def _write_card(folder: FilePath, card: str | None) -> None:
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def _write_json(path: FilePath, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
