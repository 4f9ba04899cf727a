# SPDX-License-Identifier: Apache-2.0
"""Causal grouped-query attention inside segments.

The reference is computed by blocks of queries. Rows of bfloat16 that attend to themselves take a
kernel instead on TPU.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from lora_tune.layers.block_attention import Masking, Settings, block_attention
from lora_tune.layers.splash import splash_attention, splash_fits
from lora_tune.scan import MIXED

_EXACT = jax.lax.Precision.HIGHEST


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    query_offset: int | Int[Array, " B"] | None = None,
    sliding_window: int | None = None,
    block_size: int = 512,
    precision: jax.lax.PrecisionLike = _EXACT,
) -> Float[Array, "B T N Hv"]:
    """Attend to earlier keys of the same segment; query head n reads kv head n // (N / K).

    Query t stands at index query_offset + t among the keys (default S - T: the queries are the
    last of the keys; an array gives one offset per row, for a cache filled row by row). It sees
    key s when s is not after it, less than sliding_window before it when that is given, and of
    the same segment. segment_ids belong to the queries, key_segment_ids to the keys (default: the
    queries' own, which needs S == T); id 0 is padding: such keys are never seen, such queries give
    zeros and carry no gradient.

    Logits and softmax are float32; probabilities are cast to v's dtype for the second product,
    which accumulates in float32. `precision` matters for float32 operands only. With more than
    block_size queries, blocks run one after the other, and probabilities are made again in the
    backward pass, so the [T, S] matrix never exists whole. On TPU, what `splash_fits` goes through
    its kernel. What comes out is named `MIXED` for remat, once. Returns q's dtype.
    Raises ValueError when N is not a multiple of K, or segment_ids come without the keys' own and
    S differs from T.
    """
    batch, time, heads, _ = q.shape
    length = k.shape[1]
    if heads % k.shape[2]:
        raise ValueError(f"attention: {heads} query heads, not a multiple of {k.shape[2]} kv heads")
    alone = query_offset is None and key_segment_ids is None
    if segment_ids is not None and key_segment_ids is None:
        if time != length:
            raise ValueError(
                f"attention: {time} queries have segment_ids but {length} keys have none; give "
                "key_segment_ids"
            )
        key_segment_ids = segment_ids
    if segment_ids is None and key_segment_ids is not None:
        raise ValueError("attention: key_segment_ids were given without segment_ids")
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
        key_segment_ids = jnp.ones((batch, length), jnp.int32)
    form = _Form(scale, sliding_window, block_size, precision)
    if alone and splash_fits(q, k, v):
        return cast(Array, _by_platform(form, q, k, v, segment_ids))
    offset = jnp.asarray(length - time if query_offset is None else query_offset, jnp.int32)
    return _reference(form, q, k, v, segment_ids, key_segment_ids, offset, alone=alone)


class _Form(NamedTuple):
    """The static arguments of `attention`."""

    scale: float
    sliding_window: int | None
    block_size: int
    precision: jax.lax.PrecisionLike


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_platform(form: _Form, q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """Attend in the platform's form, chosen once more in the backward pass.

    The derivative of the choice itself would keep what either form may need.
    """
    return _by_platform_forward(form, q, k, v, segment_ids)[0]


def _by_platform_forward(form: _Form, q: Array, k: Array, v: Array, segment_ids: Array) -> Any:
    def forward(attend: Any) -> Any:
        # With what the derivative needs, so that it is one kernel with that in the backward pass.
        return lambda q, k, v, ids: jax.vjp(lambda *x: attend(*x, ids), q, k, v)[0]

    out = jax.lax.platform_dependent(
        q, k, v, segment_ids, tpu=forward(_splash(form)), default=_plain(form)
    )
    return checkpoint_name(out, MIXED), (q, k, v, segment_ids)


def _by_platform_backward(form: _Form, kept: Any, d_out: Array) -> Any:
    def backward(attend: Any) -> Any:
        return lambda q, k, v, ids, d: jax.vjp(lambda *x: attend(*x, ids), q, k, v)[1](d)

    grads = jax.lax.platform_dependent(
        *kept, d_out, tpu=backward(_splash(form)), default=backward(_plain(form))
    )
    return *grads, None


_by_platform.defvjp(_by_platform_forward, _by_platform_backward)


def _splash(form: _Form) -> Any:
    return partial(splash_attention, scale=form.scale, sliding_window=form.sliding_window)


def _plain(form: _Form) -> Any:
    return lambda q, k, v, ids: _reference(form, q, k, v, ids, ids, jnp.int32(0), alone=True)


def _reference(form, q, k, v, segment_ids, key_segment_ids, offset, *, alone: bool) -> Array:
    batch, time = segment_ids.shape
    index = jnp.broadcast_to(jnp.expand_dims(offset, -1), (batch, 1)) + jnp.arange(time)[None, :]
    alone = alone and time == k.shape[1] and time <= form.block_size
    settings = Settings(form.scale, form.sliding_window, form.precision, alone)

    def block(queries: tuple[Array, Array, Array]) -> Array:
        q, index, ids = queries
        return block_attention(q, k, v, Masking(index, ids, key_segment_ids), settings)

    if time <= form.block_size:
        return block((q, index, segment_ids))
    return _by_blocks(block, (q, index, segment_ids), form.block_size)


def _by_blocks(block, queries: tuple[Array, Array, Array], size: int) -> Array:
    """Map over blocks of queries; the last one is filled up with padding queries (id 0)."""
    time = queries[0].shape[1]
    count = -(-time // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - time)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    out = jax.lax.map(block, tuple(split(x) for x in queries))
    out = jnp.moveaxis(out, 0, 1)  # [B, blocks, size, N, H]
    return out.reshape(out.shape[0], count * size, *out.shape[3:])[:, :time]
