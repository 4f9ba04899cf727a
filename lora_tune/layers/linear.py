# SPDX-License-Identifier: Apache-2.0
"""Projections and the embedding: the modules whose kernels adapters attach to.

A projection is one module with one parameter called `kernel`, so that a rule can target it by the
module's path. Activations are flattened to two dimensions first: an adapter's gradient is then one
2-D product, which compiles to markedly faster code than a contraction over batch and time.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from lora_tune import sharding
from lora_tune.layers import grouped
from lora_tune.layers.weights import NORMAL, ZEROS, cast, weight
from lora_tune.scan import PROJECTED


class Linear(nnx.Module):
    """`y = x @ kernel`, kernel `[in, out]`, plus a `bias` `[out]` where the layer has one.

    The kernel is cast to the activations' dtype, so float32 parameters can be trained under
    bfloat16 compute.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str | None, str | None],
        dtype: DTypeLike,
        bias: bool = False,
    ):
        self.kernel = weight((in_features, out_features), dtype, axes=axes, init=NORMAL)
        if bias:
            self.bias = weight((out_features,), dtype, axes=axes[1:], init=ZEROS)
        self.has_bias = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., in]` to `[..., out]`."""
        flat = x.reshape(-1, x.shape[-1])
        kernel = self.kernel[...].astype(x.dtype)
        y = jax.lax.dot_general(flat, kernel, (((1,), (0,)), ((), ())))
        if self.has_bias:
            y = y + self.bias[...].astype(x.dtype)[None, :]
        y = checkpoint_name(y, PROJECTED)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class ExpertLinear(nnx.Module):
    """One projection per expert, kernel `[E, in, out]`, applied to rows grouped by expert."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str | None, str | None],
        dtype: DTypeLike,
    ):
        shape = (num_experts, in_features, out_features)
        self.kernel = weight(shape, dtype, axes=("expert", *axes), init=NORMAL)

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Rows `[n, in]`, sorted by expert, `group_sizes [E]` of them each, -> `[n, out]`."""
        return grouped.grouped_dot(x, cast(self.kernel[...], x.dtype), group_sizes)


class Embed(nnx.Module):
    """Token embedding `[V, D]`, which can also serve as the output head (tied weights)."""

    def __init__(self, vocab_size: int, features: int, *, dtype: DTypeLike):
        axes = ("vocab", "embed")
        self.embedding = weight((vocab_size, features), dtype, axes=axes, init=NORMAL)

    def __call__(self, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Looks up `[B, T]` token ids: `[B, T, D]` in the given dtype.

        In a manual region every device holds some columns of the table. Token ids travel to all of
        them and the columns back, instead of the whole table.
        """
        table, flat = self.embedding[...], tokens.reshape(-1)
        (_, over) = sharding.manual_axes(self.embedding.get_metadata()["axes"])
        if over:
            flat = jax.lax.all_gather(flat, over, axis=0, tiled=True)
        rows = jnp.take(table, flat, axis=0, mode="clip").astype(dtype)
        if over:
            rows = jax.lax.all_to_all(rows, over, split_axis=0, concat_axis=1, tiled=True)
        return rows.reshape(*tokens.shape, rows.shape[-1])

    def attend(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., V]
        """Scores against every token: the output head of a model with tied embeddings."""
        embedding = self.embedding[...].astype(x.dtype)
        return jax.lax.dot_general(x, embedding, (((x.ndim - 1,), (1,)), ((), ())))
