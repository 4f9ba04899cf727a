# SPDX-License-Identifier: Apache-2.0
"""The adapters of a model as host arrays, beside the leaf that each belongs to."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from flax import nnx

from lora_tune import distributed
from lora_tune.hf.table import Leaf, Path, module_name

A, B, SCALE = "kernel_lora_a", "kernel_lora_b", "kernel_lora_scale"
"""Names of an adapter's variables, beside the kernel they adapt."""


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """The low-rank update of one (stacked) kernel.

    Attributes:
      leaf: the kernel.
      a: float32, the kernel's shape with the rank in place of its output axis.
      b: float32, the kernel's shape with the rank in place of its input axis.
      scale: float32, shape = sizes of the stacked layer axes (block, layer); 0 where a layer is
        not adapted.
    """

    leaf: Leaf
    a: np.ndarray
    b: np.ndarray
    scale: np.ndarray

    def module(self, cell: tuple[int, ...]) -> str:
        """Hugging Face name of the module of one slice."""
        return module_name(self.leaf.names[cell])

    def factors(self, cell: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, float]:
        """A `[in, r]`, B `[r, out]` and the scale of one slice (block, layer, expert)."""
        place = self.leaf.place(cell)
        return self.a[place], self.b[place], float(self.scale[cell[: self.scale.ndim]])

    def cells(self) -> Iterator[tuple[int, ...]]:
        """The slices that are adapted."""
        for cell in np.ndindex(self.leaf.names.shape):
            if self.scale[cell[: self.scale.ndim]] != 0:
                yield cell


def factor_shapes(leaf: Leaf, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B of rank r for a kernel."""
    into, out_of = leaf.inner_axes
    a, b = list(leaf.shape), list(leaf.shape)
    a[out_of], b[into] = r, r
    return tuple(a), tuple(b)


def scale_shape(leaf: Leaf) -> tuple[int, ...]:
    """Shape of the scale: the stacked layer axes, without the expert axis."""
    return leaf.names.shape[: leaf.names.ndim - ("expert" in leaf.axes)]


def flat_arrays(state: nnx.State | Mapping[Path, Any]) -> dict[Path, Any]:
    """Path -> array of a state, or of a mapping that is flat already."""
    flat = nnx.to_flat_state(state) if isinstance(state, nnx.State) else state.items()
    return {
        cast(Path, tuple(path)): v.get_value() if isinstance(v, nnx.Variable) else v
        for path, v in flat
    }


def collect_adapters(
    state: nnx.State | Mapping[Path, Any], leaves: Sequence[Leaf]
) -> dict[Path, Adapter]:
    """Fetches the adapters of a model to the host, by the path of their kernel.

    Args:
      state: state (or flat mapping) with the variables `kernel_lora_a`, `kernel_lora_b` and
        `kernel_lora_scale` beside kernels; whatever else it holds is left alone.
      leaves: the bound table of the model.

    Raises:
      ValueError: a variable of an adapter is missing, misplaced or of the wrong shape.
    """
    arrays = {p: v for p, v in flat_arrays(state).items() if p[-1] in (A, B, SCALE)}
    kernels = [leaf for leaf in leaves if leaf.adaptable]
    homes = {(*leaf.path[:-1], name) for leaf in kernels for name in (A, B, SCALE)}
    strays = [".".join(map(str, p)) for p in arrays if p not in homes]
    if strays:
        raise ValueError(f"adapters beside no projection of the table: {', '.join(strays)}")
    adapters = {}
    for leaf in kernels:
        beside: list[Path] = [(*leaf.path[:-1], name) for name in (A, B, SCALE)]
        found = [distributed.fetch(arrays[path]) for path in beside if path in arrays]
        if found:
            _check_shapes(leaf, found)
            a, b, scale = (array.astype(np.float32, copy=False) for array in found)
            adapters[leaf.path] = Adapter(leaf, a, b, scale)
    return adapters


def _check_shapes(leaf: Leaf, found: Sequence[np.ndarray]) -> None:
    if len(found) != 3:
        raise ValueError(f"{leaf.dotted}: an adapter needs {A}, {B} and {SCALE} all three")
    a, b, scale = found
    r = a.shape[leaf.inner_axes[1]] if a.ndim == len(leaf.shape) else 0
    expected = (*factor_shapes(leaf, r), scale_shape(leaf))
    if (a.shape, b.shape, scale.shape) != expected:
        raise ValueError(
            f"{leaf.dotted}: A, B and scale have shapes {a.shape}, {b.shape}, {scale.shape}, "
            f"expected {expected}"
        )
