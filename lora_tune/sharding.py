# SPDX-License-Identifier: Apache-2.0
"""Where every array lives: logical axis names, the table to mesh axes, and manual regions.

Model code is single-device. Each parameter names its dimensions (`axes`), `RULES` maps those names
to mesh axes, and the training step runs inside one `jax.shard_map` that is manual over all axes
but `tensor`, which the compiler handles. Inside such a region the scan engine gathers a layer's
weights right before use with `unshard`; routed experts stay where they are.
"""

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_tune.errors import InputError

MESH_AXES = ("data", "fsdp", "expert", "sequence", "tensor")
"""Mesh axes, slowest first: `tensor` neighbours talk most, so they are closest."""
BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes over which the rows of a batch are spread."""
MANUAL_AXES = (*BATCH_AXES, "sequence")
"""Mesh axes of the step's manual region: those of the rows, and that of each row's tokens."""

RULES: Mapping[str, tuple[str, ...]] = {
    "expert": ("expert",),
    "embed": ("fsdp", "expert", "sequence"),
    "heads": ("fsdp", "expert", "sequence", "tensor"),
    "mlp": ("fsdp", "expert", "sequence", "tensor"),
    "per_head": ("tensor",),
    "vocab": ("tensor",),
}
"""Logical axis -> mesh axes, where no axis before it in this order has taken them.

So the devices that share the routed experts also share all other weights, and a matrix without an
`embed` axis, such as B of a projection into heads, is cut along the axis it has. An axis that is
not listed is replicated.
"""

_SIZES: ContextVar[Mapping[str, int]] = ContextVar("mesh_sizes", default=MappingProxyType({}))


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    sequence: int = 1,
    tensor: int = 1,
    devices: Sequence | None = None,
) -> Mesh:
    """Builds the device mesh, with axes `data`, `fsdp`, `expert`, `sequence` and `tensor`.

    Raises:
      InputError: an axis is smaller than 1, or the product exceeds the number of devices. With a
        smaller product the first devices are used.
    """
    sizes = dict(zip(MESH_AXES, (data, fsdp, expert, sequence, tensor), strict=True))
    wrong = [f"mesh.{name}={size}" for name, size in sizes.items() if size < 1]
    if wrong:
        raise InputError(f"{', '.join(wrong)}: a mesh axis is a number of devices, at least 1")
    devices = list(jax.devices()) if devices is None else list(devices)
    needed = int(np.prod(list(sizes.values())))
    if needed > len(devices):
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise InputError(
            f"mesh: {shape} needs {needed} devices, but {len(devices)} "
            f"{'is' if len(devices) == 1 else 'are'} available; make the mesh axes multiply to at "
            f"most {len(devices)}"
        )
    return Mesh(_arrange(devices[:needed], tuple(sizes[name] for name in MESH_AXES)), MESH_AXES)


def _arrange(devices: Sequence, shape: tuple[int, ...]) -> np.ndarray:
    """Gives devices their place in the mesh, by where they stand in the slice.

    On a torus, XLA makes an all-gather only over neighbours in a ring. In plain order it sums
    arrays of the gathered size instead: for one of 34 MB over a v5p-256, 101 MB of memory. Plain
    order is what remains for a part of a slice, or a shape that cannot be laid out in it: results
    are the same, `lora-tune plan` shows the all-reduces, and a note says so.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if shape[0] % slices:
        raise InputError(
            f"mesh.data={shape[0]}: the devices are {slices} slices, between which only the axis "
            f"data should reach, so it must be a multiple of {slices}"
        )
    try:
        if slices > 1:
            inside, across = (shape[0] // slices, *shape[1:]), (slices, *[1] * len(shape[1:]))
            return mesh_utils.create_hybrid_device_mesh(
                inside, across, devices, allow_split_physical_axes=True
            )
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):
        if devices[0].platform == "tpu":
            sizes = " x ".join(f"{name} {n}" for name, n in zip(MESH_AXES, shape, strict=True))
            print(
                f"lora-tune: note: a mesh of {sizes} cannot be laid out in this slice; its devices "
                "stand in plain order, and gathers may become sums of larger arrays",
                file=sys.stderr,
            )
        return np.array(devices).reshape(shape)


