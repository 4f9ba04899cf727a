# SPDX-License-Identifier: Apache-2.0
"""A scan over chunks of time that keeps its inputs and its carries and computes the rest again.

What `jax.lax.scan` of a checkpointed body would add is left out: chunks are cut from the arrays and
written back in place, so no array is copied to have its chunks in front, and nothing that a body
derives from a chunk exists for all chunks at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

Body = Callable[[Any, Any, Any, Any], tuple[Any, jax.Array]]
"""`(params, marks, rows, carry) -> (carry, out)` of one chunk."""


def chunk_scan(
    body: Body, *, size: int, marks: Any, rows: Any, carry: Any
) -> tuple[jax.Array, Any]:
    """Run `body` over chunks of time; differentiable in rows and carry.

    Args:
      body: closes over no traced value; its params are empty.
      size: tokens of a chunk; divides T.
      marks: pytree of arrays `[B, T, ...]` without gradients.
      rows: pytree of arrays `[B, T, ...]`.
      carry: pytree; what flows from chunk to chunk, with the dtypes that the body returns.

    Returns:
      The outputs `[B, T, ...]`, and the last carry.
    """
    return cast("tuple[jax.Array, Any]", _chunk_scan(body, size, marks, rows, carry))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunk_scan(body: Body, size: int, marks: Any, rows: Any, carry: Any) -> tuple[jax.Array, Any]:
    out, carry, _ = run_chunks(body, size, (), marks, rows, carry, keep=False)
    return out, carry


def _keeping(body: Body, size: int, marks: Any, rows: Any, carry: Any) -> tuple[Any, Any]:
    out, carry, carries = run_chunks(body, size, (), marks, rows, carry, keep=True)
    return (out, carry), ((), marks, rows, carries)


def _backward(body: Body, size: int, kept: Any, cotangents: tuple[jax.Array, Any]) -> tuple:
    _, d_rows, d_carry = pull_chunks(body, size, kept, cotangents)
    return None, d_rows, d_carry


_chunk_scan.defvjp(_keeping, _backward)


def run_chunks(
    body: Body, size: int, params: Any, marks: Any, rows: Any, carry: Any, *, keep: bool
) -> tuple[jax.Array, Any, Any]:
    """Return outputs, last carry and, where they are to be kept, the carries before each chunk.

    Arguments are those of `chunk_scan`, and the params that every chunk reads.
    """
    marks, rows = _tied(marks, rows)

    def step(state: Any, i: jax.Array) -> tuple[Any, Any]:
        before, out = state
        after, piece = body(params, _cut(size, marks, i), _cut(size, rows, i), before)
        return (after, _write(size, out, piece, i)), before if keep else None

    first = _cut(size, (marks, rows), 0)
    piece = jax.eval_shape(lambda: body(params, first[0], first[1], carry)[1])
    count = _count(size, rows)
    out = jnp.zeros((piece.shape[0], count * size, *piece.shape[2:]), piece.dtype)
    (carry, out), carries = jax.lax.scan(step, (carry, out), jnp.arange(count, dtype=jnp.int32))
    return out, carry, carries


def pull_chunks(
    body: Body, size: int, kept: Any, cotangents: tuple[jax.Array, Any]
) -> tuple[Any, Any, Any]:
    """Return the gradients of params, summed over the chunks in float32, of rows and first carry.

    Args:
      body: as in `chunk_scan`.
      size: tokens of a chunk.
      kept: params, marks, rows, and the carries before each chunk.
      cotangents: of the outputs and the last carry.
    """

    def run(*, in_place: bool) -> Callable[..., tuple]:
        return partial(_scan_backward, body, size, in_place=in_place)

    # XLA's CPU compiler would copy all rows at each chunk before it writes over some of them.
    return jax.lax.platform_dependent(
        kept, cotangents, cpu=run(in_place=False), default=run(in_place=True)
    )


def _scan_backward(
    body: Body, size: int, kept: Any, cotangents: tuple[jax.Array, Any], *, in_place: bool
) -> tuple[Any, Any, Any]:
    """Return the gradients of params, rows and first carry; in_place: of rows in their place."""
    params, marks, rows, carries = kept
    d_out, d_carry = cotangents

    def step(state: Any, x: tuple[jax.Array, Any]) -> tuple[Any, None]:
        d_params, written, d_carry = state
        i, carry = x
        own, read = _cut(size, (marks, written if in_place else rows), i)
        _, pull = jax.vjp(lambda p, r, c: body(p, own, r, c), params, read, carry)
        more, pieces, d_carry = pull((d_carry, _cut(size, d_out, i)))
        d_params = jax.tree.map(lambda total, d: total + d.astype(total.dtype), d_params, more)
        return (d_params, _write(size, written, pieces, i), d_carry), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    written = rows if in_place else jax.tree.map(jnp.zeros_like, rows)
    numbers = jnp.arange(_count(size, rows), dtype=jnp.int32)
    state, _ = jax.lax.scan(step, (zeros, written, d_carry), (numbers, carries), reverse=True)
    d_params, d_rows, d_carry = state
    d_params = jax.tree.map(lambda d, p: d.astype(p.dtype), d_params, params)
    return d_params, d_rows, d_carry


def _tied(marks: Any, rows: Any) -> tuple[Any, Any]:
    """Make marks depend on what is differentiated.

    Otherwise JAX computes all that follows from marks alone ahead of a scan over layers, for all
    chunks: the masks of a chunk become arrays of all tokens, in the shapes they are broadcast to.
    """
    leaves, tree = jax.tree.flatten(rows)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    marks, leaves[smallest] = jax.lax.optimization_barrier((marks, leaves[smallest]))
    return marks, jax.tree.unflatten(tree, leaves)


def _count(size: int, rows: Any) -> int:
    return jax.tree.leaves(rows)[0].shape[1] // size


def _cut(size: int, arrays: Any, i: jax.Array | int) -> Any:
    cut = partial(jax.lax.dynamic_slice_in_dim, start_index=i * size, slice_size=size, axis=1)
    return jax.tree.map(cut, arrays)


def _write(size: int, arrays: Any, pieces: Any, i: jax.Array) -> Any:
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * size, axis=1)
    return jax.tree.map(write, arrays, pieces)
