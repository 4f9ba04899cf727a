# SPDX-License-Identifier: Apache-2.0
"""Files of a base checkpoint written again with adapters added to some of their tensors.

Sizes do not change, so every byte has its place before any is written: threads read a few MB, add
what is to be added and write them, each on its own, while finished files go to the disk.
"""

import contextlib
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from lora_tune.errors import InputError
from lora_tune.hf.adapters import Adapter
from lora_tune.hf.files import Checkpoint
from lora_tune.hf.header import Entry, header_bytes, raw_header
from lora_tune.hf.shards import plan_shards
from lora_tune.hf.tensors import (
    CHUNK,
    DTYPES,
    Reader,
    Tensor,
    all_finite,
    check_readable,
    in_order,
    row_ranges,
)

Cell = tuple[Adapter, tuple[int, ...]]
_VALUES = 2**19
"""Values that are computed at a time: a few MB, and enough that the threads spend their time in
numpy rather than in waiting for the interpreter's lock."""


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
      merged, untouched: tensors changed and copied.
      max_rounding: the largest error of the one rounding.
      not_finite: stored names of copied tensors with a NaN or an infinity, as in the base.
    """

    merged: int
    untouched: int
    max_rounding: float
    not_finite: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """A file to write: its header, and the base's tensors that follow, in order."""

    name: str
    header: bytes
    tensors: Sequence[Tensor]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def same_files(base: Checkpoint) -> list[Output]:
    """The base's own files, their headers as they are where they say what transformers needs."""
    return [
        Output(
            name,
            raw_header(base.folder / name)
            if "format" in base.metadata[name]
            else header_bytes(map(entry_of, tensors), {**base.metadata[name], "format": "pt"}),
            tensors,
        )
        for name, tensors in base.files.items()
    ]


def new_files(base: Checkpoint, most: int) -> list[Output]:
    """The base's tensors in its order, in files of at most `most` bytes of tensors each."""
    tensors = [tensor for held in base.files.values() for tensor in held]
    shards = plan_shards(tensors, [tensor.nbytes for tensor in tensors], most)
    return [
        Output(name, header_bytes(map(entry_of, held), {"format": "pt"}), held)
        for name, held in shards.items()
    ]


