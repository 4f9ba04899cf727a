# SPDX-License-Identifier: Apache-2.0
"""The table between our parameters and the tensors of a Hugging Face checkpoint.

A family lists one `Row` per kind of tensor. `bind` meets the rows with an (abstract) model and
answers with one `Leaf` per parameter: the Hugging Face name of every slice along its stacked axes
(block, layer, expert), and the layout-only view between the two. Nothing here changes a value, so
import followed by export is exact. Loading, merging and the PEFT adapter all read the same leaves.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np
from flax import nnx

from lora_tune import distributed

Path = tuple[str | int, ...]
STACK_AXES = ("block", "layer", "expert")
_ALIGNMENT = 64  # what XLA asks of buffers on a CPU


@dataclasses.dataclass(frozen=True)
class View:
    """A layout between our array (stacked axes removed) and the Hugging Face tensor.

    `dims[j]` is the axis of ours that Hugging Face axis j holds, or None where Hugging Face has an
    axis of size one that we lack; `dims=None` is the identity for any rank.
    """

    dims: tuple[int | None, ...] | None = None

    @property
    def rank(self) -> int | None:
        """Rank of our side, None when any."""
        return None if self.dims is None else sum(d is not None for d in self.dims)

    def hf_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The Hugging Face shape for our shape."""
        if self.dims is None:
            return tuple(shape)
        return tuple(1 if d is None else shape[d] for d in self.dims)

    def hf_index(self, index: Sequence[slice]) -> tuple[slice, ...]:
        """The Hugging Face slices that hold our slices."""
        if self.dims is None:
            return tuple(index)
        return tuple(slice(0, 1) if d is None else index[d] for d in self.dims)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """Our array in the Hugging Face layout."""
        if self.dims is None:
            return array
        moved = array.transpose([d for d in self.dims if d is not None])
        return moved.reshape(self.hf_shape(array.shape))

    def from_hf(self, tensor: np.ndarray) -> np.ndarray:
        """The Hugging Face tensor (or a slice taken with `hf_index`) in our layout."""
        if self.dims is None:
            return tensor
        kept = [j for j, d in enumerate(self.dims) if d is not None]
        squeezed = tensor.reshape([tensor.shape[j] for j in kept])
        order = [d for d in self.dims if d is not None]
        return squeezed.transpose([order.index(d) for d in range(len(order))])


