# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files: read with every claim checked, and written.

A file is the length of its header, the header as JSON, and the bytes of its tensors, one after the
other without a gap. What passes here the `safetensors` library accepts as well, with the same
tensors; unlike it, nothing is mapped and each fault has the tensor's name.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lora_tune.errors import InputError, short
from lora_tune.hf.folder import remedy
from lora_tune.hf.tensors import Tensor

_LONGEST = 100_000_000
"""Bytes that a header may have."""
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0", "F8_E5M2", "F8_E4M3"), 8),
    **dict.fromkeys(("F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_KEYS = {"dtype", "shape", "data_offsets"}


def read_header(path: Path) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of one safetensors file in the order of their bytes, and its metadata.

    Raises:
      InputError: the file cannot be read, is truncated, or its header contradicts itself.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = _text(file, size)
        begin = 8 + len(text)
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        metadata = _metadata(header)
        tensors = list(_tensors(path, begin, header))
        tensors.sort(key=lambda t: (t.start, t.stop))
        _check_bytes(tensors, begin, size)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except RecursionError as error:
        raise InputError(_invalid(path, "its header is nested without end")) from error
    except ValueError as error:
        raise InputError(_invalid(path, str(error))) from error
    return tensors, metadata


def raw_header(path: Path) -> bytes:
    """The header of a file that `read_header` has accepted, its length in front, as it lies."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(struct.unpack("<Q", length)[0])


Entry = tuple[str, str, tuple[int, ...], int]
"""Name, type, shape and bytes of a tensor."""


def header_bytes(tensors: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The header for tensors that follow in this order, its length in front."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, code, shape, nbytes in tensors:
        span = [offset, offset + nbytes]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": span}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_array(out: BinaryIO, array: np.ndarray) -> None:
    """Writes an array's bytes in row-major order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    out.write(flat.view(np.uint8).data)


def nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Size of an array in bytes."""
    return math.prod(shape) * dtype.itemsize


def _invalid(path: Path, reason: str) -> str:
    return f"{path}: not a valid safetensors file ({reason}); {remedy(path.parent)}"


def _text(file: BinaryIO, size: int) -> bytes:
    if size < 8:
        raise ValueError(f"it has {size} bytes, a header alone has more")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LONGEST:
        raise ValueError(f"its header claims {length:,} bytes, at most {_LONGEST:,} are allowed")
    text = file.read(min(length, size - 8))
    if len(text) < length:
        raise ValueError(f"its header claims {length:,} bytes, the file ends after {len(text):,}")
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the header lists {short(twice)} twice")
    return found


def _metadata(header: dict[str, Any]) -> dict[str, str]:
    found = header.pop("__metadata__", None)
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ValueError("its metadata is not texts by name")
    "".join([*found, *found.values(), *header]).encode()  # halves of surrogate pairs are no text
    return found


def _tensors(path: Path, begin: int, header: Mapping[str, Any]) -> Iterator[Tensor]:
    for name, entry in header.items():
        try:
            dtype, shape, (start, stop) = _checked(entry)
        except ValueError as error:
            raise ValueError(f"at tensor {short(name)}: {error}") from error
        yield Tensor(name, name, path, dtype, tuple(shape), begin + start, begin + stop)


def _checked(entry: Any) -> tuple[str, list[int], list[int]]:
    """Type, shape and offsets of a tensor, which agree."""
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise ValueError("expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"unknown type {short(dtype)}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError("shape and data_offsets must be counts of elements and bytes")
    bits = _BITS[dtype]
    for count in shape:
        bits *= count
        if bits >= 2**63:
            raise ValueError(f"no file can hold shape {short(shape)}")
    claimed = offsets[1] - offsets[0]
    if bits != 8 * claimed:
        raise ValueError(
            f"{dtype} of shape {short(shape)} has {-(-bits // 8):,} bytes, its offsets say "
            f"{claimed:,}"
        )
    return dtype, shape, offsets


def _counts(value: Any) -> bool:
    # Of 63 bits, so that sizes can be added; no file has more.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_bytes(tensors: list[Tensor], begin: int, size: int) -> None:
    """Checks that the tensors fill the file from the header on, each byte once."""
    at = begin
    for tensor in tensors:
        if tensor.start != at:
            fault = "overlaps the one before it" if tensor.start < at else "follows unused bytes"
            raise ValueError(f"at tensor {short(tensor.name)}: it {fault}")
        at = tensor.stop
        if at > size:
            raise ValueError(
                f"at tensor {short(tensor.name)}: it ends at byte {at:,}, the file at {size:,}"
            )
    if at != size:
        raise ValueError(f"{size - at:,} bytes at its end belong to no tensor")
