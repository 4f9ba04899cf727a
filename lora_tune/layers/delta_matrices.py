# SPDX-License-Identifier: Apache-2.0
"""One chunk of one key head of the Gated DeltaNet mixer, in matrices: what a TPU kernel can run.

The mathematics is that of `delta_mixer` and `delta_chunks`. The derivatives of products, shifts and
the triangular solve are given, so that the gradient of a chunk has nothing a kernel cannot do: no
transposed matrix and no array of more than two dimensions.

Shapes: C tokens of a chunk, G value heads that a key head serves, Dk and Dv the widths of their
heads, W = 2 Dk + G Dv the convolved channels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from lora_tune.layers.delta_chunks import normalised, normalised_queries

_EXACT = jax.lax.Precision.HIGHEST
COLUMNS = ("real", "run", "entering", "leaving")
ROWS = ("run", "leaving", "kept")
"""What masks say of a token: not padding; its run; whether the state before the chunk, and the one
after it, are of its run; whether those two are of one run."""


class Heads(NamedTuple):
    """Numbers and widths of heads."""

    key_heads: int
    groups: int
    key_dim: int
    value_dim: int

    @property
    def inner(self) -> int:
        """Channels of a key head that are convolved: its q, its k and its values."""
        return 2 * self.key_dim + self.groups * self.value_dim

    @property
    def outer(self) -> int:
        """Channels of a key head's outputs, and of their gates."""
        return self.groups * self.value_dim


class Form(NamedTuple):
    """All that is static about a mixer."""

    heads: Heads
    chunk: int
    eps: float
    precision: Any
    dtype: Any
    """Of the activations: what the functions between the products round to."""


class Masks(NamedTuple):
    """Integers about the tokens of a chunk, down a column or along a row."""

    columns: jax.Array
    """`[C, 8]`, see `COLUMNS`, and behind those one for each earlier tap: is it of my run?"""
    rows: jax.Array
    """`[8, C]`, see `ROWS`."""


def _dot(a: jax.Array, b: jax.Array, over: tuple[int, int], precision: Any) -> jax.Array:
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _with_derivative(
    run: Callable[..., Any], forward: Any, backward: Any, static: tuple[int, ...]
) -> Callable[..., jax.Array]:
    function = jax.custom_vjp(run, nondiff_argnums=static)
    function.defvjp(forward, backward)
    return cast(Callable[..., jax.Array], function)


# The derivatives of jax's own product transpose matrices; these multiply them as they lie.
def _multiply(a: jax.Array, b: jax.Array, kind: str, precision: Any) -> jax.Array:
    """`a b`, `a b^T` or `a^T b`, by kind: "nn", "nt" or "tn"."""
    return _dot(a, b, {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}[kind], precision)


def _multiply_forward(a: jax.Array, b: jax.Array, kind: str, precision: Any) -> tuple:
    return _product(a, b, kind, precision), (a, b)


def _multiply_backward(kind: str, precision: Any, kept: tuple, g: jax.Array) -> tuple:
    a, b = kept
    if kind == "nn":
        return _product(g, b, "nt", precision), _product(a, g, "tn", precision)
    if kind == "nt":
        return _product(g, b, "nn", precision), _product(g, a, "tn", precision)
    return _product(b, g, "nt", precision), _product(a, g, "nn", precision)


_product = _with_derivative(_multiply, _multiply_forward, _multiply_backward, (2, 3))


