# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files, and their bytes: read by position, never mapped.

A file that is mapped counts as memory of the process as far as it was touched, and one that
shrinks while it is mapped ends the process with a signal. Read by position, only what is asked for
is in memory, and a file that has shrunk is an error that names it.
"""

import contextlib
import dataclasses
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np

from lora_tune.errors import InputError, short

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""The types that weights may have, by the name that the header uses."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK = 8 * 2**20
"""Bytes of a file that one thread holds at a time."""
THREADS = min(8, max(2, os.cpu_count() or 1))
# The bits of infinity; greater ones, the sign aside, are those of NaN.
_INFINITY = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F800000,
    "float64": 0x7FF0000000000000,
}

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclasses.dataclass(frozen=True, slots=True)
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
        return f"{self.file}: tensor {short(self.stored)}"

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.stop - self.start

    def bytes(self) -> np.ndarray:
        """All bytes of the tensor: uint8 `[nbytes]`.

        Raises:
          InputError: the file can no longer be read, or has become shorter.
        """
        with Reader() as reader:
            return reader.read(self)

    def array(self) -> np.ndarray:
        """The tensor.

        Raises:
          InputError: the type is not a floating-point type of at least 16 bits, or as of `bytes`.
        """
        check_readable(self)
        return self.bytes().view(DTYPES[self.dtype]).reshape(self.shape)


def check_readable(tensor: Tensor) -> None:
    """Checks that a tensor's type is one that weights may have.

    Raises:
      InputError: it is quantised, or holds no weights.
    """
    if tensor.dtype not in DTYPES:
        raise InputError(
            f"{tensor.where} has type {tensor.dtype}, expected one of {', '.join(DTYPES)}; "
            "quantised checkpoints cannot be read, use the unquantised one"
        )


class Reader:
    """Reads ranges of files, which stay open until the reader is closed; threads may share it."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(
        self, tensor: Tensor, start: int = 0, stop: int | None = None, *, passing: bool = False
    ) -> np.ndarray:
        """Bytes `start` to `stop` of a tensor (to its end if None), uint8.

        With `passing` they are in memory of this thread, which its next such call writes over:
        fresh memory may take longer to come than what is read into it.

        Raises:
          InputError: the file cannot be read, or is shorter than it was.
        """
        size = (tensor.nbytes if stop is None else stop) - start
        out = self._room(size) if passing else np.empty(size, np.uint8)
        if size:
            try:
                got = _fill(self._descriptor(tensor.file), out.data, tensor.start + start)
            except OSError as error:
                reason = error.strerror or error
                raise InputError(f"{tensor.where} cannot be read ({reason})") from error
            if got < size:
                raise InputError(
                    f"{tensor.where} cannot be read: the file has become shorter since it was "
                    "opened; let nothing write to the folder, then run the same command again"
                )
        return out

    def _room(self, size: int) -> np.ndarray:
        if getattr(self._own, "room", np.empty(0)).size < size:
            self._own.room = np.empty(size, np.uint8)
        return self._own.room[:size]

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = descriptor = os.open(file, os.O_RDONLY)
                if hasattr(os, "posix_fadvise"):  # the system then reads further ahead
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._open[file]


def _fill(descriptor: int, out: memoryview, offset: int) -> int:
    """Reads until `out` is full or the file ends; the bytes read."""
    done = 0
    while done < len(out):
        count = os.preadv(descriptor, [out[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def row_ranges(shape: tuple[int, ...], itemsize: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of the first axis that hold about `most` bytes each, one row at least."""
    rows = shape[0] if shape else 1
    step = max(1, most // max(1, itemsize * math.prod(shape[1:])))
    for low in range(0, rows, step):
        yield low, min(low + step, rows)


def all_finite(array: np.ndarray) -> bool:
    """Whether an array of one of DTYPES, contiguous, holds neither NaN nor infinity.

    As integers, the greatest bits of either sign tell. That takes two passes over the array and
    nothing beside it, and is many times faster than `isfinite` on 16-bit floats.
    """
    if not array.size:
        return True
    limit, bits = _INFINITY[array.dtype.name], 8 * array.itemsize
    flat = array.reshape(-1)
    if int(flat.view(f"i{array.itemsize}").max()) >= limit:
        return False
    return int(flat.view(f"u{array.itemsize}").max()) < limit + (1 << (bits - 1))


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[_In], _Out], items: Iterable[_In]
) -> Generator[_Out, None, None]:
    """Results of `work` in the order of `items`, few of which are under way at a time.

    When it is closed, or anything raises, nothing is under way any more.
    """
    waiting: deque[Future[_Out]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)


@contextlib.contextmanager
def reading() -> Iterator[tuple[Reader, ThreadPoolExecutor]]:
    """A reader and threads to use it; the threads have ended when the files are closed."""
    with Reader() as reader, ThreadPoolExecutor(THREADS, "lora_tune_files") as pool:
        yield reader, pool
