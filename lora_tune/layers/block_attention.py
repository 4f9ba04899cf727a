# SPDX-License-Identifier: Apache-2.0
"""Softmax attention of one block of queries, with a backward pass that keeps no probabilities.

As in FlashAttention (Dao et al., arXiv 2205.14135), forward keeps its output and one log-sum-exp a
query, and backward makes the probabilities again from them: less memory than their derivative by
jax, and no second maximum, sum or division. Both carry the name `scan.MIXED`, so that a remat
policy that keeps it runs forward once. Heads come first in every product, so that the
`[T, S]` arrays are read and written in one order throughout.

A CPU takes rows that attend to themselves by spans of queries, each with the keys that one of them
may see: of four spans the products are five eighths of what they are over all keys.
"""

import functools
from collections.abc import Callable, Iterator
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
    """What does not change from call to call.

    Attributes:
      scale: of the logits.
      sliding_window: how many keys a query sees, None for all before it.
      precision: of products of float32.
      alone: whether the queries are the tokens of the keys, in order.
    """

    scale: float
    sliding_window: int | None
    precision: Any
    alone: bool = False


_SPAN, _SPANS = 64, 4
"""Queries of a span at least, and spans of a block at most."""


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
    out, normaliser = _by_platform(_attend, settings, q, k, v, masking)
    out, normaliser = checkpoint_name(out, MIXED), checkpoint_name(normaliser, MIXED)
    return out, (q, k, v, masking, out, normaliser)


def _backward(settings: Settings, kept: tuple, g: Array) -> tuple:
    return *_by_platform(_slopes, settings, *kept, g), None


def _by_platform(run: Callable, settings: Settings, q: Array, *rest: Any) -> Any:
    """`run(spans, settings, q, …)` over as many spans of queries as the platform gains by."""
    spans = max(1, min(_SPANS, q.shape[1] // _SPAN)) if settings.alone else 1
    whole = functools.partial(run, 1, settings)
    if spans == 1:
        return whole(q, *rest)
    cut = functools.partial(run, spans, settings)
    return jax.lax.platform_dependent(q, *rest, cpu=cut, default=whole)


def _cut(
    spans: int, settings: Settings, k: Array, masking: Masking
) -> Iterator[tuple[slice, slice, Masking]]:
    """Each span's queries, the keys they may see, and the masking between the two."""
    time, length = masking.index.shape[1], k.shape[1]
    size = -(-time // spans)
    for start in range(0, time, size):
        stop = min(start + size, time)
        first, last = (0, stop) if spans > 1 else (0, length)
        if spans > 1 and settings.sliding_window is not None:
            first = max(0, start - settings.sliding_window + 1)
        queries, keys = slice(start, stop), slice(first, last)
        ids, key_ids = masking.segment_ids[:, queries], masking.key_segment_ids[:, keys]
        yield queries, keys, Masking(masking.index[:, queries] - first, ids, key_ids)


def _attend(
    spans: int, settings: Settings, q: Array, k: Array, v: Array, masking: Masking
) -> tuple[Array, Array]:
    """What attention puts out `[B, T, N, Hv]`, and log-sum-exps `[B, K, G, T]` in float32."""
    outs, normalisers = [], []
    for queries, keys, seen in _cut(spans, settings, k, masking):
        span, value = q[:, queries], _keys_first(v[:, keys])
        logits = _logits(span, k[:, keys], seen, settings)
        most = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - most)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = _product(weights.astype(v.dtype), value, 3, 2, settings) / total
        outs.append(jnp.where(_is_real(seen), _heads_last(out, span), 0.0).astype(q.dtype))
        normaliser = most + jnp.log(total)
        normalisers.append(normaliser.reshape(*normaliser.shape[:2], -1, span.shape[1]))
    return jnp.concatenate(outs, axis=1), jnp.concatenate(normalisers, axis=3)


def _slopes(
    spans: int,
    settings: Settings,
    q: Array,
    k: Array,
    v: Array,
    masking: Masking,
    out: Array,
    normaliser: Array,
    g: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v; those of k and v are summed over spans in float32."""
    dqs, dk, dv = [], None, None
    for queries, keys, seen in _cut(spans, settings, k, masking):
        span, key, value = q[:, queries], k[:, keys], v[:, keys]
        total = normaliser[..., queries].reshape(*normaliser.shape[:2], -1, 1)
        given = jnp.where(_is_real(seen), g[:, queries], 0.0).astype(q.dtype)
        share = jnp.sum(
            given.astype(jnp.float32) * out[:, queries].astype(jnp.float32), axis=-1, keepdims=True
        )
        weights = jnp.exp(_logits(span, key, seen, settings) - total)
        g_heads = _heads_first(given, k)
        slope = _product(g_heads, _keys_first(value), 3, 3, settings) - _heads_first(share, k)
        slope = (weights * slope * settings.scale).astype(q.dtype)
        dq = _product(slope, _keys_first(key), 3, 2, settings)
        dqs.append(_heads_last(dq, span).astype(q.dtype))
        # This way around a CPU turns the narrow operand over, not the [T, S] one.
        dk = _add(dk, _product(_heads_first(span, k), slope, 2, 2, settings), keys)
        dv = _add(dv, _product(g_heads, weights.astype(v.dtype), 2, 2, settings), keys)
    dk, dv = (_keys_last(x).astype(y.dtype) for x, y in ((dk, k), (dv, v)))
    return jnp.concatenate(dqs, axis=1), dk, dv


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


def _keys_last(x: Array) -> Array:  # [B, K, H, S] -> [B, S, K, H]
    return x.transpose(0, 3, 1, 2)


def _add(total: Array | None, part: Array, keys: slice) -> Array:
    """`part` `[B, K, H, S]` of some keys, and what earlier keys have so far."""
    if total is None:
        return part
    grown = jnp.pad(total, ((0, 0), (0, 0), (0, 0), (0, keys.stop - total.shape[3])))
    return grown + jnp.pad(part, ((0, 0), (0, 0), (0, 0), (keys.start, 0)))