def _shift(x: jax.Array, before: jax.Array, steps: int) -> jax.Array:
    """Row t of the result is row t - steps of x, or of the chunk before."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index >= steps, pltpu.roll(x, steps, 0), pltpu.roll(before, steps, 0))


def _shift_forward(x: jax.Array, before: jax.Array, steps: int) -> tuple:
    return _earlier(x, before, steps), None


def _shift_backward(steps: int, _: None, g: jax.Array) -> tuple:
    size = g.shape[0]
    g = pltpu.roll(g, size - steps, 0)
    mine = jax.lax.broadcasted_iota(jnp.int32, g.shape, 0) < size - steps
    return jnp.where(mine, g, 0.0), jnp.where(mine, 0.0, g)


_earlier = _with_derivative(_shift, _shift_forward, _shift_backward, (2,))


def _substitute(lower: jax.Array, rhs: jax.Array, precision: Any) -> jax.Array:
    """Return x with (I + lower) x = rhs; the gradient never passes through the inverse."""
    return _product(_unit_lower_inverse(lower), rhs, "nn", precision)


def _substitute_forward(lower: jax.Array, rhs: jax.Array, precision: Any) -> tuple:
    inverse = _unit_lower_inverse(lower)
    x = _product(inverse, rhs, "nn", precision)
    return x, (inverse, x)


def _substitute_backward(precision: Any, kept: tuple, g: jax.Array) -> tuple:
    inverse, x = kept
    d_rhs = _product(inverse, g, "tn", precision)
    return -_product(d_rhs, x, "nt", precision), d_rhs


_solve = _with_derivative(_substitute, _substitute_forward, _substitute_backward, (2,))


def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """`delta_chunks.unit_lower_inverse` of one matrix."""
    row, column = _indices(lower.shape)
    inverse = jnp.where(row == column, 1.0, 0.0)
    for level in range((lower.shape[0] - 1).bit_length()):  # blocks of 2**level
        block = column >> level
        off = jnp.where((row >> level == block + 1) & (block & 1 == 0), lower, 0.0)
        if level > 0:
            off = _dot(_dot(inverse, off, (1, 0), _EXACT), inverse, (1, 0), _EXACT)
        inverse = inverse - off
    return inverse


def _indices(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row, column


def matrix_chunk(form: Form, masks: Masks, taps, norm_weight, x, z, before, gates, state) -> tuple:
    """One chunk of one key head: the state after it and its outputs `[C, G Dv]`, float32.

    All is float32 and zero on padding: taps `[taps, W]`, norm_weight `[1, Dv]`, the convolved
    channels x `[C, W]` and before, those of the chunk before, z `[C, G Dv]`, gates `[2 G, C]` with
    g of each value head and then beta, and the state `[Dk, G Dv]`.
    """
    heads = form.heads
    mixed = _convolved(taps, x, before, masks, form)
    q, k, values = (
        mixed[:, : heads.key_dim],
        mixed[:, heads.key_dim : 2 * heads.key_dim],
        mixed[:, 2 * heads.key_dim :],
    )
    q, k = normalised_queries(q), normalised(k)
    qk = jnp.concatenate([q, k], axis=0)
    read = _product(qk, state, "nn", form.precision)
    products = _product(qk, k, "nt", form.precision)
    states, outs = [], []
    for group in range(heads.groups):
        at = slice(group * heads.value_dim, (group + 1) * heads.value_dim)
        g, beta = (
            gates[group : group + 1],
            _column(gates[heads.groups + group : heads.groups + group + 1]),
        )
        decay, entering, leaving, kept = _decays(g, masks)
        lower = _below_diagonal(beta * decay * products[form.chunk :])
        rhs = beta * (values[:, at] - entering * read[form.chunk :, at])
        written = _solve(lower, rhs, form.precision)
        scores = decay * products[: form.chunk]
        out = entering * read[: form.chunk, at] + _product(scores, written, "nn", form.precision)
        added = _product(k, leaving * written, "tn", form.precision)
        states.append(kept * state[:, at] + added)
        outs.append(_gated(out, z[:, at], norm_weight, form))
    return jnp.concatenate(states, axis=1), jnp.concatenate(outs, axis=1)


def _convolved(taps: jax.Array, x: jax.Array, before: jax.Array, masks: Masks, form: Form):
    """`silu` of the causal convolution, with the inputs of other runs as zeros."""
    last = taps.shape[0] - 1
    total = x * taps[last:]
    for steps in range(1, last + 1):
        own = masks.columns[:, len(COLUMNS) + steps - 1 :][:, :1] != 0
        seen = jnp.where(own, _earlier(x, before, steps), 0.0)
        total = total + seen * taps[last - steps : last - steps + 1]
    total = _rounded(total, form.dtype)
    return _rounded(total * jax.nn.sigmoid(total), form.dtype)


def _decays(g: jax.Array, masks: Masks) -> tuple[jax.Array, ...]:
    """`delta_chunks._decays` of one head, g `[1, C]`: `[C, C]`, `[C, 1]`, `[C, 1]` and `[1, 1]`."""
    column = {name: masks.columns[:, i : i + 1] for i, name in enumerate(COLUMNS)}
    row = {name: masks.rows[i : i + 1] for i, name in enumerate(ROWS)}
    i, j = _indices((g.shape[1],) * 2)
    connected = (column["run"] == row["run"]) & (i >= j)
    total = jnp.sum(jnp.where(connected, g, 0.0), axis=1, keepdims=True)
    last = jnp.sum(jnp.where(row["leaving"] != 0, g, 0.0), axis=1, keepdims=True)

    def masked_exp(exponent: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.exp(jnp.where(mask, exponent, -jnp.inf))

    lives = jnp.min(row["kept"].astype(jnp.float32), axis=1, keepdims=True)
    return (
        masked_exp(total - _row(total), connected),
        masked_exp(total, column["entering"] != 0),
        masked_exp(last - total, column["leaving"] != 0),
        lives * jnp.exp(last),
    )


def _column(row: jax.Array) -> jax.Array:
    """`[1, C]` -> `[C, 1]`."""
    i, j = _indices((row.shape[1],) * 2)
    return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)


def _row(column: jax.Array) -> jax.Array:
    """`[C, 1]` -> `[1, C]`."""
    i, j = _indices((column.shape[0],) * 2)
    return jnp.sum(jnp.where(i == j, column, 0.0), axis=0, keepdims=True)


def _below_diagonal(x: jax.Array) -> jax.Array:
    i, j = _indices(x.shape)
    return jnp.where(i > j, x, 0.0)


def _gated(out: jax.Array, z: jax.Array, weight: jax.Array, form: Form) -> jax.Array:
    """`norms.gated_rms_normalise`."""
    out = _rounded(out, form.dtype)
    out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + form.eps)
    out = _rounded(_rounded(out, form.dtype) * weight, form.dtype)
    return out * (z * jax.nn.sigmoid(z))


def _round(x: jax.Array, dtype: Any) -> jax.Array:
    """x in the precision of dtype, as float32; its gradient is not rounded."""
    return x.astype(dtype).astype(jnp.float32)


_rounded = _with_derivative(
    _round, lambda x, dtype: (_round(x, dtype), None), lambda dtype, _, g: (g,), (1,)
)
