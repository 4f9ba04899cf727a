# SPDX-License-Identifier: Apache-2.0
"""Reading and writing safetensors: lazily by slices, and never more than the file says.

The `safetensors` library validates every header (sizes, offsets, overlaps, truncation); the tensor
bytes are then memory-mapped, so that a slice costs only the pages it touches and an untouched
tensor can be copied byte for byte whatever its type.
"""

import dataclasses
import itertools
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from lora_tune.errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""The types that weights may have, by the name that the header uses."""
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file: where it lies and what it is.

    `name` is what the table calls it, `stored` what the file does. A part of a fused tensor, which
    is a tensor to the table, is called in both as if it lay in the file on its own.
    """

    name: str
    stored: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{self.file}: tensor {self.stored!r}"

    def bytes(self) -> np.ndarray:
        """All bytes of the tensor, memory-mapped: uint8 `[nbytes]`."""
        if self.start == self.stop:
            return np.empty(0, np.uint8)
        return np.memmap(
            self.file, np.uint8, mode="r", offset=self.start, shape=(self.stop - self.start,)
        )

    def array(self) -> np.ndarray:
        """The tensor, memory-mapped; index it to read a part.

        Raises:
          InputError: the type is not a floating-point type of at least 16 bits.
        """
        if self.dtype not in DTYPES:
            raise InputError(
                f"{self.where} has type {self.dtype}, expected one of {', '.join(DTYPES)}; "
                "quantised checkpoints cannot be read, use the unquantised one"
            )
        return self.bytes().view(DTYPES[self.dtype]).reshape(self.shape)


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
        if not (folder / name).is_file():
            problems.append(f"{folder / INDEX} names {name}, which is not in the folder")
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
    if index is not None:
        problems += _index_problems(folder, index["weight_map"], stored)
    raise_listed(f"{folder}: damaged checkpoint", problems)
    return Checkpoint(folder, found, files, parts, metadata, index)


def _rename(tensor: Tensor, renamed: Sequence[tuple[str, str]]) -> Tensor:
    name = tensor.stored
    for pattern, instead in renamed:
        name = re.sub(pattern, instead, name, count=1)
    return dataclasses.replace(tensor, name=name)


def _cut(tensor: Tensor, fused: Sequence[tuple[str, Sequence[str]]]) -> tuple[Tensor, ...]:
    """The matrices in a fused tensor: its rows are contiguous, so each is a range of bytes."""
    home, _, last = tensor.name.rpartition(".")
    names = dict(fused).get(last, ())
    if not names or len(tensor.shape) != 3 or not tensor.shape[0] or tensor.shape[1] % len(names):
        return ()
    experts, rows, columns = tensor.shape
    stored_home = tensor.stored.rpartition(".")[0]
    size = (tensor.stop - tensor.start) // (experts * len(names))
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


def read_header(path: Path) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of one safetensors file in the order of their bytes, and its metadata.

    Raises:
      InputError: the file cannot be read, is truncated, or its header contradicts itself.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
        header, begin = _parse(path)
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise InputError(
            f"{path}: not a valid safetensors file ({reason}){_culprit(path)}; download it again"
        ) from error
    metadata = header.pop("__metadata__", {})
    tensors = [
        Tensor(
            name,
            name,
            path,
            entry["dtype"],
            tuple(entry["shape"]),
            begin + entry["data_offsets"][0],
            begin + entry["data_offsets"][1],
        )
        for name, entry in header.items()
    ]
    return sorted(tensors, key=lambda t: (t.start, t.stop)), metadata


def write_header(
    out: BinaryIO, tensors: Iterator[tuple[str, str, tuple[int, ...], int]], metadata: Any
) -> None:
    """Writes the header for tensors (name, type code, shape, bytes) that follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, code, shape, nbytes in tensors:
        span = [offset, offset + nbytes]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": span}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)


def write_array(out: BinaryIO, array: np.ndarray) -> None:
    """Writes an array's bytes in row-major order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    out.write(flat.view(np.uint8).data)


def nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Size of an array in bytes."""
    return math.prod(shape) * dtype.itemsize


def raise_listed(what: str, problems: list[str], *, most: int = 20) -> None:
    """Raises one InputError for all problems, naming the first `most` of them; none is fine."""
    if problems:
        more = f"; and {len(problems) - most} more" if len(problems) > most else ""
        raise InputError(f"{what}: " + "; ".join(problems[:most]) + more)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      InputError: the file is missing, is not JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _shards(folder: Path) -> tuple[list[str], dict[str, Any] | None]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    single, index_path = folder / SINGLE, folder / INDEX
    if single.exists() and index_path.exists():
        raise InputError(f"{folder}: has both {SINGLE} and {INDEX}; remove the one that is stale")
    if single.exists():
        return [SINGLE], None
    if not index_path.exists():
        raise InputError(
            f"{folder}: has neither {SINGLE} nor {INDEX}; only safetensors weights can be read"
        )
    index = read_json(index_path)
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise InputError(f"{index_path}: expected a non-empty object under 'weight_map'")
    names = sorted({str(name) for name in weights.values()})
    bad = [n for n in names if Path(n).name != n or "\\" in n or not n.endswith(".safetensors")]
    raise_listed(
        f"{index_path}: shards must be plain names of safetensors files in this folder",
        [repr(name) for name in bad],
    )
    return names, index


def _index_problems(folder: Path, weights: Mapping[str, str], found: Any) -> list[str]:
    where = folder / INDEX
    problems = []
    for name, file in weights.items():
        if name not in found:
            problems.append(f"{where} lists {name}, which {file} does not hold")
        elif found[name].file.name != file:
            problems.append(f"{where} lists {name} in {file}, it lies in {found[name].file.name}")
    extra = [tensor for name, tensor in found.items() if name not in weights]
    return problems + [f"{tensor.where} is not in {INDEX}" for tensor in extra]


def _parse(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        text = file.read(min(length, path.stat().st_size))
    return json.loads(text, object_pairs_hook=_unique), 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"the header lists {twice[0]!r} twice")
    return dict(pairs)


def _culprit(path: Path) -> str:
    """Names the first tensor that the file cannot hold, when the header can be read at all."""
    try:
        header, begin = _parse(path)
        size = path.stat().st_size - begin
        for name, entry in header.items():
            if name != "__metadata__" and _lies(entry, size):
                return f" at tensor {name!r}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return ""
    return ""


def _lies(entry: Mapping[str, Any], size: int) -> bool:
    start, stop = entry["data_offsets"]
    known = DTYPES.get(entry["dtype"])
    wrong = known is not None and stop - start != nbytes(tuple(entry["shape"]), known)
    return wrong or not 0 <= start <= stop <= size
