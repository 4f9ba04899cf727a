# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul: rows sorted by group, each group times its own matrix. And row permutations.

`grouped_dot` is the one function that the routed experts and their adapters go through; the
adapter provider intercepts it by this name. On TPU and GPU it is `jax.lax.ragged_dot`. XLA's CPU
form of that multiplies every row by every group's matrix; there the rows are moved to blocks that
belong to one group each, and the blocks are multiplied in one batched product.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

_BLOCK = 32
"""Rows of a block on CPU: small enough to pad little, large enough for the matmul kernels."""
_TILE, _LARGEST_TILE = 128, 512
"""What dimensions must be multiples of for the TPU kernel of dw, and the largest part it takes."""


def grouped_dot(
    x: Float[Array, "n K"], w: Float[Array, "G K N"], group_sizes: Int[Array, " G"]
) -> Float[Array, "n N"]:
    """Multiplies each group of rows by its matrix.

    Args:
      x: rows, sorted by group.
      w: one matrix per group.
      group_sizes: rows of each group; rows beyond their sum belong to no group, and what comes out
        for them is unspecified (zeros on CPU).
    """
    return _by_platform(x, w, group_sizes)


@jax.custom_vjp
def _by_platform(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The product in the platform's form, chosen once more in the backward pass.

    The derivative of the choice itself keeps what either form may need: a second copy of the
    matrices, and on TPU and GPU also zeros in place of the CPU form's blocks of matrices.
    """
    return jax.lax.platform_dependent(
        x, w, group_sizes, cpu=_blocked_dot, default=jax.lax.ragged_dot
    )


def _by_platform_forward(x: Any, w: Any, group_sizes: Any) -> tuple:
    # Keeping x is for dw, which frozen matrices do not need.
    kept_x = x.value if w.perturbed else None
    kept_w = w.value if x.perturbed else None
    sizes = group_sizes.value
    return _by_platform(x.value, w.value, sizes), (kept_x, kept_w, sizes)


def _by_platform_backward(kept: tuple, g: jax.Array) -> tuple:
    x, w, sizes = kept
    dx = dw = None
    if w is not None:
        dx = jax.lax.platform_dependent(w, sizes, g, cpu=_blocked_dx, default=_ragged_dx)
    if x is not None:
        forms = {"cpu": _blocked_dw, "default": _ragged_dw}
        if _tiles_fit(x, g):
            forms["tpu"] = _tiled_dw
        dw = jax.lax.platform_dependent(x, sizes, g, **forms)
    return dx, dw, None


def _ragged_dx(w: jax.Array, sizes: jax.Array, g: jax.Array) -> jax.Array:
    x = jax.ShapeDtypeStruct((g.shape[0], w.shape[1]), g.dtype)
    return jax.linear_transpose(lambda x: jax.lax.ragged_dot(x, w, sizes), x)(g)[0]


def _ragged_dw(x: jax.Array, sizes: jax.Array, g: jax.Array) -> jax.Array:
    w = jax.ShapeDtypeStruct((sizes.shape[0], x.shape[1], g.shape[1]), g.dtype)
    return jax.linear_transpose(lambda w: jax.lax.ragged_dot(x, w, sizes), w)(g)[0]


def _tiled_dw(x: jax.Array, sizes: jax.Array, g: jax.Array) -> jax.Array:
    # XLA multiplies all rows once for every group here, masked: with 4 experts on a chip, 4 times
    # the work. (The other two products become kernels of its own.)
    tiles = tuple(math.gcd(size, _LARGEST_TILE) for size in (*x.shape, g.shape[1]))

    def kernel(x: jax.Array, sizes: jax.Array, g: jax.Array) -> jax.Array:
        return tgmm(x.T, g, sizes, preferred_element_type=jnp.float32, tiling=tiles)

    if _left_to_the_compiler():
        # A kernel must not be left to it, not even with one device along each of these axes.
        kernel = jax.shard_map(
            kernel,
            in_specs=(PartitionSpec(),) * 3,
            out_specs=PartitionSpec(),
            axis_names=set(_left_to_the_compiler()),
            check_vma=False,
        )
    return kernel(x, sizes, g).astype(g.dtype)


def _left_to_the_compiler() -> dict[str, int]:
    """The mesh axes that the trace is not manual over, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes}