def mesh_axes(axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of every dimension of an array with these logical axes, slowest first."""
    taken: dict[int, tuple[str, ...]] = {}
    for name, rule in RULES.items():
        for dim, axis in enumerate(axes):
            if axis == name:
                used = {used for parts in taken.values() for used in parts}
                taken[dim] = tuple(part for part in rule if part not in used)
    return tuple(taken.get(dim, ()) for dim in range(len(axes)))


def batch_spec(*lead: None) -> PartitionSpec:
    """Partition spec of a batch's arrays `[*lead, rows, T]`."""
    return PartitionSpec(*lead, BATCH_AXES, "sequence")


def spec(axes: Sequence[str | None], *, only: Sequence[str] = MESH_AXES) -> PartitionSpec:
    """Partition spec of an array with these logical axes, over the mesh axes in `only`."""
    parts = [tuple(axis for axis in dim if axis in only) for dim in mesh_axes(axes)]
    return PartitionSpec(*(dim[0] if len(dim) == 1 else dim or None for dim in parts))


def named_sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """Sharding of an array with these logical axes on `mesh`."""
    return NamedSharding(mesh, spec(axes))


def check_divides(arrays: Mapping[str, tuple[Sequence[int], Sequence[str | None]]], mesh: Mesh):
    """Checks that every sharded dimension divides by its mesh axes.

    Args:
      arrays: name -> (shape, logical axes).
      mesh: the mesh.

    Raises:
      InputError: names the mesh axes, the first offending array and the sizes that would fit.
    """
    problems: dict[str, str] = {}
    for name, (shape, axes) in arrays.items():
        for size, dim in zip(shape, mesh_axes(axes), strict=True):
            parts = [axis for axis in dim if mesh.shape[axis] > 1]
            count = math.prod(mesh.shape[axis] for axis in parts)
            if size % count:
                asked = " x ".join(f"mesh.{axis}" for axis in parts)
                problems.setdefault(asked, f"{asked}={count} does not divide {name} (size {size})")
    if problems:
        raise InputError(
            "; ".join(problems.values()) + "; choose mesh sizes that divide these dimensions"
        )


@contextlib.contextmanager
def manual(mesh: Mesh) -> Iterator[None]:
    """Marks a trace inside `shard_map` as manual over `MANUAL_AXES` of `mesh`."""
    token = _SIZES.set(dict(mesh.shape))
    try:
        yield
    finally:
        _SIZES.reset(token)


def manual_size(name: str) -> int:
    """Number of devices along a mesh axis that the trace is manual over, 1 outside."""
    return _SIZES.get().get(name, 1) if name in MANUAL_AXES else 1


def automatic_size(name: str) -> int:
    """Number of devices along a mesh axis that the compiler handles, 1 outside a manual region."""
    return 1 if name in MANUAL_AXES else _SIZES.get().get(name, 1)


def manual_axis(name: str) -> str | None:
    """`name`, if the trace is manual over that mesh axis and it has more than one device."""
    return name if manual_size(name) > 1 else None


def manual_axes(axes: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of every dimension that its parts are gathered over in a manual region.

    None outside one. Nor over the axis of the experts: rows travel to them, not they to the rows.
    """
    return tuple(
        () if axis == "expert" else tuple(filter(manual_axis, dim))
        for axis, dim in zip(axes, mesh_axes(axes), strict=True)
    )


def gather(value: jax.Array, parts: Sequence[tuple[str, ...]]) -> jax.Array:
    """Gathers an array over the `manual_axes` of its dimensions."""
    for dim, over in enumerate(parts):
        if over:
            value = jax.lax.all_gather(value, over, axis=dim, tiled=True)
    return value


def unshard(variable: nnx.Variable) -> nnx.Variable:
    """`gather` of a parameter by its own axes; the identity outside a manual region."""
    parts = manual_axes(variable.get_metadata().get("axes", ()))
    return variable.replace(gather(variable[...], parts))
