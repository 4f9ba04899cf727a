# SPDX-License-Identifier: Apache-2.0
"""How a layer declares a weight: shape, dtype, logical axes and initialiser, in one place.

Layers are built abstract. Their weights are then either loaded from a checkpoint or drawn by
`lora_tune.models.initial`; sharding, planning and the Hugging Face table read the same declaration.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Initialiser:
    """A named distribution of fresh weights; `scale` is its one parameter."""

    name: str
    scale: float = 0.0

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draws float32 values of the given shape."""
        return _DRAWS[self.name](rng, shape, self.scale).astype(np.float32)


_DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...], float], np.ndarray]] = {
    "constant": lambda rng, shape, scale: np.full(shape, scale),
    "normal": lambda rng, shape, scale: scale * rng.standard_normal(shape, np.float32),
    "uniform": lambda rng, shape, scale: rng.uniform(-scale, scale, shape),
    "log_uniform": lambda rng, shape, scale: np.log(rng.uniform(0.01, scale, shape)),
}

ZEROS = Initialiser("constant", 0.0)
ONES = Initialiser("constant", 1.0)
NORMAL = Initialiser("normal", 0.02)
"""`initializer_range` of the Hugging Face configurations."""


def uniform(bound: float) -> Initialiser:
    """U(-bound, bound)."""
    return Initialiser("uniform", bound)


def weight(
    shape: tuple[int, ...], dtype: DTypeLike, *, axes: tuple[str | None, ...], init: Initialiser
) -> nnx.Param[Any]:
    """Declares an abstract parameter; `axes` names each dimension for the sharding table."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, init=init)


def cast(value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`value.astype(dtype)` of a weight, which XLA does not do for all layers at once.

    A plain cast of a layer's slice it turns into a slice of the whole stack's cast, ahead of the
    loop over layers: half as much memory again as the weights take. It lets a rounding stand, and
    a cast of what is rounded changes no value.
    """
    if value.dtype == jnp.float32 and dtype == jnp.bfloat16:
        value = jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
    return value.astype(dtype)
