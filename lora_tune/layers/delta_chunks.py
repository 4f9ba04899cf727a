# SPDX-License-Identifier: Apache-2.0
"""One chunk of the gated delta rule.

Inside a chunk the corrections u solve the unit lower triangular system (I + L) u = rhs with
L_ij = beta_i exp(c_i - c_j) k_i.k_j below the diagonal and c the cumulative g (Yang et al., arXiv
2406.06484, 2412.06464). All that a chunk needs is computed when its turn comes, from the operands
as they were given.

Shapes: B batch, C chunk length, K key heads, G value heads a key head serves; d indexes Dk and v
indexes Dv in the einsums.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

_EPS = 1e-6
_EXACT = jax.lax.Precision.HIGHEST
_SMALLEST_BLOCK = 16


class Operands(NamedTuple):
    """What the rule reads of some tokens."""

    q: Float[Array, "B C K Dk"]
    k: Float[Array, "B C K Dk"]
    v: Float[Array, "B C K G Dv"]
    g: Float[Array, "B C K G"]
    beta: Float[Array, "B C K G"]


class Marks(NamedTuple):
    """Which tokens count, and which belong together."""

    real: Bool[Array, "B C"]
    run: Int[Array, "B C"]
    before: Int[Array, "B C"]
    """The run that stood at the end of the chunk before, the same for all tokens of a chunk."""


def delta_chunk(
    operands: Operands,
    marks: Marks,
    state: Float[Array, "B K Dk G Dv"],
    *,
    precision: jax.lax.PrecisionLike,
) -> tuple[Float[Array, "B K Dk G Dv"], Float[Array, "B C K G Dv"]]:
    """Run one chunk: the state before it -> (the state after it, its outputs), both float32.

    q and k come as they are and are normalised here. A padding token neither decays nor writes the
    state; its output is what a zero query reads, zero.
    """
    q, k, v, g, beta = _heads_first(operands, marks.real)
    size, einsum = marks.run.shape[1], partial(jnp.einsum, precision=precision)
    decay, entering, leaving, kept = _decays(g, marks)
    qk = jnp.concatenate([q, k], axis=-2)  # one product with the state, or with k, serves both
    read = einsum("bkcd,bkdgv->bkcgv", qk, state)
    read = jnp.swapaxes(read, 2, 3) * jnp.concatenate([entering, entering], axis=-1)[..., None]
    products = einsum("bkid,bkjd->bkij", qk, k)[:, :, None]
    lower = _below_diagonal(beta[..., None] * decay * products[..., size:, :])
    inverse = jax.lax.platform_dependent(
        jax.lax.stop_gradient(lower), cpu=_inverse_by_blocks, default=unit_lower_inverse
    )
    rhs = beta[..., None] * (v - read[..., size:, :])
    written = _solve(lower, inverse, rhs, precision)
    scores = decay * products[..., :size, :]
    out = read[..., :size, :] + jnp.matmul(scores, written, precision=precision)
    added = einsum("bkcd,bkcgv->bkdgv", k, jnp.swapaxes(leaving[..., None] * written, 2, 3))
    return kept[:, :, None, :, None] * state + added, jnp.moveaxis(out, 3, 1)


def _heads_first(operands: Operands, real: Array) -> tuple[Array, ...]:
    """float32 operands, padding made inert, q and k normalised, heads before time."""

    def ready(x: Array, place: int) -> Array:
        mask = jnp.expand_dims(real, tuple(range(2, x.ndim)))
        return jnp.moveaxis(jnp.where(mask, x, 0).astype(jnp.float32), 1, place)

    q, k = (ready(x, 2) for x in (operands.q, operands.k))
    v, g, beta = (ready(x, 3) for x in (operands.v, operands.g, operands.beta))
    return normalised_queries(q), normalised(k), v, g, beta


def normalised(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Return x over its length; eps stays inside the root, so a zero row has a finite gradient."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def normalised_queries(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Return `normalised(x)` scaled by D**-0.5."""
    return normalised(x) * x.shape[-1] ** -0.5


def _decays(g: Array, marks: Marks) -> tuple[Array, Array, Array, Array]:
    """Return decay between tokens [..., C, C], from and to the state [..., C], across [...].

    g [B, K, G, C]. A pair is connected when it is causal and in one run; the state handed in
    belongs to the run in which the chunk before ended, the state handed on to the run of the last
    token. Everything else has exponent -inf *before* the exponential, so no masked value can
    overflow or reach a gradient.
    """
    run, before, after = marks.run, marks.before, marks.run[:, -1:]
    causal = np.tril(np.ones((run.shape[1], run.shape[1]), bool))
    connected = (run[:, :, None] == run[:, None, :]) & causal[None]
    # A running sum within the run only: documents in one chunk then share no rounding error.
    total = jnp.einsum("bij,bkgj->bkgi", connected.astype(g.dtype), g, precision=_EXACT)

    def masked_exp(exponent: Array, mask: Array) -> Array:
        mask = jnp.broadcast_to(jnp.expand_dims(mask, (1, 2)), exponent.shape)
        return jnp.exp(jnp.where(mask, exponent, -jnp.inf))

    last = total[..., -1:]
    between = masked_exp(total[..., :, None] - total[..., None, :], connected)
    entering = masked_exp(total, run == before)
    leaving = masked_exp(last - total, run == after)
    kept = masked_exp(last, after == before[:, :1])[..., 0]
    return between, entering, leaving, kept


def _below_diagonal(x: Array) -> Array:
    strict = np.tril(np.ones(x.shape[-2:], bool), -1)
    return jnp.where(jnp.broadcast_to(strict, x.shape), x, 0.0)


def unit_lower_inverse(lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Return (I + L)^-1 for a strictly lower triangular L (its other entries are ignored).

    Block doubling: let X invert the diagonal blocks of size b. With L_off the part of L between
    the two halves of each block of size 2b, X - X L_off X inverts the blocks of size 2b exactly.
    Two products a level, ceil(log2 C) levels (the first needs none, X is the identity), any C.
    No power of L is formed: those overflow float32 as soon as entries exceed 1.
    """
    size = lower.shape[-1]
    index = np.arange(size)
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


def _inverse_by_blocks(lower: Array) -> Array:
    """Do the same as `unit_lower_inverse` in products of the blocks alone.

    Of a chunk of 64 that is a fifteenth of the operations. A TPU multiplies 128 columns at a time
    and gains nothing.
    """
    size, block = lower.shape[-1], _SMALLEST_BLOCK
    if size % block or (size // block).bit_count() != 1:
        return unit_lower_inverse(lower)

    def blocks(row: int, column: int, step: int) -> Array:
        """The blocks [row, column], [row + step, column + step] and so on."""
        return jnp.stack(
            [
                lower[..., (row + i) * block :, (column + i) * block :][..., :block, :block]
                for i in range(0, size // block, step)
            ],
            axis=-3,
        )

    inverse = unit_lower_inverse(blocks(0, 0, 1))
    multiply = partial(jnp.matmul, precision=_EXACT)
    while block < size:
        upper, under = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -multiply(under, multiply(blocks(1, 0, 2), upper))
        rows = (
            jnp.concatenate([upper, jnp.zeros_like(corner)], axis=-1),
            jnp.concatenate([corner, under], axis=-1),
        )
        inverse = jnp.concatenate(rows, axis=-2)
        block *= 2
    return jnp.squeeze(inverse, -3)


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