def _tiles_fit(x: jax.Array, g: jax.Array) -> bool:
    split = any(size > 1 for size in _left_to_the_compiler().values())
    return not split and not any(size % _TILE for size in (*x.shape, g.shape[1]))


def _blocked_dx(w: jax.Array, sizes: jax.Array, g: jax.Array) -> jax.Array:
    x = jnp.zeros((g.shape[0], w.shape[1]), g.dtype)  # its value does not matter
    return jax.vjp(lambda x: _blocked_dot(x, w, sizes), x)[1](g)[0]


def _blocked_dw(x: jax.Array, sizes: jax.Array, g: jax.Array) -> jax.Array:
    w = jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), g.dtype)  # its value does not matter
    return jax.vjp(lambda w: _blocked_dot(x, w, sizes), w)[1](g)[0]


_by_platform.defvjp(_by_platform_forward, _by_platform_backward, symbolic_zeros=True)


def _blocked_dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    n, groups = x.shape[0], w.shape[0]
    blocks = -(-n // _BLOCK) + groups
    ends = jnp.cumsum(group_sizes)
    padded_ends = jnp.cumsum(-(-group_sizes // _BLOCK) * _BLOCK)
    group = jnp.searchsorted(ends, jnp.arange(n), side="right").astype(jnp.int32)
    inside = jnp.minimum(group, groups - 1)
    shift = (padded_ends - (-(-group_sizes // _BLOCK) * _BLOCK)) - (ends - group_sizes)
    nowhere = blocks * _BLOCK
    slot = jnp.where(group < groups, jnp.arange(n) + shift[inside], nowhere)
    source = (
        jnp.full((nowhere,), n, jnp.int32).at[slot].set(jnp.arange(n, dtype=jnp.int32), mode="drop")
    )
    rows = permute(x, source, slot).reshape(blocks, _BLOCK, -1)
    owner = jnp.searchsorted(padded_ends, jnp.arange(blocks) * _BLOCK, side="right")
    matrices = w[jnp.minimum(owner, groups - 1)]
    y = jax.lax.dot_general(rows, matrices, (((2,), (1,)), ((0,), (0,))))
    return permute(y.reshape(nowhere, -1), slot, source)


def sort_by(keys: Int[Array, " n"], count: int) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """The stable order of rows by key, and the place of each row in it.

    Args:
      keys: int32, from 0 to `count` - 1.
      count: number of different keys.
    """
    n = keys.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    if count * n < 2**31:
        # One array of keys that carry their row compiles to half of what sorting pairs takes.
        order = jax.lax.sort(keys.astype(jnp.int32) * n + index, is_stable=False) % n
    else:
        order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    place = (
        jnp.zeros_like(order).at[order].set(index, unique_indices=True, mode="promise_in_bounds")
    )
    return order, place


@jax.custom_vjp
def permute(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """`x[index]`, zero where the index is out of range; `inverse` is the map back.

    Its transpose is a gather by `inverse`, where that of plain indexing is a serial scatter.
    """
    return x.at[index].get(mode="fill", fill_value=0)


def _permute_forward(x: jax.Array, index: jax.Array, inverse: jax.Array) -> tuple:
    return permute(x, index, inverse), inverse


def _permute_backward(inverse: jax.Array, g: jax.Array) -> tuple:
    return g.at[inverse].get(mode="fill", fill_value=0), None, None


permute.defvjp(_permute_forward, _permute_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def spread(x: jax.Array, order: jax.Array, position: jax.Array, copies: int) -> jax.Array:
    """Rows `[n, D]` copied to `[n * copies, D]` and permuted: row i is `x[order[i] // copies]`.

    `position` is the inverse of `order`; the transpose gathers by it and sums over copies.
    """
    return x[order // copies]


def _spread_forward(x: jax.Array, order: jax.Array, position: jax.Array, copies: int) -> tuple:
    return spread(x, order, position, copies), position


def _spread_backward(copies: int, position: jax.Array, g: jax.Array) -> tuple:
    return g[position].reshape(-1, copies, g.shape[-1]).sum(axis=1), None, None


spread.defvjp(_spread_forward, _spread_backward)
