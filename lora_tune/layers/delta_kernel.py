# SPDX-License-Identifier: Apache-2.0
"""The mixer of Gated DeltaNet as TPU kernels: one key head, chunk after chunk, its state in VMEM.

The forward kernel leaves the state before each chunk in main memory; the backward kernel walks the
chunks in reverse, computes each again from that and pulls the gradients through it. All else that
a chunk needs or makes stays in vector memory. What a chunk computes is in `delta_matrices`.

Shapes: B batch, T time in n whole chunks of C tokens, K key heads, G value heads a key head serves,
Dk and Dv their widths, W the convolved channels of a key head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from lora_tune.layers.delta_chunks import Marks
from lora_tune.layers.delta_matrices import COLUMNS, ROWS, Form, Masks, matrix_chunk

_LANES, _SUBLANES = 128, 8
_PACKED_ROWS = 16
"""Rows that a register holds of the narrowest type, bfloat16."""
_LONGEST_CHUNK, _LARGEST_STATE = 64, 2**16
"""Bounds on what lies in vector memory. Compiled for v5p and v6e, states of 98,304 numbers a key
head fit in float32, one of 131,072 did not."""
_HEADS_AXIS = "tensor"
_BY_HEAD, _WHOLE = PartitionSpec(None, None, _HEADS_AXIS), PartitionSpec()
_STATES = PartitionSpec(None, None, _HEADS_AXIS)

Params = tuple[Array, Array]
"""The taps of the convolution `[K, taps, W]`, and the weight of the norm `[Dv]`."""
Rows = tuple[Array, Array, Array]
"""packed `[B, T, K (W + G Dv)]`, g and beta `[B, T, K G]`."""


def kernel_fits(form: Form, taps: int) -> bool:
    """Whether the kernels can stand in for the chunks of XLA on a TPU, in the mesh of this trace.

    Heads must be whole registers wide, and what a step of the backward kernel holds fit the vector
    memory. On a mesh, a kernel has to run with all axes manual: the trace must be so over all but
    the tensor axis, and that one divide the key heads.
    """
    heads = form.heads
    if heads.key_dim % _LANES or heads.value_dim % _LANES or form.chunk % _PACKED_ROWS:
        return False
    if form.chunk > _LONGEST_CHUNK or heads.key_dim * heads.outer > _LARGEST_STATE:
        return False
    if taps < 2 or taps - 1 + len(COLUMNS) > _SUBLANES:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    return free <= {_HEADS_AXIS} and heads.key_heads % mesh.shape.get(_HEADS_AXIS, 1) == 0


def kernel_forward(
    form: Form,
    params: Params,
    rows: Rows,
    marks: tuple[Marks, Bool[Array, "B T S"]],
    *,
    keep: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B T KGDv"], Float[Array, "n B K Dk GDv"] | None]:
    """Return the outputs and, where they are to be kept, the states before each chunk.

    Args:
      form: heads and the like, of all devices of the tensor axis.
      params: taps and norm weight.
      rows: packed, g and beta, filled up to whole chunks.
      marks: those of the tokens, and whether the token s + 1 before is of the same run.
      keep: whether a backward pass follows.
      interpret: runs the kernel as XLA operations, on any device.
    """

    def local(params: Params, rows: Rows, marks: Any) -> tuple:
        outs = _forward(_local(form, rows[0]), interpret, keep, _arrays(form, params, rows, marks))
        return outs if keep else (*outs, None)

    specs = ((PartitionSpec(_HEADS_AXIS), _WHOLE), (_BY_HEAD,) * 3, _WHOLE)
    return _over_heads(local, specs, (_BY_HEAD, _STATES))(params, rows, marks)


def kernel_backward(
    form: Form,
    params: Params,
    rows: Rows,
    marks: tuple[Marks, Bool[Array, "B T S"]],
    states: Float[Array, "n B K Dk GDv"],
    d_y: Float[Array, "B T KGDv"],
    *,
    interpret: bool = False,
) -> tuple[Params, Rows]:
    """Return the gradients of params, in float32, and of rows.

    Arguments are those of `kernel_forward`, the states that it kept and the outputs' gradient.
    """

    def local(params: Params, rows: Rows, marks: Any, states: Array, d_y: Array) -> tuple:
        own = _local(form, rows[0])
        gates, pull = jax.vjp(partial(_gates, own, marks[0].real), *rows[1:])
        arrays = _arrays(form, params, rows, marks)
        d_packed, d_gates, d_taps, d_norm = _backward(own, interpret, arrays, states, d_y)
        return d_taps.sum(0), d_norm.sum(0), (d_packed, *pull(d_gates.astype(gates.dtype)))

    by_key_head = PartitionSpec(_HEADS_AXIS)
    specs = ((by_key_head, _WHOLE), (_BY_HEAD,) * 3, _WHOLE, _STATES, _BY_HEAD)
    outs = (by_key_head, by_key_head, (_BY_HEAD,) * 3)
    d_taps, d_norm, d_rows = _over_heads(local, specs, outs)(params, rows, marks, states, d_y)
    return (d_taps, d_norm.sum((0, 1))), d_rows


def _over_heads(local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`local` with the heads of each device of the tensor axis, where the trace leaves it free."""
    mesh = jax.sharding.get_abstract_mesh()
    if _HEADS_AXIS not in mesh.axis_names or _HEADS_AXIS in mesh.manual_axes:
        return local
    return jax.shard_map(
        local, in_specs=in_specs, out_specs=out_specs, axis_names={_HEADS_AXIS}, check_vma=False
    )


