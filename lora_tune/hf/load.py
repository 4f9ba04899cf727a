# SPDX-License-Identifier: Apache-2.0
"""Loading a Hugging Face checkpoint into our parameters: total, and streamed slice by slice."""

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lora_tune import distributed
from lora_tune.errors import shown
from lora_tune.hf.files import Checkpoint, open_checkpoint, raise_listed
from lora_tune.hf.table import Cell, Family, Leaf, Path, base_params, bind, make_array, shares
from lora_tune.hf.tensors import (
    CHUNK,
    DTYPES,
    Reader,
    Tensor,
    all_finite,
    in_order,
    reading,
    row_ranges,
)
from lora_tune.progress import Progress, counted

_HEAD, _EMBEDDING = "lm_head.kernel", "embed_tokens.embedding"
_VALUES = 2**19
"""Values that are transposed at a time: a few MB, and enough that the threads seldom wait for the
interpreter's lock."""
_GAP = 32
"""Values between two rows that are to be transposed."""


def load_params(
    model: nnx.Module,
    family: Family,
    folder: FilePath | str,
    *,
    dtype: DTypeLike | None = None,
    shardings: Mapping[Path, jax.sharding.Sharding] | None = None,
    progress: Progress | None = None,
) -> nnx.State:
    """Reads the weights of `model` from a folder of safetensors.

    Every parameter is assembled per device: a device's slice is filled from the parts of the files
    that it covers, cast there, and sent off, so host memory holds about one slice of one (stacked)
    parameter at a time, and for each thread that reads at most two pieces of `CHUNK` bytes, as read
    and as cast, and one of 2 MB in which it is transposed. Values are only moved and cast, never
    changed.

    Args:
      model: concrete or abstract; only shapes and metadata are read.
      family: its table.
      folder: `model.safetensors`, or shards with `model.safetensors.index.json`.
      dtype: type of the arrays, None for the model's own.
      shardings: where each parameter goes, by path; those left out go to the default device.
      progress: called in the first process with (bytes done, bytes in all) of what it reads
        itself, once for each tensor.

    Returns:
      A state of the structure and metadata of the model's base parameters, for `nnx.update`.

    Raises:
      InputError: damaged files; tensors that are unknown, missing or of the wrong shape or type,
        all named at once; tensors with a NaN or an infinity, all named at once.
    """
    leaves = bind(family, model)
    checkpoint = open_base(folder, family)
    check_tensors(checkpoint, leaves, family)
    variables, shardings = base_params(model), shardings or {}
    parts = (_own_bytes(leaf, shardings.get(leaf.path), checkpoint.tensors) for leaf in leaves)
    tell = counted(progress if distributed.is_first() else None, sum(parts))
    loaded = {}
    with reading() as (reader, pool):
        loader = Loader(checkpoint, reader, pool, tell)
        for leaf in leaves:
            target = np.dtype(dtype if dtype is not None else leaf.dtype)
            array = loader.load(leaf, target, shardings.get(leaf.path))
            loaded[leaf.path] = variables[leaf.path].replace(array)
    raise_listed(
        f"{checkpoint.folder}: weights hold a NaN or an infinity, so the checkpoint is damaged or "
        "does not fit the type it is read as",
        [f"{tensor.where} read as {kind}" for tensor, kind in loader.damaged.items()],
    )
    return nnx.from_flat_state(loaded)


def check_tensors(checkpoint: Checkpoint, leaves: Sequence[Leaf], family: Family) -> None:
    """Checks that the files hold exactly what the model needs.

    Tensors that match `family.ignored` may be there. So may the head of a model that ties it to
    the embedding, if both are equal: transformers unties them otherwise.

    Raises:
      InputError: naming every tensor that is missing, unknown, or of the wrong shape or type.
    """
    raise_listed(
        f"{checkpoint.folder}: the checkpoint does not fit the model",
        _problems(checkpoint, leaves, family),
    )


def _problems(checkpoint: Checkpoint, leaves: Sequence[Leaf], family: Family) -> Iterator[str]:
    expected = {name: leaf.hf_shape for leaf in leaves for name in leaf.names.ravel()}
    present = checkpoint.tensors
    yield from (f"{name} is missing" for name in expected if name not in present)
    head, embedding = _tied_names(leaves, family)
    for name, tensor in present.items():
        if name in expected:
            yield from _tensor_problems(tensor, expected[name])
        elif name == head:
            yield from _tied_problems(tensor, present.get(embedding))
        elif not _is_ignored(name, family):
            yield f"{shown(tensor.stored)} in {tensor.file.name} is unknown to this model"


def open_base(folder: FilePath | str, family: Family) -> Checkpoint:
    """Reads the headers of a checkpoint, with the names that the family's table has."""
    return open_checkpoint(FilePath(folder), renamed=family.renamed, fused=family.fused)


def stored_names(folder: FilePath | str, family: Family) -> dict[str, str]:
    """The table's name of every tensor of a checkpoint -> its name in the files.

    Parts of fused tensors have names of their own, as in files without fused tensors.
    """
    checkpoint = open_base(folder, family)
    return {name: tensor.stored for name, tensor in checkpoint.tensors.items()}


def ignored_tensors(folder: FilePath | str, family: Family) -> list[Tensor]:
    """The tensors of a checkpoint that no model of the family holds, in the order of the files."""
    checkpoint = open_base(folder, family)
    return [
        tensor
        for tensors in checkpoint.files.values()
        for tensor in tensors
        if _is_ignored(tensor.name, family)
    ]


