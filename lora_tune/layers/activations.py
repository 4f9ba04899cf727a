# SPDX-License-Identifier: Apache-2.0
"""Activation functions, computed in float32 and rounded once, as torch does."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp


def silu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(x)`."""
    return jax.nn.silu(_widened(x)).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by the approximation with tanh: `gelu_pytorch_tanh` of transformers."""
    return jax.nn.gelu(_widened(x), approximate=True).astype(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": silu,
    "gelu_pytorch_tanh": gelu_tanh,
}
"""Activations by the names of transformers."""


def _widened(x: jax.Array) -> jax.Array:
    """x in float32, and no more precise than it was.

    XLA leaves out a cast to bfloat16 that a cast to float32 follows, so that what a projection puts
    out would be rounded where an adapter is added to it, and not where none is.
    """
    if x.dtype == jnp.float32:
        return x
    kind = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)