def _local(form: Form, packed: Array) -> Form:
    """The form of the key heads at hand."""
    heads = form.heads
    count = packed.shape[-1] // (heads.inner + heads.outer)
    return form._replace(heads=heads._replace(key_heads=count))


def _arrays(form: Form, params: Params, rows: Rows, marks: tuple[Marks, Array]) -> tuple:
    """What both kernels read, in the order of `_Blocks.inputs`."""
    taps, norm_weight = (x.astype(jnp.float32) for x in params)
    form, (tokens, own_run) = _local(form, rows[0]), marks
    return (
        taps,
        norm_weight[None],
        rows[0],
        _gates(form, tokens.real, *rows[1:]),
        *_masks(form, tokens, own_run),
    )


def _gates(form: Form, real: Array, g: Array, beta: Array) -> Float[Array, "B K n 2G C"]:
    """g and beta of each key head with time along a row, zero on padding."""

    def by_head(x: Array) -> Array:
        x = jnp.where(real[..., None], x, 0).astype(jnp.float32)
        shape = (x.shape[0], -1, form.chunk, form.heads.key_heads, form.heads.groups)
        return jnp.transpose(x.reshape(shape), (0, 3, 1, 4, 2))

    return jnp.concatenate([by_head(g), by_head(beta)], axis=3)


def _masks(form: Form, marks: Marks, own_run: Array) -> tuple[Array, Array]:
    """`Masks` of all chunks: `[B, T, 8]` and `[B, n, 8, C]`."""
    by_chunk = marks.run.reshape(marks.run.shape[0], -1, form.chunk)
    after = jnp.repeat(by_chunk[..., -1], form.chunk, axis=1)
    facts = {
        "real": marks.real,
        "run": marks.run,
        "entering": marks.run == marks.before,
        "leaving": marks.run == after,
        "kept": marks.before == after,
    }

    def stacked(parts: list[Array]) -> Array:
        x = jnp.stack([part.astype(jnp.int32) for part in parts], axis=-1)
        return jnp.pad(x, [(0, 0), (0, 0), (0, _SUBLANES - x.shape[-1])])

    earlier = [own_run[..., i] for i in range(own_run.shape[-1])]
    columns = stacked([facts[name] for name in COLUMNS] + earlier)
    rows = stacked([facts[name] for name in ROWS])
    rows = rows.reshape(*by_chunk.shape, _SUBLANES)
    return columns, jnp.swapaxes(rows, 2, 3)


def _read(form: Form, packed: Array, columns: Array) -> tuple[Array, Array]:
    """The convolved channels and the gates of a chunk, in float32 and zero on padding."""
    packed = jnp.where(columns[:, :1] != 0, packed.astype(jnp.float32), 0.0)
    return packed[:, : form.heads.inner], packed[:, form.heads.inner :]


def _forward_kernel(form: Form, keep: bool, *refs: Any) -> None:
    taps, norm, packed, gates, columns, rows, y, *states = refs[:-2]
    state, before = refs[-2:]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = jnp.zeros_like(state)
        before[...] = jnp.zeros_like(before)

    if keep:
        states[0][0, 0, 0] = state[...]
    masks = Masks(columns[0], rows[0, 0])
    x, z = _read(form, packed[0], masks.columns)
    primals = (taps[0], norm[...], x, z, before[...], gates[0, 0, 0], state[...])
    state[...], out = matrix_chunk(form, masks, *primals)
    before[...] = x
    y[0] = out.astype(y.dtype)


def _backward_kernel(form: Form, *refs: Any) -> None:
    taps, norm, packed, gates, columns, rows, earlier, earlier_columns, states, d_y = refs[:10]
    d_packed, d_gates, d_taps, d_norm, d_state, d_x = refs[10:]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        for ref in (d_state, d_x, d_taps, d_norm):
            ref[...] = jnp.zeros_like(ref)

    masks = Masks(columns[0], rows[0, 0])
    x, z = _read(form, packed[0], masks.columns)
    before = _read(form, earlier[0], earlier_columns[0])[0]
    before = jnp.where(step == pl.num_programs(2) - 1, 0.0, before)
    primals = (taps[0], norm[...], x, z, before, gates[0, 0, 0], states[0, 0, 0])
    pull = jax.vjp(partial(matrix_chunk, form, masks), *primals)[1]
    d = pull((d_state[...], d_y[0].astype(jnp.float32)))
    d_taps[0, 0] += d[0]
    d_norm[0, 0] += d[1]
    whole = jnp.concatenate([d[2] + d_x[...], d[3]], axis=1)
    d_packed[0] = jnp.where(masks.columns[:, :1] != 0, whole, 0.0).astype(d_packed.dtype)
    d_x[...], d_gates[0, 0, 0], d_state[...] = d[4], d[5], d[6]