VIEWS: Mapping[str, View] = {
    "identity": View(),
    "transpose": View((1, 0)),
    "conv": View((1, None, 0)),  # torch Conv1d depthwise [C, 1, K] <-> ours [K, C]
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of tensor: our path below the layer (or the model) and the Hugging Face name.

    `theirs` holds `{e}` where one tensor per expert lies on disk; the layer prefix is the family's.
    """

    ours: str
    theirs: str
    view: str = "identity"


class Family(Protocol):
    """What the table needs to know of a model family.

    `ignored` lists (regular expression matched against the whole name, reason) of checkpoint
    tensors that the model does not hold; a merged export still carries them. `renamed` lists
    (regular expression in a name of the files, what the table has there), for families whose files
    name modules otherwise than transformers does. `fused` says which last parts of names are those
    of tensors of all experts, and which projections share their rows.
    """

    @property
    def layer_rows(self) -> Sequence[Row]:
        """Rows below a layer."""
        ...

    @property
    def top_rows(self) -> Sequence[Row]:
        """Rows outside the layers."""
        ...

    @property
    def ignored(self) -> Sequence[tuple[str, str]]:
        """(regular expression, reason) of tensors to leave out."""
        ...

    @property
    def renamed(self) -> Sequence[tuple[str, str]]:
        """(regular expression in a name of the files, what the table has there)."""
        ...

    @property
    def fused(self) -> Sequence[tuple[str, Sequence[str]]]:
        """(last part of a fused tensor's name, projections)."""
        ...

    @property
    def not_adaptable(self) -> Sequence[str]:
        """Module paths below a layer that never carry an adapter."""
        ...

    @property
    def layer_prefix(self) -> str:
        """Prefix of a layer's names, with `{i}` for its number."""
        ...

    def portable_config(self, hf: Mapping[str, Any], /) -> dict[str, Any]:
        """`config.json` with all that only lora_tune understands spelled out for others."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One parameter of the model and the Hugging Face tensors that fill it.

    Attributes:
      path: path in the nnx state.
      shape, dtype, axes: of our array, stacked axes included.
      names: Hugging Face names, shape = sizes of the stacked axes in the order block, layer,
        expert (a 0-d array for a parameter that is not stacked).
      stack_axes: positions of those stacked axes in our array, in the same order.
      view: the layout of the remaining axes.
      hf_shape: shape of each Hugging Face tensor.
      adaptable: whether it is the kernel of a projection that may carry an adapter.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    names: np.ndarray
    stack_axes: tuple[int, ...]
    view: View
    hf_shape: tuple[int, ...]
    adaptable: bool

    @property
    def inner_axes(self) -> tuple[int, ...]:
        """Positions of the axes that a single Hugging Face tensor holds."""
        return tuple(i for i in range(len(self.shape)) if i not in self.stack_axes)

    @property
    def dotted(self) -> str:
        """The path as text."""
        return ".".join(map(str, self.path))

    def place(self, cell: tuple[int, ...]) -> tuple[int | slice, ...]:
        """Index into our array of one cell of `names`; what remains are the inner axes."""
        index: list[int | slice] = [slice(None)] * len(self.shape)
        for axis, i in zip(self.stack_axes, cell, strict=True):
            index[axis] = i
        return tuple(index)


Cell = tuple[str, tuple[slice, ...], np.ndarray]
"""Name of a Hugging Face tensor, the slices of it that are wanted (ours, inner axes), and where
they go: a view of our array."""


def make_array(
    leaf: Leaf,
    dtype: np.dtype,
    fill: Callable[[Iterator[Cell]], None],
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """Builds a parameter tensor by tensor, each device's share on its own.

    The host holds one share at a time; devices that hold the same share are sent the same one.

    Args:
      leaf: shape, and the Hugging Face name of every slice.
      dtype: of the array.
      fill: writes the values of each cell, all of them, into its view.
      sharding: None for the default device.
    """

    def share(ranges: Sequence[range]) -> np.ndarray:
        out = _aligned([len(r) for r in ranges], dtype)
        fill(_cells(leaf, ranges, out))
        return out

    if sharding is None:
        # Before the next parameter takes memory.
        return jax.block_until_ready(jax.device_put(share([range(n) for n in leaf.shape])))
    placed: list[jax.Array] = []
    for ranges, devices in shares(leaf.shape, sharding).items():
        values = share(ranges)
        arrays = [jax.device_put(values, device) for device in devices]
        placed += jax.block_until_ready(arrays)  # before the next share takes memory
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, placed)


def shares(
    shape: Sequence[int], sharding: jax.sharding.Sharding | None
) -> dict[tuple[range, ...], list[Any]]:
    """The different shares of an array that this process's devices hold -> those that do.

    Without a sharding it is the whole, on the default device, which is not listed.
    """
    if sharding is None:
        return {tuple(map(range, shape)): []}
    holders: dict[tuple[range, ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        sliced = zip(index or (), shape, strict=True)
        holders.setdefault(tuple(range(*s.indices(n)) for s, n in sliced), []).append(device)
    return holders


def _cells(leaf: Leaf, ranges: Sequence[range], out: np.ndarray) -> Iterator[Cell]:
    window = tuple(slice(ranges[i].start, ranges[i].stop) for i in leaf.inner_axes)
    stacked = [ranges[i] for i in leaf.stack_axes]
    for cell in np.ndindex(*(len(r) for r in stacked)):
        source = tuple(r[i] for r, i in zip(stacked, cell, strict=True))
        yield str(leaf.names[source]), window, out[(*leaf.place(cell), ...)]


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An empty array that a CPU device takes as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


def hf_state(leaf: Leaf, array: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, tensor in the Hugging Face layout) for every slice of `array`.

    The exact inverse of loading, for any stacking. Sharded arrays are fetched to the host whole.
    """
    host = distributed.fetch(array)
    if host.shape != leaf.shape:
        raise ValueError(f"{leaf.dotted}: expected shape {leaf.shape}, got {host.shape}")
    for cell in np.ndindex(leaf.names.shape):
        yield str(leaf.names[cell]), leaf.view.to_hf(host[leaf.place(cell)])


def module_name(tensor: str) -> str:
    """The Hugging Face module that owns a weight tensor."""
    return tensor.removesuffix(".weight")


def base_params(model: nnx.Module) -> dict[Path, Any]:
    """The weights of a model by path: every nnx.Param that is not an adapter."""
    wanted = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    flat = nnx.to_flat_state(nnx.state(model, wanted))
    return {cast(Path, tuple(path)): variable for path, variable in flat}


def bind(family: Family, model: Any) -> tuple[Leaf, ...]:
    """Joins the rows of a family with the parameters of a model, concrete or abstract.

    Raises:
      ValueError: naming everything wrong at once: rows that repeat a name, layers that do not
        partition range(num_hidden_layers), a parameter without a row, a stacked axis that
        contradicts the plan, two parameters for one Hugging Face tensor.
    """
    stacks = {tuple(prefix): np.asarray(ids) for prefix, ids in model.plan.stacks().items()}
    problems = _row_problems(family) + _layer_problems(stacks, model.config.num_hidden_layers)
    layer_rows = {row.ours: row for row in family.layer_rows}
    top_rows = {row.ours: row for row in family.top_rows}
    leaves = []
    for path, variable in base_params(model).items():
        prefix = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in stacks), ())
        layers = stacks[prefix] if prefix else None
        rows, start = (layer_rows, family.layer_prefix) if prefix else (top_rows, "")
        row = rows.get(".".join(map(str, path[len(prefix) :])))
        if row is None:
            problems.append(f"parameter {'.'.join(map(str, path))} has no row")
            continue
        may_adapt = row.ours.rpartition(".")[0] not in family.not_adaptable
        leaf = _leaf(path, variable, row, start, layers, may_adapt)
        if isinstance(leaf, str):
            problems.append(f"{'.'.join(map(str, path))} {leaf}")
        else:
            leaves.append(leaf)
    problems += _name_problems(leaves)
    if problems:
        raise ValueError("the table does not fit the model: " + "; ".join(problems))
    return tuple(leaves)


