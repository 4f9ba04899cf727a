# SPDX-License-Identifier: Apache-2.0
"""Writing whole models in the Hugging Face format: the base with its adapters merged, or ours."""

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
from lora_tune.hf.adapters import collect_adapters, flat_arrays
from lora_tune.hf.files import INDEX, Checkpoint, raise_listed, read_json
from lora_tune.hf.folder import check_companions, copy_companions, new_folder
from lora_tune.hf.header import Entry, header_bytes, nbytes, write_array
from lora_tune.hf.load import check_tensors, open_base
from lora_tune.hf.merge import Cell, Merger, MergeReport, entry_of, new_files, same_files
from lora_tune.hf.shards import index_of, plan_shards
from lora_tune.hf.table import Family, Leaf, Path, hf_state
from lora_tune.hf.tensors import CODES, Tensor, all_finite, reading
from lora_tune.progress import Progress, counted

FULL_SHARD = 5 * 10**9
"""Bytes of a shard where no base says how large they are."""
_OWN = ("config.json",)
"""What a whole model of ours does not copy."""


def save_merged(
    state: nnx.State | Mapping[Path, Any],
    leaves: Sequence[Leaf],
    family: Family,
    base_folder: FilePath | str,
    out_dir: FilePath | str,
    *,
    max_shard_bytes: int | None = None,
    card: str | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Writes the base checkpoint with the adapters added to its weights.

    A merged tensor is `base + scale * A B`, computed in float32 (float64 where the file has that)
    from the base file's own values and rounded once to the file's type. Every other tensor, those
    the model does not hold included, is copied byte for byte, in the same order, and into the same
    shards unless `max_shard_bytes` is given. Configuration, tokenizer and templates come along.
    Each of a few threads has a few MB of the base in memory.

    Args:
      state: the adapters (see `collect_adapters`); base weights in it are not read.
      leaves: the bound table of the model.
      family: its table.
      base_folder: the checkpoint that the model was loaded from.
      out_dir: folder to write; may be an earlier result, which is then replaced.
      max_shard_bytes: a shard is closed before its tensors would exceed this; None keeps the
        base's shards.
      card: text of its README.md, None for none.
      progress: called with (bytes done, bytes in all).

    Raises:
      InputError: the base does not fit the model, a merged value or a weight of the model is not
        finite, a file beside the weights is a link out of the base's folder, `out_dir` is not
        ours to replace, or the disk is full (nothing is left behind).
    """
    base = open_base(base_folder, family)
    check_companions(base.folder)
    check_tensors(base, leaves, family)
    changes: dict[str, Cell] = {}
    for adapter in collect_adapters(state, leaves).values():
        changes |= {adapter.leaf.names[cell]: (adapter, cell) for cell in adapter.cells()}
    outputs = same_files(base) if max_shard_bytes is None else new_files(base, max_shard_bytes)
    out_dir = FilePath(out_dir)
    total = sum(tensor.nbytes for output in outputs for tensor in output.tensors)
    with new_folder(out_dir, kind="merged", size=sum(output.size for output in outputs)) as folder:
        with reading() as (reader, pool):
            merger = Merger(base, changes, reader, pool, counted(progress, total))
            report = merger.write(outputs, folder)
        _check_used(base, leaves, report)
        if max_shard_bytes is None:
            _keep_index(base, total, folder)
        elif len(outputs) > 1:
            shards = {output.name: [*map(entry_of, output.tensors)] for output in outputs}
            _write_json(folder / INDEX, index_of(shards))
        copy_companions(base.folder, folder)
        config = read_json(base.folder / "config.json")
        if (portable := family.portable_config(config)) != config:
            _write_json(folder / "config.json", portable)
        _write_card(folder, card)
    return report


def _check_used(base: Checkpoint, leaves: Sequence[Leaf], report: MergeReport) -> None:
    """Checks that what was copied with a NaN or an infinity is nothing that the model uses."""
    names = itertools.chain.from_iterable(leaf.names.ravel() for leaf in leaves)
    used = {tensor.stored: tensor for tensor in map(base.tensors.__getitem__, names)}
    raise_listed(
        f"{base.folder}: weights hold a NaN or an infinity, so the checkpoint is damaged",
        [used[name].where for name in report.not_finite if name in used],
    )


def _keep_index(base: Checkpoint, total: int, folder: FilePath) -> None:
    """Copies the base's index, if it has one; a total size in it that is wrong is put right."""
    if base.index is None:
        return
    found = base.index.get("metadata")
    metadata = found if isinstance(found, dict) else {}
    if metadata.get("total_size") == total:
        shutil.copyfile(base.folder / INDEX, folder / INDEX)
    else:
        right = {**metadata, "total_size": total}
        _write_json(folder / INDEX, {**base.index, "metadata": right})


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
    max_shard_bytes: int = FULL_SHARD,
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
      InputError: a weight is not finite, a file beside the weights is a link out of its folder,
        `out_dir` is not ours to replace, or the disk is full (nothing is left behind).
      ValueError: `state` lacks a parameter or holds one of the wrong shape.
    """
    config_folder = FilePath(config_folder)
    check_companions(config_folder, skip=_OWN)
    arrays = flat_arrays(state)
    missing = [leaf.dotted for leaf in leaves if leaf.path not in arrays]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}")
    types = [np.dtype(dtype or arrays[leaf.path].dtype) for leaf in leaves]
    entries = [*_entries(leaves, types, stored or {}), *map(entry_of, carried)]
    sizes = [entry[3] for entry in entries]
    shards = plan_shards(entries, sizes, max_shard_bytes)
    tensors = itertools.chain(
        _all_tensors(leaves, types, arrays), (tensor.bytes() for tensor in carried)
    )
    with new_folder(FilePath(out_dir), kind="full", size=sum(sizes)) as folder:
        for name, entries in shards.items():
            with (folder / name).open("wb") as out:
                out.write(header_bytes(entries, {"format": "pt"}))
                for _ in entries:
                    write_array(out, next(tensors))
        if len(shards) > 1:
            _write_json(folder / INDEX, index_of(shards))
        copy_companions(config_folder, folder, skip=_OWN)
        config = family.portable_config(read_json(config_folder / "config.json"))
        _write_json(folder / "config.json", _with_dtype(config, types))
        _write_card(folder, card)


def _all_tensors(
    leaves: Sequence[Leaf], types: Sequence[np.dtype], arrays: Mapping[Path, Any]
) -> Iterator[np.ndarray]:
    for leaf, dtype in zip(leaves, types, strict=True):
        for name, tensor in hf_state(leaf, arrays[leaf.path]):
            with np.errstate(over="ignore"):
                cast = tensor.astype(dtype)
            if not all_finite(np.ascontiguousarray(cast)):
                raise InputError(f"{name}: holds a NaN or an infinity as {dtype}; not written")
            yield cast


def _entries(
    leaves: Sequence[Leaf], types: Sequence[np.dtype], stored: Mapping[str, str]
) -> Iterator[Entry]:
    for leaf, dtype in zip(leaves, types, strict=True):
        for name in leaf.names.ravel():
            yield stored.get(name, name), CODES[dtype], leaf.hf_shape, nbytes(leaf.hf_shape, dtype)


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
