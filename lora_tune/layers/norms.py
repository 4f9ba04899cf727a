# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation, computed in float32 whatever the activations' dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lora_tune.layers.weights import ONES, ZEROS, weight


def rms_normalise(x: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _scale(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


def _weigh(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`normalise(x) * weight`, rounded to the dtype of `x` before the product and after it."""
    return _scale(rms_normalise(x, eps).astype(x.dtype), weight).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`normalise(x) * (1 + weight)`: the weight is zero-centred, as stored in the checkpoint."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike):
        self.weight = weight((features,), dtype, axes=(None,), init=ZEROS)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of `[..., D]`."""
        return _scale(
            rms_normalise(x, self.eps), 1.0 + self.weight[...].astype(jnp.float32)
        ).astype(x.dtype)


class PlainRMSNorm(nnx.Module):
    """`normalise(x) * weight`.

    With `exact`, the product is float32 as well; otherwise its left side is first rounded to the
    dtype of `x`, as Llama does.
    """

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike, exact: bool = False):
        self.weight = weight((features,), dtype, axes=(None,), init=ONES)
        self.eps = eps
        self.exact = exact

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of `[..., D]`."""
        if self.exact:
            return _scale(rms_normalise(x, self.eps), self.weight[...]).astype(x.dtype)
        return _weigh(x, self.weight[...], self.eps)


def gated_rms_normalise(
    x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float
) -> jax.Array:
    """`normalise(x) * weight * silu(gate)` over the last axis, in x's dtype; the gate in float32.

    The Hugging Face module rounds the weighted product to the input dtype before the gate.
    """
    y = _weigh(x, weight, eps)
    return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """`gated_rms_normalise` with a plain weight, not zero-centred."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike):
        self.weight = weight((features,), dtype, axes=(None,), init=ONES)
        self.eps = eps

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalises the last axis of `x` and multiplies by `silu(gate)`, both `[..., H]`."""
        return gated_rms_normalise(x, gate, self.weight[...], eps=self.eps)
