# SPDX-License-Identifier: Apache-2.0
"""Flat arrays in files: written piece by piece, read as maps of the files.

What a map has shown of its file counts as memory of the process until it is let go.
"""

import contextlib
import mmap
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from lora_tune.errors import InputError

SMALL = 64 << 20
"""Bytes up to which a file is read rather than mapped."""
_PIECE = 16 << 20


class UnwritableError(OSError):
    """The folder that arrays are written to does not take them."""


class Growing:
    """Arrays of one dimension that are added to at their ends.

    Args:
      types: name -> dtype.
      folder: where `NAME.bin` of each array is written; None for files without a name, which are
        gone when nothing refers to them.

    Raises, as its methods do:
      UnwritableError: the disk of `folder` does not take them.
      InputError: that of the files without a name does not.
    """

    def __init__(self, types: Mapping[str, type], folder: Path | None = None) -> None:
        self._types, self._folder = types, folder
        with self._writing():
            self._files = {name: _create(folder, name) for name in types}

    def add(self, arrays: Mapping[str, bytes]) -> None:
        """Appends the bytes of each array."""
        with self._writing():
            for name, content in arrays.items():
                self._files[name].write(content)

    def finish(self) -> dict[str, np.ndarray]:
        """The arrays, which nothing can be added to any more."""
        with self._writing():
            for file in self._files.values():
                file.flush()
        found = {name: read(file, self._types[name]) for name, file in self._files.items()}
        self.close()
        return found

    def close(self) -> None:
        """Closes the files; arrays that were read stay."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # of what could not be written before
                file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._folder is not None:
                raise UnwritableError(*error.args) from error
            raise InputError(
                f"tokenised rows cannot be written to {tempfile.gettempdir()} ({error.strerror}): "
                "make room there, or set TMPDIR to another folder"
            ) from error


def _create(folder: Path | None, name: str) -> BinaryIO:
    if folder is None:
        return cast(BinaryIO, tempfile.TemporaryFile())
    return (folder / f"{name}.bin").open("w+b")


def read(file: BinaryIO, dtype: type) -> np.ndarray:
    """The content of a file as an array that cannot be written to.

    Raises:
      ValueError: it is no whole number of values.
    """
    file.seek(0, 2)
    if file.tell() <= SMALL:
        file.seek(0)
        return np.frombuffer(file.read(), dtype)
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array in slices of 16 MB; of a map, each is let go before the next is read."""
    step = _PIECE // array.itemsize
    for start in range(0, len(array), step):
        yield array[start : start + step]
        release(array)


def release(array: np.ndarray) -> None:
    """Lets go of the memory that shows a mapped file; what is needed again is read again."""
    view = array.base
    if isinstance(view, memoryview) and isinstance(view.obj, mmap.mmap):
        advice = getattr(mmap, "MADV_DONTNEED", None)  # Windows has no such thing
        if advice is not None:
            view.obj.madvise(advice)
