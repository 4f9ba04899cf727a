# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a chunked form for training and the step-by-step form for decoding.

Per value head, with a state S [Dk, Dv] in float32, L2-normalised q and k, q scaled by Dk**-0.5:

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

(Yang et al., "Gated Delta Networks", arXiv 2412.06464; chunkwise form: arXiv 2406.06484.)
Inside a chunk the corrections u solve the unit lower triangular system (I + L) u = rhs with
L_ij = beta_i exp(c_i - c_j) k_i.k_j below the diagonal and c the cumulative g, so only one step a
chunk is sequential. Documents packed in one row are kept apart in those masks, at any offset.

Shapes: B batch, T time, K key heads, G value heads a key head serves, C chunk length, n chunks;
d indexes Dk and v indexes Dv in the einsums.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lora_tune.layers.segments import mask_padding, running_segments

_EPS = 1e-6
_EXACT = jax.lax.Precision.HIGHEST


class _Inputs(NamedTuple):
    """float32 operands with padding made inert; heads before time."""

    q: Array  # [B, K, T, Dk]
    k: Array  # [B, K, T, Dk]
    v: Array  # [B, K, G, T, Dv]
    g: Array  # [B, K, G, T]
    beta: Array  # [B, K, G, T]
    run: Array  # [B, T] int32


class _Chunk(NamedTuple):
    """What one sequential step reads; stacked over chunks in front."""

    qk: Array  # [B, K, 2C, Dk], queries above keys: one product with the state serves both
    v: Array  # [B, K, G, C, Dv]
    beta: Array  # [B, K, G, C]
    entering: Array  # [B, K, G, C], decay from the state handed in to each token
    leaving: Array  # [B, K, G, C], decay from each token to the state handed on
    kept: Array  # [B, K, G], decay from the state handed in to the state handed on
    lower: Array  # [B, K, G, C, C], L
    inverse: Array  # [B, K, G, C, C], (I + L)^-1
    scores: Array  # [B, K, G, C, C], q.k with decay


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
    batch, time, value_heads, value_dim = v.shape
    inputs = _prepare(q, k, v, g, beta, segment_ids)
    chunks = _chunks(inputs, size=min(chunk_size, time), precision=precision)
    state = _grouped_state(initial_state, inputs)
    # Only the chunk states are kept for the backward pass; a step is recomputed from its inputs.
    step = jax.checkpoint(partial(_step, precision=precision), prevent_cse=False)
    state, out = jax.lax.scan(step, state, chunks)  # out [n, B, K, G, C, Dv]
    out = jnp.transpose(out, (1, 0, 4, 2, 3, 5)).reshape(batch, -1, value_heads, value_dim)
    return out[:, :time].astype(v.dtype), state.reshape(batch, value_heads, -1, value_dim)


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
    inputs = _prepare(q, k, v, g, beta, segment_ids)
    fresh = jnp.diff(inputs.run, axis=1, prepend=0)[:, None, None, :] != 0
    decay = jnp.where(fresh, 0.0, jnp.exp(inputs.g))
    by_time = (inputs.q, inputs.k, inputs.v, decay, inputs.beta)
    by_time = tuple(
        jnp.moveaxis(x, axis, 0) for x, axis in zip(by_time, (2, 2, 3, 3, 3), strict=True)
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

    state, out = jax.lax.scan(step, _grouped_state(initial_state, inputs), by_time)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, value_heads, value_dim)
    return out.astype(v.dtype), state.reshape(batch, value_heads, -1, value_dim)