class _Blocks:
    """The parts of arrays for a step of the grid (batch, key head, chunk); `order` says which chunk
    has its turn."""

    def __init__(self, form: Form, order: Callable[[Any], Any]):
        self.heads, self.chunk, self.order = form.heads, form.chunk, order

    def tokens(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.chunk, width), lambda b, h, i: (b, self.order(i), h))

    def columns(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.chunk, _SUBLANES), lambda b, h, i: (b, self.order(i), 0))

    def rows(self) -> pl.BlockSpec:
        shape = (1, 1, _SUBLANES, self.chunk)
        return pl.BlockSpec(shape, lambda b, h, i: (b, self.order(i), 0, 0))

    def gates(self) -> pl.BlockSpec:
        shape = (1, 1, 1, 2 * self.heads.groups, self.chunk)
        return pl.BlockSpec(shape, lambda b, h, i: (b, h, self.order(i), 0, 0))

    def states(self) -> pl.BlockSpec:
        shape = (1, 1, 1, self.heads.key_dim, self.heads.outer)
        return pl.BlockSpec(shape, lambda b, h, i: (self.order(i), b, h, 0, 0))

    def summed(self, *shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *shape), lambda b, h, i: (b, h, 0, 0))

    def inputs(self, taps: int) -> list[pl.BlockSpec]:
        heads = self.heads
        return [
            pl.BlockSpec((1, taps, heads.inner), lambda b, h, i: (h, 0, 0)),
            pl.BlockSpec((1, heads.value_dim), lambda b, h, i: (0, 0)),
            self.tokens(heads.inner + heads.outer),
            self.gates(),
            self.columns(),
            self.rows(),
        ]


def _call(kernel: Any, form: Form, name: str, interpret: bool, packed: Array, **blocks: Any) -> Any:
    heads, (batch, time, _) = form.heads, packed.shape
    scratch = [(heads.key_dim, heads.outer), (form.chunk, heads.inner)]
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(batch, heads.key_heads, time // form.chunk),
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        **blocks,
    )


def _forward(form: Form, interpret: bool, keep: bool, arrays: tuple) -> tuple:
    taps, _, packed, *_ = arrays
    (batch, time, _), heads = packed.shape, form.heads
    count, states = time // form.chunk, (batch, heads.key_heads, heads.key_dim, heads.outer)
    blocks = _Blocks(form, lambda i: i)
    outputs = [
        (blocks.tokens(heads.outer), ((batch, time, heads.key_heads * heads.outer), packed.dtype)),
        (blocks.states(), ((count, *states), jnp.float32)),
    ][: 2 if keep else 1]
    call = _call(
        partial(_forward_kernel, form, keep),
        form,
        "gated_delta_mixer",
        interpret,
        packed,
        in_specs=blocks.inputs(taps.shape[1]),
        out_specs=[spec for spec, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(*made) for _, made in outputs],
    )
    return tuple(call(*arrays))


def _backward(form: Form, interpret: bool, arrays: tuple, states: Array, d_y: Array) -> Any:
    taps, norm, packed, gates, columns, _ = arrays
    heads, last = form.heads, packed.shape[1] // form.chunk - 1
    blocks = _Blocks(form, lambda i: last - i)
    earlier = _Blocks(form, lambda i: jnp.maximum(last - 1 - i, 0))
    by_head = (packed.shape[0], heads.key_heads)
    outputs = [
        (blocks.tokens(heads.inner + heads.outer), (packed.shape, packed.dtype)),
        (blocks.gates(), (gates.shape, jnp.float32)),
        (blocks.summed(*taps.shape[1:]), ((*by_head, *taps.shape[1:]), jnp.float32)),
        (blocks.summed(*norm.shape), ((*by_head, *norm.shape), jnp.float32)),
    ]
    call = _call(
        partial(_backward_kernel, form),
        form,
        "gated_delta_mixer_backward",
        interpret,
        packed,
        in_specs=[
            *blocks.inputs(taps.shape[1]),
            earlier.tokens(heads.inner + heads.outer),
            earlier.columns(),
            blocks.states(),
            blocks.tokens(heads.outer),
        ],
        out_specs=[spec for spec, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(*made) for _, made in outputs],
    )
    return call(*arrays, packed, columns, states, d_y)