def _leaf(
    path: Path, variable: Any, row: Row, start: str, layers: np.ndarray | None, may_adapt: bool
) -> Leaf | str:
    """The leaf of one parameter, or what is wrong with it."""
    value, view = variable.get_value(), VIEWS[row.view]
    shape = tuple(value.shape)
    axes = tuple(variable.get_metadata("axes", None) or (None,) * len(shape))
    expected = _expected_stack(layers, row)
    found = [axis for axis in axes if axis in STACK_AXES]
    if sorted(found) != sorted(expected) or len(axes) != len(shape):
        return f"has shape {shape} and axes {axes}, expected the stacked axes {expected}"
    stack_axes = tuple(axes.index(axis) for axis in expected)
    sizes = tuple(shape[i] for i in stack_axes)
    if layers is not None and sizes[: layers.ndim] != layers.shape:
        return f"stacks {sizes[: layers.ndim]} layers, the plan says {layers.shape}"
    inner = tuple(n for i, n in enumerate(shape) if i not in stack_axes)
    if view.rank not in (None, len(inner)):
        return f"has the axes {inner}, view {row.view!r} needs {view.rank}"
    if path[-1] == "kernel" and view == VIEWS["identity"]:
        return (
            "is a kernel [in, out], which Hugging Face has as [out, in]: view 'identity' is wrong"
        )
    return Leaf(
        path=path,
        shape=shape,
        dtype=np.dtype(value.dtype),
        axes=axes,
        names=_names(start + row.theirs, layers, sizes),
        stack_axes=stack_axes,
        view=view,
        hf_shape=view.hf_shape(inner),
        adaptable=may_adapt and path[-1] == "kernel" and view == VIEWS["transpose"],
    )


def _expected_stack(layers: np.ndarray | None, row: Row) -> list[str]:
    rank = 0 if layers is None else layers.ndim
    return ["block", "layer"][2 - rank :] + (["expert"] if "{e}" in row.theirs else [])


def _names(pattern: str, layers: np.ndarray | None, sizes: tuple[int, ...]) -> np.ndarray:
    names = np.empty(sizes, dtype=object)
    rank = 0 if layers is None else layers.ndim
    for cell in np.ndindex(sizes):
        i = None if layers is None else int(layers[cell[:rank]])
        expert = cell[rank] if len(cell) > rank else None
        names[cell] = pattern.format(i=i, e=expert)
    return names


def _row_problems(family: Family) -> list[str]:
    problems = []
    for label, rows in (("layer", family.layer_rows), ("top", family.top_rows)):
        for side in ("ours", "theirs"):
            counts = Counter(getattr(row, side) for row in rows)
            repeated = [name for name, n in counts.items() if n > 1]
            problems += [f"two {label} rows have {side}={name!r}" for name in repeated]
        unknown = {row.view for row in rows} - set(VIEWS)
        problems += [f"unknown view {view!r}" for view in sorted(unknown)]
    if any(row.view not in VIEWS for row in (*family.layer_rows, *family.top_rows)):
        raise ValueError("the table does not fit the model: " + "; ".join(problems))
    return problems


def _layer_problems(stacks: Mapping[Path, np.ndarray], num_layers: int) -> list[str]:
    held = sorted(int(i) for ids in stacks.values() for i in ids.ravel())
    if held == list(range(num_layers)):
        return []
    return [f"the plan holds layers {held}, expected each of range({num_layers}) once"]


def _name_problems(leaves: Sequence[Leaf]) -> list[str]:
    owner: dict[str, Leaf] = {}
    problems = []
    for leaf in leaves:
        for name in leaf.names.ravel():
            if name in owner:
                problems.append(f"{name} is claimed by {owner[name].dotted} and {leaf.dotted}")
            owner[name] = leaf
    return problems
