# SPDX-License-Identifier: Apache-2.0
"""Softmax attention of one block of queries, with a backward pass that keeps no probabilities.

As in FlashAttention (Dao et al., arXiv 2205.14135), forward keeps its output and one log-sum-exp a
query, and backward makes the probabilities again from them: less memory than their derivative by
jax, and no second maximum, sum or division. Both carry the name `scan.MIXED`, so that a remat
policy that keeps it runs forward once. Heads come first in every product, so that the
`[T, S]` arrays are read and written in one order throughout.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from lora_tune.scan import MIXED


class Masking(NamedTuple):
    """Which keys a query sees: earlier ones of its segment, all by index.

    Attributes:
      index: int32 `[B, T]`, place of each query among the keys.
      segment_ids: int32 `[B, T]` of the queries; 0 is padding.
      key_segment_ids: int32 `[B, S]`.
    """

    index: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    key_segment_ids: Int[Array, "B S"]


class Settings(NamedTuple):
    """What does not change from call to call: scale of the logits, window, precision of float32."""

    scale: float
    sliding_window: int | None
    precision: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    masking: Masking,
    settings: Settings,
) -> Float[Array, "B T N Hv"]:
    """Attends from a block of queries to the keys each one sees.

    Logits, softmax and sums are float32; probabilities are cast to v's dtype for their product,
    and divided by their sum behind it. Padding queries give zeros. Returns q's dtype.
    """
    return _forward(q, k, v, masking, settings)[0]


def _forward(q: Array, k: Array, v: Array, masking: Masking, settings: Settings) -> tuple:
    logits = _logits(q, k, masking, settings)
    most = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = _product(weights.astype(v.dtype), _keys_first(v), 3, 2, settings) / total
    out = jnp.where(_is_real(masking), _heads_last(out, q), 0.0).astype(q.dtype)
    out = checkpoint_name(out, MIXED)
    normaliser = checkpoint_name(most + jnp.log(total), MIXED)
    return out, (q, k, v, masking, out, normaliser)


def _backward(settings: Settings, kept: tuple, g: Array) -> tuple:
    q, k, v, masking, out, normaliser = kept
    g = jnp.where(_is_real(masking), g, 0.0).astype(q.dtype)
    weights = jnp.exp(_logits(q, k, masking, settings) - normaliser)
    queries, keys, values = _heads_first(q, k), _keys_first(k), _keys_first(v)
    g_heads = _heads_first(g, k)
    share = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    slope = _product(g_heads, values, 3, 3, settings) - _heads_first(share, k)
    slope = (weights * slope * settings.scale).astype(q.dtype)
    dq = _heads_last(_product(slope, keys, 3, 2, settings), q).astype(q.dtype)
    dk = _keys_last(_product(slope, queries, 2, 2, settings)).astype(k.dtype)
    dv = _keys_last(_product(weights.astype(v.dtype), g_heads, 2, 2, settings)).astype(v.dtype)
    return dq, dk, dv, None


block_attention.defvjp(_forward, _backward)


def _logits(q: Array, k: Array, masking: Masking, settings: Settings) -> Float[Array, "B K GT S"]:
    """Scaled products `[B, K, G * T, S]`; those of unseen keys have a finite floor.

    Finite, so that rows that see nothing (padding) stay finite in both directions.
    """
    logits = _product(_heads_first(q, k), _keys_first(k), 3, 3, settings) * settings.scale
    distance = masking.index[:, :, None] - jnp.arange(k.shape[1])[None, None, :]
    seen = distance >= 0
    seen &= masking.segment_ids[:, :, None] == masking.key_segment_ids[:, None, :]
    if settings.sliding_window is not None:
        seen &= distance < settings.sliding_window
    split = (*logits.shape[:2], -1, *seen.shape[1:])
    floor = jnp.finfo(jnp.float32).min
    return jnp.where(seen[:, None, None], logits.reshape(split), floor).reshape(logits.shape)


def _product(x: Array, y: Array, x_axis: int, y_axis: int, settings: Settings) -> Array:
    """`[B, K, …]` products over one axis of each, summed in float32."""
    return jax.lax.dot_general(
        x,
        y,
        (((x_axis,), (y_axis,)), ((0, 1), (0, 1))),
        precision=settings.precision,
        preferred_element_type=jnp.float32,
    )


def _is_real(masking: Masking) -> Array:
    return (masking.segment_ids != 0)[:, :, None, None]


def _heads_first(x: Array, k: Array) -> Array:
    """`[B, T, N, H]` -> `[B, K, G * T, H]`, G query heads to a key/value head."""
    batch, time, heads, width = x.shape
    groups = x.reshape(batch, time, k.shape[2], heads // k.shape[2], width)
    return groups.transpose(0, 2, 3, 1, 4).reshape(batch, k.shape[2], -1, width)


def _heads_last(x: Array, q: Array) -> Array:
    """The inverse of `_heads_first`."""
    batch, time, heads, _ = q.shape
    groups = x.reshape(batch, x.shape[1], heads // x.shape[1], time, x.shape[-1])
    return groups.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, x.shape[-1])


def _keys_first(x: Array) -> Array:  # [B, S, K, H] -> [B, K, S, H]
    return x.transpose(0, 2, 1, 3)


def _keys_last(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3)