def entry_of(tensor: Tensor) -> Entry:
    """What a header says of a tensor."""
    return tensor.stored, tensor.dtype, tensor.shape, tensor.nbytes


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Bytes of one tensor, whole rows if it is merged, and where they go."""

    tensor: Tensor
    start: int
    stop: int
    offset: int
    cell: Cell | None


class Merger:
    """Writes files with the tensors in `changes` merged and all others copied.

    Args:
      base: the checkpoint.
      changes: name of a tensor -> its adapter.
      reader: of the base's files.
      pool: threads that do the work.
      tell: called with bytes as they are written.
    """

    def __init__(
        self,
        base: Checkpoint,
        changes: Mapping[str, Cell],
        reader: Reader,
        pool: ThreadPoolExecutor,
        tell: Callable[[int], None],
    ) -> None:
        self._base, self._changes, self._reader = base, changes, reader
        self._pool, self._tell = pool, tell
        self._sums = _Sums()
        self._worst, self._not_finite = 0.0, dict[str, None]()

    def write(self, outputs: Sequence[Output], folder: Path) -> MergeReport:
        """Writes the files to a folder and waits until they are on the disk.

        Raises:
          InputError: a base file cannot be read, or a merged value is not finite.
          OSError: a file cannot be written.
        """
        # The threads of a product and ours would wait for each other.
        one_each = threadpool_limits(1, "blas")
        with one_each, ThreadPoolExecutor(1, "lora_tune_sync") as syncing:
            behind: Future[None] | None = None
            for output in outputs:
                with (folder / output.name).open("xb") as out:
                    self._write(output, out.fileno())
                    if behind is not None:
                        behind.result()
                    behind = syncing.submit(_sync, os.dup(out.fileno()))
            if behind is not None:
                behind.result()
        count, tensors = len(self._changes), len(self._base.tensors)
        return MergeReport(count, tensors - count, self._worst, tuple(sorted(self._not_finite)))

    def _write(self, output: Output, descriptor: int) -> None:
        def work(piece: _Piece) -> tuple[int, float]:
            data, rounding = self._bytes_of(piece)
            write_at(descriptor, data, piece.offset)
            return len(data), rounding

        write_at(descriptor, np.frombuffer(output.header, np.uint8), 0)
        with contextlib.closing(in_order(self._pool, work, self._pieces(output))) as results:
            for count, rounding in results:
                self._worst = max(self._worst, rounding)
                self._tell(count)

    def _pieces(self, output: Output) -> Iterator[_Piece]:
        at = len(output.header)
        for tensor in output.tensors:
            for part in self._base.cut(tensor):
                cell = self._changes.get(part.name)
                width = 1
                if cell is not None:
                    check_readable(part)
                    width = DTYPES[part.dtype].itemsize * math.prod(part.shape[1:])
                for low, high in row_ranges((part.nbytes // max(1, width),), width, CHUNK):
                    start, stop = low * width, high * width
                    yield _Piece(part, start, stop, at + start, cell)
                at += part.nbytes

    def _bytes_of(self, piece: _Piece) -> tuple[np.ndarray, float]:
        """What is to be written, uint8, and the largest error of rounding in it."""
        tensor = piece.tensor
        raw = self._reader.read(tensor, piece.start, piece.stop, passing=True)
        if tensor.dtype not in DTYPES:
            return raw, 0.0
        values = raw.view(DTYPES[tensor.dtype])
        if piece.cell is not None:
            rows = values.reshape(-1, tensor.shape[-1])
            first = piece.start // max(1, rows.itemsize * rows.shape[1])
            return raw, self._sums.add(tensor, rows, first, piece.cell)
        if not all_finite(values):
            self._not_finite[tensor.stored] = None
        return raw, 0.0


class _Sums(threading.local):
    """Adds adapters to rows, in memory that a thread keeps."""

    def __init__(self) -> None:
        self._exact, self._merged = np.empty(0, np.uint8), np.empty(0, np.uint8)

    def add(self, tensor: Tensor, rows: np.ndarray, first: int, cell: Cell) -> float:
        """Adds an adapter to rows of a tensor, in place, from row `first` of it on.

        Returns:
          The largest error of rounding.
        """
        adapter, place = cell
        a, b, scale = adapter.factors(place)
        kind = np.promote_types(np.float32, rows.dtype)
        a, b = a.astype(kind, copy=False), b.astype(kind, copy=False)
        worst = 0.0
        for low, high in row_ranges(rows.shape, 1, _VALUES):
            part = rows[low:high]
            exact, merged = self._room(part.shape, kind, part.dtype)
            # Only projections carry adapters, and Hugging Face has their kernels transposed.
            # Products in that layout, and sums in place, take half the time.
            with np.errstate(over="ignore", invalid="ignore"):  # reported below, by name
                np.matmul(b[:, first + low : first + high].T, a.T, out=exact)
                exact *= kind.type(scale)
                exact += part
                np.copyto(merged, exact, casting="unsafe")
                exact -= merged
            rounding = max(float(exact.max(initial=0.0)), -float(exact.min(initial=0.0)))
            if not np.isfinite(rounding):
                raise InputError(_not_finite(tensor, part))
            part[...] = merged
            worst = max(worst, rounding)
        return worst

    def _room(
        self, shape: tuple[int, ...], kind: np.dtype, stored: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays of a shape, whose values the next call writes over."""
        count = math.prod(shape)
        if self._exact.size < count * kind.itemsize:
            self._exact = np.empty(count * kind.itemsize, np.uint8)
        if self._merged.size < count * stored.itemsize:
            self._merged = np.empty(count * stored.itemsize, np.uint8)
        exact = self._exact[: count * kind.itemsize].view(kind).reshape(shape)
        return exact, self._merged[: count * stored.itemsize].view(stored).reshape(shape)


def _not_finite(tensor: Tensor, base: np.ndarray) -> str:
    if not all_finite(base):
        return f"{tensor.where}: the base holds a NaN or an infinity; the checkpoint is damaged"
    return (
        f"{tensor.where}: the merged weight is not finite in {tensor.dtype}; the adapter has "
        "diverged, use an earlier checkpoint"
    )


def write_at(descriptor: int, data: np.ndarray, offset: int) -> None:
    """Writes uint8 data to a place of a file."""
    rest = data.data
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def _sync(descriptor: int) -> None:
    with contextlib.closing(os.fdopen(descriptor, "rb")):
        os.fsync(descriptor)