def _own_bytes(
    leaf: Leaf, sharding: jax.sharding.Sharding | None, tensors: Mapping[str, Tensor]
) -> int:
    """Bytes of the files that this process fills its shares of a parameter from."""
    total = 0
    for ranges in shares(leaf.shape, sharding):
        each = math.prod(len(ranges[i]) for i in leaf.inner_axes)
        stacked = np.asarray(leaf.names[np.ix_(*(ranges[i] for i in leaf.stack_axes))])
        total += each * sum(DTYPES[tensors[name].dtype].itemsize for name in stacked.ravel())
    return total


def _is_ignored(name: str, family: Family) -> bool:
    return any(re.fullmatch(pattern, name) for pattern, _ in family.ignored)


class Loader:
    """Fills parameters from the files of a checkpoint, and remembers what is not finite."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: Reader,
        pool: ThreadPoolExecutor,
        tell: Callable[[int], None],
    ) -> None:
        self._checkpoint, self._reader, self._pool, self._tell = checkpoint, reader, pool, tell
        self._placing = _Placing()
        self.damaged: dict[Tensor, np.dtype] = {}

    def load(
        self, leaf: Leaf, dtype: np.dtype, sharding: jax.sharding.Sharding | None
    ) -> jax.Array:
        """One parameter, its tensors read by several threads."""

        def fill(cells: Iterator[Cell]) -> None:
            for count in in_order(self._pool, lambda cell: self._fill(leaf, *cell), cells):
                self._tell(count)

        return make_array(leaf, dtype, fill, sharding)

    def _fill(self, leaf: Leaf, name: str, window: tuple[slice, ...], out: np.ndarray) -> int:
        """Reads the rows of a tensor that hold a window, a few at a time; the window's bytes."""
        tensor = self._checkpoint.tensors[name]
        stored = DTYPES[tensor.dtype]
        target = leaf.view.to_hf(out)
        rows, *columns = leaf.view.hf_index(window) or (slice(0, 1),)
        if not tensor.shape:
            target = target.reshape(1)
        width = stored.itemsize * math.prod(tensor.shape[1:])
        widest = max(stored.itemsize, target.itemsize)
        for low, high in row_ranges((len(target), *tensor.shape[1:]), widest, CHUNK):
            first = rows.start + low
            last = rows.start + high
            raw = self._reader.read(tensor, first * width, last * width, passing=True)
            values = raw.view(stored).reshape(high - low, *tensor.shape[1:])
            part = np.ascontiguousarray(values[(slice(None), *columns)])
            with np.errstate(over="ignore"):  # an overflow is reported by name
                part = part.astype(target.dtype, copy=False)
            if not all_finite(part):
                self.damaged[tensor] = target.dtype
            self._placing.copy(target[low:high], part)
        return out.size * stored.itemsize


class _Placing(threading.local):
    """Copies values to where they go, by way of memory that a thread keeps."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    def copy(self, target: np.ndarray, part: np.ndarray) -> None:
        """Copies an array to a view of the same shape and type, which most often is transposed.

        Rows that lie a power of two apart, as those of weights do, fall into the same few lines of
        a core's cache; so they are first put a little further apart. Plain integers copy without
        the interpreter's lock, and pieces are large enough for threads to seldom wait for it.
        """
        bits = f"u{part.itemsize}"
        target, part = target.view(bits), part.view(bits)
        if target.ndim < 2 or target.strides[-1] == target.itemsize:
            target[...] = part
            return
        *rows, width = part.shape
        for low, high in row_ranges((*rows, width + _GAP), 1, _VALUES):
            apart = self._apart(part[low:high].shape, part.dtype)
            apart[...] = part[low:high]
            target[low:high] = apart

    def _apart(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of a shape, whose values the next call writes over."""
        *rows, width = shape
        size = math.prod(rows) * (width + _GAP) * dtype.itemsize
        if self._room.size < size:
            self._room = np.empty(size, np.uint8)
        return self._room[:size].view(dtype).reshape(*rows, width + _GAP)[..., :width]


def _tensor_problems(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[str]:
    if tensor.shape != shape:
        yield (
            f"{tensor.stored} in {tensor.file.name} has shape {list(tensor.shape)}, "
            f"expected {list(shape)}"
        )
    if tensor.dtype not in DTYPES:
        yield (
            f"{tensor.stored} in {tensor.file.name} has type {tensor.dtype}, expected one of "
            f"{', '.join(DTYPES)} (quantised checkpoints cannot be read)"
        )


def _tied_names(leaves: Sequence[Leaf], family: Family) -> tuple[str, str]:
    """Names of head and embedding when the model has no head of its own, else empty."""
    theirs = {row.ours: row.theirs for row in family.top_rows}
    if any(leaf.dotted == _HEAD for leaf in leaves):
        return "", ""
    return theirs.get(_HEAD, ""), theirs.get(_EMBEDDING, "")


def _tied_problems(head: Tensor, embedding: Tensor | None) -> list[str]:
    if embedding is None:
        return []  # reported as missing
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if same and _same_bytes(head, embedding):
        return []
    return [
        f"{head.name} in {head.file.name} differs from {embedding.name}, though "
        "tie_word_embeddings is true; set it to false in config.json"
    ]


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    with Reader() as reader:
        return all(
            np.array_equal(reader.read(one, low, high), reader.read(other, low, high))
            for low, high in row_ranges((one.nbytes,), 1, CHUNK)
        )
