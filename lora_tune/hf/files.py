# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a model folder, and JSON beside them."""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_tune.errors import InputError, short, shown
from lora_tune.hf.folder import check_inside, remedy
from lora_tune.hf.header import read_header
from lora_tune.hf.tensors import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MOST_EXPERTS = 2**16
"""Of a fused tensor; one that says more is not taken apart, and so unknown to every model."""
_MOST_JSON = 10**8
"""Bytes of a JSON file."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The safetensors files of one model folder.

    Attributes:
      folder: the folder.
      tensors: name -> tensor, over all files; parts in place of fused tensors.
      files: file name -> its tensors in the order of the bytes.
      parts: stored name of a fused tensor -> its parts in the order of the bytes.
      metadata: file name -> the free-form metadata of its header.
      index: the index file's content, None for a single file.
    """

    folder: Path
    tensors: Mapping[str, Tensor]
    files: Mapping[str, tuple[Tensor, ...]]
    parts: Mapping[str, tuple[Tensor, ...]]
    metadata: Mapping[str, Mapping[str, str]]
    index: Mapping[str, Any] | None

    def cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The parts of a fused tensor of a file, or the tensor itself."""
        return self.parts.get(tensor.stored, (tensor,))


def open_checkpoint(
    folder: Path,
    *,
    renamed: Sequence[tuple[str, str]] = (),
    fused: Sequence[tuple[str, Sequence[str]]] = (),
) -> Checkpoint:
    """Reads the headers of a model folder: one `model.safetensors`, or shards with an index.

    Args:
      folder: the folder.
      renamed: (regular expression in a stored name, what stands there in `Tensor.name`).
      fused: (last part of the name of a tensor `[experts, rows, columns]`, the projections that
        share its rows equally).

    Raises:
      InputError: no weights, a broken or lying header, an index that leaves the folder or names
        files or tensors that are not there, a tensor in two shards.
    """
    names, index = _shards(folder)
    problems: list[str] = []
    files, metadata = {}, {}
    for name in names:
        check_inside(folder / name, folder)
        if not os.path.isfile(folder / name):
            problems.append(_no_file(folder, name, index))
            continue
        tensors, metadata[name] = read_header(folder / name)
        files[name] = tuple(_rename(tensor, renamed) for tensor in tensors)
    found: dict[str, Tensor] = {}
    stored = {tensor.stored: tensor for tensors in files.values() for tensor in tensors}
    parts = {name: split for name, whole in stored.items() if (split := _cut(whole, fused))}
    listed = itertools.chain.from_iterable(files.values())
    for tensor in (part for whole in listed for part in parts.get(whole.stored, (whole,))):
        if tensor.name in found:
            other = found[tensor.name]
            problems.append(f"{tensor.where} is also in {other.file.name}{_as(other, tensor)}")
        found[tensor.name] = tensor
    in_index = () if index is None else _index_problems(folder, index["weight_map"], stored)
    what = f"{folder}: damaged checkpoint ({remedy(folder)})"
    raise_listed(what, itertools.chain(problems, in_index))
    return Checkpoint(folder, found, files, parts, metadata, index)


def _no_file(folder: Path, name: str, index: Any) -> str:
    if os.path.isdir(folder / name):
        return f"{folder / name} is a folder, expected a file"
    if index is None:
        return f"{folder / name} is a link to what is not there"
    return f"{folder / INDEX} names {shown(name)}, which is not in the folder"


def _rename(tensor: Tensor, renamed: Sequence[tuple[str, str]]) -> Tensor:
    name = tensor.stored
    for pattern, instead in renamed:
        name = re.sub(pattern, instead, name, count=1)
    return tensor if name == tensor.stored else dataclasses.replace(tensor, name=name)


def _cut(tensor: Tensor, fused: Sequence[tuple[str, Sequence[str]]]) -> tuple[Tensor, ...]:
    """The matrices in a fused tensor: its rows are contiguous, so each is a range of bytes."""
    home, _, last = tensor.name.rpartition(".")
    names = next((projections for end, projections in fused if end == last), ())
    if not names or len(tensor.shape) != 3 or not tensor.nbytes or tensor.shape[1] % len(names):
        return ()
    experts, rows, columns = tensor.shape
    if experts > _MOST_EXPERTS:
        return ()
    stored_home = tensor.stored.rpartition(".")[0]
    size = tensor.nbytes // (experts * len(names))
    return tuple(
        dataclasses.replace(
            tensor,
            name=f"{home}.{i // len(names)}.{names[i % len(names)]}.weight",
            stored=f"{stored_home}.{i // len(names)}.{names[i % len(names)]}.weight",
            shape=(rows // len(names), columns),
            start=tensor.start + i * size,
            stop=tensor.start + (i + 1) * size,
        )
        for i in range(experts * len(names))
    )


def _as(other: Tensor, tensor: Tensor) -> str:
    return "" if other.stored == tensor.stored else f" as {other.stored!r}"


def weights_size(folder: Path) -> int:
    """Bytes of a model's safetensors files; other files of weights beside them are not read.

    Raises:
      InputError: a broken index.
    """
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return 0
    files = (folder / name for name in _shards(folder)[0])
    return sum(file.stat().st_size for file in files if file.is_file())


def raise_listed(what: str, problems: Iterable[str], *, most: int = 20) -> None:
    """Raises one InputError for all problems, naming the first `most` of them; none is fine."""
    each = iter(problems)
    first = list(itertools.islice(each, most))
    if first:
        left = sum(1 for _ in each)
        more = f"; and {left} more" if left else ""
        raise InputError(f"{what}: " + "; ".join(first) + more)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      InputError: the file is missing, too large, not JSON, or holds something else.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # As much memory is taken as is asked for.
            raw = file.read(min(size, _MOST_JSON) + 1)
    except OSError as error:
        advice = f"; {remedy(path.parent)}" if isinstance(error, FileNotFoundError) else ""
        raise InputError(f"{path}: cannot be read ({error.strerror}){advice}") from error
    if len(raw) > _MOST_JSON:
        raise InputError(
            f"{path}: is larger than {_MOST_JSON // 10**6} MB, which no file of a model "
            f"is; {remedy(path.parent)}"
        )
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not valid JSON ({error}); {remedy(path.parent)}") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{path}: expected a JSON object, got {type(content).__name__}; {remedy(path.parent)}"
        )
    return content


def _shards(folder: Path) -> tuple[list[str], dict[str, Any] | None]:
    if not os.path.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise InputError(f"{folder}: may not be read; change its permissions")
    index_path = folder / INDEX
    single, indexed = (os.path.lexists(path) for path in (folder / SINGLE, index_path))
    if single and indexed:
        raise InputError(f"{folder}: has both {SINGLE} and {INDEX}; remove the one that is stale")
    if single:
        return [SINGLE], None
    if not indexed:
        raise InputError(
            f"{folder}: has neither {SINGLE} nor {INDEX}; only safetensors weights can be read"
        )
    check_inside(index_path, folder)
    index = read_json(index_path)
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise InputError(f"{index_path}: expected a non-empty object under 'weight_map'")
    odd = [shown(name) for name, file in weights.items() if not isinstance(file, str)]
    raise_listed(f"{index_path}: expected the name of a file for each tensor", odd)
    names = sorted(set(weights.values()))
    bad = [n for n in names if Path(n).name != n or "\\" in n or not n.endswith(".safetensors")]
    bad += [name for name in names if not name.isprintable()]
    raise_listed(
        f"{index_path}: shards must be plain names of safetensors files in this folder",
        [short(name) for name in dict.fromkeys(bad)],
    )
    return names, index


def _index_problems(
    folder: Path, weights: Mapping[str, str], found: Mapping[str, Tensor]
) -> Iterator[str]:
    where = folder / INDEX
    for name, file in weights.items():
        if name not in found:
            yield f"{where} lists {shown(name)}, which {file} does not hold"
        elif (holder := found[name].file.name) != file:
            yield f"{where} lists {shown(name)} in {file}, it lies in {holder}"
    extra = (tensor for name, tensor in found.items() if name not in weights)
    yield from (f"{tensor.where} is not in {INDEX}" for tensor in extra)
