# SPDX-License-Identifier: Apache-2.0
"""Splash attention, the TPU kernel that comes with JAX: where it can be used, and how it is called.

Scores exist for one block of queries and keys at a time, in vector memory, and blocks that the
causal mask or the window hides are not visited.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

_LANES = 128
_LONGEST_BLOCK = 512
_HEADS_AXIS = "tensor"


def splash_fits(q: Array, k: Array, v: Array) -> bool:
    """Whether the kernel can stand in for the reference on a TPU, in the mesh of this trace.

    Not for float32, whose products it does not compute in full precision; nor for lengths without
    a block, a multiple of 128. On a mesh, a kernel has to run with all axes manual: the trace must
    be so over all but the tensor axis, and each device of that one take whole heads.
    """
    if q.dtype != jnp.bfloat16 or k.dtype != q.dtype or v.dtype != q.dtype:
        return False
    if q.shape[1] != k.shape[1] or q.shape[1] % _LANES:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    shards, heads, kv_heads = mesh.shape.get(_HEADS_AXIS, 1), q.shape[2], k.shape[2]
    shared = kv_heads % shards == 0 or shards % kv_heads == 0
    return free <= {_HEADS_AXIS} and heads % shards == 0 and shared


def splash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    segment_ids: Int[Array, "B T"],
    *,
    scale: float,
    sliding_window: int | None,
    interpret: bool = False,
) -> Float[Array, "B T N Hv"]:
    """Attend as `attention` does, for inputs that fit.

    The scaled queries are rounded to their own dtype, since the kernel has no scale. Logits,
    softmax and the second product are float32.
    """
    # A padding query sees padding keys: its row is never empty, and what comes out is dropped.
    run = partial(_kernel, scale=scale, sliding_window=sliding_window, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if _HEADS_AXIS in mesh.axis_names and _HEADS_AXIS not in mesh.manual_axes:
        copies = max(1, mesh.shape[_HEADS_AXIS] // k.shape[2])
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
        by_heads, whole = PartitionSpec(None, None, _HEADS_AXIS), PartitionSpec()
        run = jax.shard_map(
            run,
            in_specs=(by_heads, by_heads, by_heads, whole),
            out_specs=by_heads,
            axis_names={_HEADS_AXIS},
            check_vma=False,
        )
    out = run(q, k, v, segment_ids)
    return jnp.where((segment_ids != 0)[..., None, None], out, jnp.zeros((), out.dtype))


def _kernel(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    *,
    scale: float,
    sliding_window: int | None,
    interpret: bool,
) -> Array:
    time, heads = q.shape[1:3]
    block = next(b for b in (_LONGEST_BLOCK, 256, _LANES) if time % b == 0)
    shape = (time, time)
    if sliding_window is None:
        mask = splash.CausalMask(shape)
    else:
        mask = splash.LocalMask(shape, (sliding_window - 1, 0), 0)
    attend = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def row(q: Array, k: Array, v: Array, ids: Array) -> Array:
        return cast(Array, attend(q, k, v, splash.SegmentIds(ids, ids)))

    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(jax.vmap(row)(q, k, v, segment_ids), 1, 2)
