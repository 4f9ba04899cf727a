# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a chunked form for training and the step-by-step form for decoding.

Per value head, with a state S [Dk, Dv] in float32, L2-normalised q and k, q scaled by Dk**-0.5:

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

(Yang et al., "Gated Delta Networks", arXiv 2412.06464; chunkwise form: arXiv 2406.06484, in
`delta_chunks`.) Documents packed in one row are kept apart at any offset.

Shapes: B batch, T time, K key heads, Nv value heads, Dk and Dv the widths of key and value heads.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lora_tune.layers.chunk_scan import chunk_scan
from lora_tune.layers.delta_chunks import (
    Marks,
    Operands,
    delta_chunk,
    normalised,
    normalised_queries,
)
from lora_tune.layers.segments import mask_padding, running_segments

_EXACT = jax.lax.Precision.HIGHEST


def gated_delta_rule(
    q: Float[Array, "B T K Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T Nv Dv"],
    g: Float[Array, "B T Nv"],
    beta: Float[Array, "B T Nv"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B Nv Dk Dv"] | None = None,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = _EXACT,
) -> tuple[Float[Array, "B T Nv Dv"], Float[Array, "B Nv Dk Dv"]]:
    """Apply the gated delta rule to whole rows, chunk by chunk.

    q and k are normalised here (float32, x * rsqrt(sum x^2 + 1e-6)); key head i serves the Nv/K
    consecutive value heads from i * Nv/K. g is the log decay (<= 0), beta the write strength.

    segment_ids (0 = padding): a padding token neither decays nor writes the state and its output
    is zero. A real token whose id differs from the last real token before it starts from a zero
    state. initial_state continues the row's first segment, also across padding before it (zeros
    when None).

    Returns (out in v's dtype, the state after the last real token in float32).

    Everything is computed in float32. `precision` is that of the products with tokens and states;
    the triangular inverse and the cumulative decay always use the highest, because their errors
    are amplified. Raises ValueError when Nv is not a multiple of K.
    """
    batch, time, value_heads, _ = v.shape
    size = min(chunk_size, time)
    # Heads and head width share one axis: a TPU stores the last two axes in tiles, so that to split
    # them is a copy of all tokens, where it costs a chunk nothing.
    rows = tuple(fill_up(x.reshape(batch, time, -1), size) for x in (q, k, v, g, beta))
    body = partial(_chunk, key_heads=k.shape[2], groups=_groups(k, v), precision=precision)
    marks = make_marks(segment_ids, batch, time, size)
    # With key width before value heads, all of them are the columns of one product.
    state = jnp.swapaxes(_grouped_state(initial_state, k, v), 2, 3)
    out, state = chunk_scan(body, size=size, marks=marks, rows=rows, carry=state)
    state = jnp.swapaxes(state, 2, 3)
    return out[:, :time].reshape(v.shape), state.reshape(batch, value_heads, *state.shape[-2:])


def _chunk(
    _: Any, marks: Marks, rows: tuple[Array, ...], state: Array, *, key_heads, groups, precision
) -> tuple[Array, Array]:
    q, k, v, g, beta = rows
    keys = (*g.shape[:2], key_heads, -1)
    values = (*g.shape[:2], key_heads, groups)
    operands = Operands(
        q=q.reshape(keys),
        k=k.reshape(keys),
        v=v.reshape(*values, -1),
        g=g.reshape(values),
        beta=beta.reshape(values),
    )
    state, out = delta_chunk(operands, marks, state, precision=precision)
    return state, out.reshape(v.shape).astype(v.dtype)


def recurrent_gated_delta_rule(
    q: Float[Array, "B T K Dk"],
    k: Float[Array, "B T K Dk"],
    v: Float[Array, "B T Nv Dv"],
    g: Float[Array, "B T Nv"],
    beta: Float[Array, "B T Nv"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B Nv Dk Dv"] | None = None,
    precision: jax.lax.PrecisionLike = _EXACT,
) -> tuple[Float[Array, "B T Nv Dv"], Float[Array, "B Nv Dk Dv"]]:
    """Apply the same rule token by token: the definition, and the step used in decoding.

    Arguments, results and errors are those of `gated_delta_rule`. Do not train through it: the
    backward pass keeps one state a token.
    """
    batch, _, value_heads, value_dim = v.shape
    dtype = v.dtype
    grouped = (*v.shape[:2], k.shape[2], _groups(k, v))
    initial_state = _grouped_state(initial_state, k, v)
    q, k, v, g, beta = (
        mask_padding(x, segment_ids).astype(jnp.float32) for x in (q, k, v, g, beta)
    )
    decay = jnp.exp(g)
    if segment_ids is not None:
        _, run = running_segments(segment_ids)
        fresh = jnp.diff(run, axis=1, prepend=0) != 0
        decay = jnp.where(fresh[..., None], 0.0, decay)
    by_time = tuple(
        jnp.moveaxis(x, 1, 0)
        for x in (
            normalised_queries(q),
            normalised(k),
            v.reshape(*grouped, -1),
            decay.reshape(grouped),
            beta.reshape(grouped),
        )
    )

    def step(state, token):
        q, k, v, decay, beta = token
        # One product reads the state for key and query alike: o = S^T q + (k.q) u.
        keys = jnp.stack([k, q], axis=2)
        read = jnp.einsum("bkid,bkgdv->ibkgv", keys, state, precision=precision)
        read = read * decay[None, ..., None]
        write = beta[..., None] * (v - read[0])
        added = jnp.einsum("bkd,bkgv->bkgdv", k, write, precision=precision)
        overlap = jnp.sum(k * q, axis=-1)[:, :, None, None]
        return decay[..., None, None] * state + added, read[1] + overlap * write

    state, out = jax.lax.scan(step, initial_state, by_time)
    out = jnp.moveaxis(out, 0, 1).reshape(v.shape)
    return out.astype(dtype), state.reshape(batch, value_heads, -1, value_dim)


def _groups(k: Array, v: Array) -> int:
    """The number of value heads that one key head serves."""
    key_heads, value_heads = k.shape[2], v.shape[2]
    if value_heads % key_heads:
        raise ValueError(
            f"gated delta rule: {value_heads} value heads cannot be shared by {key_heads} key "
            "heads; the number of value heads must be a multiple"
        )
    return value_heads // key_heads


def _grouped_state(initial_state: Array | None, k: Array, v: Array) -> Array:
    shape = (k.shape[0], k.shape[2], _groups(k, v), k.shape[-1], v.shape[-1])
    if initial_state is None:
        return jnp.zeros(shape, jnp.float32)
    return initial_state.astype(jnp.float32).reshape(shape)


def fill_up(x: Array, size: int, mode: str = "constant") -> Array:
    """Lengthen the time axis of `[B, T, ...]` to a multiple of size."""
    missing = -x.shape[1] % size
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)


def make_marks(segment_ids: Array | None, batch: int, time: int, size: int) -> Marks:
    """The marks of whole rows `[B, T]`, filled up with padding to whole chunks of size tokens."""
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
    real, run = running_segments(segment_ids)
    real, run = fill_up(real, size), fill_up(run, size, "edge")
    before = jnp.pad(run[:, size - 1 : -1 : size], ((0, 0), (1, 0)))
    return Marks(real, run, jnp.repeat(before, size, axis=1))