def unit_lower_inverse(lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Return (I + L)^-1 for a strictly lower triangular L (its other entries are ignored).

    Block doubling: let X invert the diagonal blocks of size b. With L_off the part of L between
    the two halves of each block of size 2b, X - X L_off X inverts the blocks of size 2b exactly.
    Two products a level, ceil(log2 C) levels (the first needs none, X is the identity), any C.
    No power of L is formed: those overflow float32 as soon as entries exceed 1.
    """
    size = lower.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        own = index // block
        between = (own[:, None] == own[None, :] + 1) & (own[None, :] % 2 == 0)
        off = jnp.where(jnp.broadcast_to(between, lower.shape), lower, 0.0)
        if block > 1:
            off = jnp.matmul(jnp.matmul(inverse, off, precision=_EXACT), inverse, precision=_EXACT)
        inverse = inverse - off
        block *= 2
    return inverse


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _solve(lower: Array, inverse: Array, rhs: Array, precision: jax.lax.PrecisionLike) -> Array:
    """Return x with (I + lower) x = rhs, given the inverse; differentiable in lower and rhs."""
    return jnp.matmul(inverse, rhs, precision=precision)


@_solve.defjvp
def _solve_jvp(precision, primals, tangents):
    # d((I + L) x) = d(rhs). Its transpose is d_rhs = X^T d_x and d_L = -d_rhs x^T: the gradient
    # never passes through the construction of the inverse.
    lower, inverse, rhs = primals
    d_lower, _, d_rhs = tangents
    x = _solve(lower, inverse, rhs, precision)
    moved = d_rhs - jnp.matmul(d_lower, x, precision=precision)
    return x, jnp.matmul(inverse, moved, precision=precision)


def _step(state: Array, chunk: _Chunk, *, precision) -> tuple[Array, Array]:
    """Run one chunk: state [B, K, G, Dk, Dv] -> (state after it, outputs [B, K, G, C, Dv])."""
    size = chunk.beta.shape[-1]
    read = jnp.einsum("bkcd,bkgdv->bkgcv", chunk.qk, state, precision=precision)
    read = read * jnp.concatenate([chunk.entering, chunk.entering], axis=-1)[..., None]
    rhs = chunk.beta[..., None] * (chunk.v - read[..., size:, :])
    written = _solve(chunk.lower, chunk.inverse, rhs, precision)
    out = read[..., :size, :] + jnp.matmul(chunk.scores, written, precision=precision)
    keys = chunk.qk[..., size:, :]
    left = chunk.leaving[..., None] * written
    added = jnp.einsum("bkcd,bkgcv->bkgdv", keys, left, precision=precision)
    return chunk.kept[..., None, None] * state + added, out


def _prepare(q, k, v, g, beta, segment_ids) -> _Inputs:
    batch, time, value_heads, _ = v.shape
    key_heads = k.shape[2]
    if value_heads % key_heads:
        raise ValueError(
            f"gated delta rule: {value_heads} value heads cannot be shared by {key_heads} key "
            "heads; the number of value heads must be a multiple"
        )
    q, k, v, g, beta = (
        mask_padding(x, segment_ids).astype(jnp.float32) for x in (q, k, v, g, beta)
    )
    run = jnp.zeros((batch, time), jnp.int32)
    if segment_ids is not None:
        _, run = running_segments(segment_ids)
    grouped = (batch, time, key_heads, value_heads // key_heads)
    return _Inputs(
        q=jnp.swapaxes(_normalised(q) * q.shape[-1] ** -0.5, 1, 2),
        k=jnp.swapaxes(_normalised(k), 1, 2),
        v=jnp.moveaxis(v.reshape(*grouped, -1), 1, 3),
        g=jnp.moveaxis(g.reshape(grouped), 1, 3),
        beta=jnp.moveaxis(beta.reshape(grouped), 1, 3),
        run=run,
    )


def _normalised(x: Array) -> Array:
    # eps stays inside the root: a zero row then has a finite gradient.
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def _grouped_state(initial_state: Array | None, inputs: _Inputs) -> Array:
    batch, key_heads, groups, _, value_dim = inputs.v.shape
    shape = (batch, key_heads, groups, inputs.k.shape[-1], value_dim)
    if initial_state is None:
        return jnp.zeros(shape, jnp.float32)
    return initial_state.astype(jnp.float32).reshape(shape)


def _split(x: Array, axis: int, size: int, mode: str = "constant") -> Array:
    """Pad one axis to a multiple of size, cut it in chunks and put the chunk axis in front."""
    count = -(-x.shape[axis] // size)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, widths, mode=mode)
    x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _chunks(inputs: _Inputs, *, size: int, precision) -> _Chunk:
    """Compute, for all chunks at once, everything that does not depend on the state."""
    q, k = _split(inputs.q, 2, size), _split(inputs.k, 2, size)
    v, g, beta = (_split(x, 3, size) for x in (inputs.v, inputs.g, inputs.beta))
    qk = jnp.concatenate([q, k], axis=-2)
    decay, entering, leaving, kept = _decays(g, _split(inputs.run, 1, size, "edge"))
    products = jnp.einsum("nbkid,nbkjd->nbkij", qk, k, precision=precision)[:, :, :, None]
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    lower = beta[..., None] * decay * products[..., size:, :]
    lower = jnp.where(jnp.broadcast_to(strict, lower.shape), lower, 0.0)
    inverse = unit_lower_inverse(jax.lax.stop_gradient(lower))
    scores = decay * products[..., :size, :]
    return _Chunk(qk, v, beta, entering, leaving, kept, lower, inverse, scores)


def _decays(g: Array, run: Array) -> tuple[Array, Array, Array, Array]:
    """Return decay between tokens [..., C, C], from and to the state [..., C], across [...].

    g [n, B, K, G, C], run [n, B, C]. A pair is connected when it is causal and in one run; the
    state handed in belongs to the run in which the chunk before ended, the state handed on to the
    run of the last token. Everything else has exponent -inf *before* the exponential, so no
    masked value can overflow or reach a gradient.
    """
    size = g.shape[-1]
    before = jnp.pad(run[:-1, :, -1], ((1, 0), (0, 0)))[:, :, None]
    after = run[:, :, -1:]
    causal = jnp.tril(jnp.ones((size, size), bool))
    connected = (run[..., :, None] == run[..., None, :]) & causal[None, None]
    # A running sum within the run only: documents in one chunk then share no rounding error.
    total = jnp.einsum("nbij,nbkgj->nbkgi", connected.astype(g.dtype), g, precision=_EXACT)

    def masked_exp(exponent: Array, mask: Array) -> Array:
        mask = jnp.broadcast_to(jnp.expand_dims(mask, (2, 3)), exponent.shape)
        return jnp.exp(jnp.where(mask, exponent, -jnp.inf))

    last = total[..., -1:]
    between = masked_exp(total[..., :, None] - total[..., None, :], connected)
    entering = masked_exp(total, run == before)
    leaving = masked_exp(last - total, run == after)
    kept = masked_exp(last, after == before)[..., 0]
    return between, entering, leaving, kept
