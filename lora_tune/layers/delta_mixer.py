# SPDX-License-Identifier: Apache-2.0
"""What Gated DeltaNet does between its projections, from the packed one to the output's input.

Convolution, delta rule, normalisation and gate run chunk by chunk. So of all that lies between the
two projections, only the ends exist for all tokens, and the state before each chunk. On a TPU two
kernels do it where `kernel_fits`, elsewhere a loop over the chunks.

Shapes: B batch, T time, n chunks, K key heads, G value heads a key head serves, Dk and Dv their
widths, W the convolved channels of a key head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from lora_tune.layers.activations import silu
from lora_tune.layers.chunk_scan import pull_chunks, run_chunks
from lora_tune.layers.conv import in_own_run, weighted_shifts
from lora_tune.layers.delta_chunks import Marks, Operands, delta_chunk
from lora_tune.layers.delta_kernel import (
    Params,
    Rows,
    kernel_backward,
    kernel_fits,
    kernel_forward,
)
from lora_tune.layers.delta_matrices import Form, Heads
from lora_tune.layers.delta_net import fill_up, make_marks
from lora_tune.layers.norms import gated_rms_normalise
from lora_tune.scan import STATES

_EXACT = jax.lax.Precision.HIGHEST

RowMarks = tuple[Marks, Bool[Array, "B T S"]]
"""The tokens' marks, and whether the token s + 1 before is of the same run."""


def gated_delta_mixer(
    packed: Float[Array, "B T P"],
    g: Float[Array, "B T Nv"],
    beta: Float[Array, "B T Nv"],
    *,
    kernel: Float[Array, "W C"],
    norm_weight: Float[Array, " Dv"],
    heads: Heads,
    eps: float,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = _EXACT,
) -> Float[Array, "B T NvDv"]:
    """Return `gated_rms_normalise(gated_delta_rule(silu(causal_conv(q, k, v)), g, beta), z)`.

    packed holds `[q, k, values, gates]` of each key head in turn. The channels of kernel are those
    of all q, then all k, then all values, as checkpoints have them. Rows start from nothing, and
    what is rounded to packed's dtype on the way is what the four functions would round. Padding
    gives zeros, whatever it holds.
    """
    batch, time, _ = packed.shape
    size, taps = min(chunk_size, time), kernel.shape[0]
    marks = make_marks(segment_ids, batch, time, size)
    rows = tuple(fill_up(x, size) for x in (packed, g, beta))
    form = Form(heads, size, eps, precision, packed.dtype)
    params = (_by_key_head(kernel, heads), norm_weight)
    y = cast(Array, _mixer(form, params, rows, (marks, in_own_run(marks.run, taps))))
    return y[:, :time]


def _by_key_head(kernel: Array, heads: Heads) -> Float[Array, "K taps W"]:
    """Put the channels `[q, k, values]` of each key head next to each other."""
    split = [heads.key_heads * heads.key_dim * i for i in (1, 2)]
    parts = jnp.split(kernel, split, axis=-1)
    parts = [part.reshape(kernel.shape[0], heads.key_heads, -1) for part in parts]
    return jnp.swapaxes(jnp.concatenate(parts, axis=-1), 0, 1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixer(form: Form, params: Params, rows: Rows, marks: RowMarks) -> Array:
    """The mixer in the platform's form, chosen once more in the backward pass.

    The derivative of the choice itself would keep what either form needs.
    """
    return _run(form, params, rows, marks, keep=False)[0]


def _mixer_forward(form: Form, params: Any, rows: Any, marks: Any) -> tuple[Array, tuple]:
    # What is frozen gets no gradient. Which that is, the structure of what is kept tells.
    trained = tuple(param.value if param.perturbed else None for param in params)
    frozen = tuple(None if param.perturbed else param.value for param in params)
    params, rows, marks = jax.tree.map(lambda primal: primal.value, (params, rows, marks))
    y, states = _run(form, params, rows, marks, keep=True)
    # A remat policy that keeps them, and the output, spares the layer a second forward pass.
    return y, (trained, frozen, rows, marks, checkpoint_name(states, STATES))


def _mixer_backward(form: Form, kept: tuple, d_y: Any) -> tuple:
    if isinstance(d_y, SymbolicZero):
        d_y = jnp.zeros(d_y.shape, form.dtype)
    taps = (kept[0][0] if kept[1][0] is None else kept[1][0]).shape[1]
    d_params, d_rows = _choose(
        form, taps, partial(_pull_kernel, form), partial(_pull_loop, form), *kept, d_y
    )
    return d_params, d_rows, None


_mixer.defvjp(_mixer_forward, _mixer_backward, symbolic_zeros=True)


def _choose(form: Form, taps: int, kernel: Callable[..., Any], loop: Callable[..., Any], *arrays):
    if not kernel_fits(form, taps):
        return loop(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=kernel, default=loop)


def _run(
    form: Form, params: Params, rows: Rows, marks: RowMarks, *, keep: bool
) -> tuple[Array, Float[Array, "n B K Dk GDv"] | None]:
    """The outputs and, where they are to be kept, the states before each chunk."""
    kernel, loop = (partial(run, form, keep=keep) for run in (kernel_forward, _run_loop))
    return _choose(form, params[0].shape[1], kernel, loop, params, rows, marks)


def _pull_kernel(form: Form, trained: Any, frozen: Any, *rest: Any) -> tuple[Any, Rows]:
    d_params, d_rows = kernel_backward(form, _together(trained, frozen), *rest)
    d_params = tuple(
        None if param is None else d.astype(param.dtype)
        for d, param in zip(d_params, trained, strict=True)
    )
    return d_params, d_rows


def _run_loop(form: Form, params: Params, rows: Rows, marks: RowMarks, *, keep: bool) -> tuple:
    heads, batch, taps = form.heads, rows[0].shape[0], params[0].shape[1]
    carry = (
        jnp.zeros((batch, heads.key_heads, heads.key_dim, heads.outer), jnp.float32),
        jnp.zeros((batch, taps - 1, heads.key_heads * heads.inner), rows[0].dtype),
    )
    y, _, carries = run_chunks(
        partial(_mix, form), form.chunk, params, marks, rows, carry, keep=keep
    )
    # The windows can be had from the rows.
    return y, carries[0] if keep else None


def _pull_loop(
    form: Form, trained: Any, frozen: Any, rows: Rows, marks: RowMarks, states: Array, d_y: Array
) -> tuple[Any, Rows]:
    def body(trained: Any, *arguments: Any) -> Any:
        return _mix(form, _together(trained, frozen), *arguments)

    windows = _windows(form, _together(trained, frozen)[0].shape[1], rows[0], marks[0].real)
    ends = (jnp.zeros_like(states[0]), jnp.zeros_like(windows[0]))
    kept = (trained, marks, rows, (states, windows))
    d_params, d_rows, _ = pull_chunks(body, form.chunk, kept, (d_y, ends))
    return d_params, d_rows


def _together(trained: Any, frozen: Any) -> Params:
    return tuple(a if b is None else b for a, b in zip(trained, frozen, strict=True))


def _windows(form: Form, taps: int, packed: Array, real: Array) -> Float[Array, "n B S KW"]:
    """The convolved channels of the S = taps - 1 tokens before each chunk, zero on padding."""
    starts = np.arange(0, packed.shape[1], form.chunk)
    index = starts[:, None] - np.arange(taps - 1, 0, -1)[None, :]
    seen = real[:, np.maximum(index, 0)] & jnp.asarray(index >= 0)[None]
    x = jnp.where(seen[..., None], packed[:, np.maximum(index, 0)], 0)
    keys, inner = form.heads.key_heads, form.heads.inner
    x = x.reshape(*x.shape[:3], keys, inner + form.heads.outer)[..., :inner]
    return jnp.swapaxes(x.reshape(*x.shape[:3], keys * inner), 0, 1)


def _mix(
    form: Form,
    params: Params,
    marks: RowMarks,
    rows: Rows,
    carry: tuple[Float[Array, "B K Dk GDv"], Float[Array, "B S KW"]],
) -> tuple[Any, Array]:
    """One chunk: the state and the window after it, and its outputs."""
    (kernel, norm_weight), (packed, g, beta), (state, window) = params, rows, carry
    (token_marks, own_run), heads = marks, form.heads
    lead = packed.shape[:2]
    values = (*lead, heads.key_heads, heads.groups)
    packed = jnp.where(token_marks.real[..., None], packed, 0).reshape(*lead, heads.key_heads, -1)
    x, z = jnp.split(packed, [heads.inner], axis=-1)
    x = jnp.concatenate([window, x.reshape(*lead, -1)], axis=1)
    kernel = jnp.swapaxes(kernel, 0, 1).reshape(kernel.shape[1], -1)
    mixed = weighted_shifts(x, kernel, own_run).astype(packed.dtype)
    mixed = silu(mixed).reshape(*lead, heads.key_heads, -1)
    q, k, v = jnp.split(mixed, [heads.key_dim, 2 * heads.key_dim], axis=-1)
    v = v.reshape(*values, -1)
    operands = Operands(q, k, v, g.reshape(values), beta.reshape(values))
    by_group = state.reshape(*state.shape[:3], heads.groups, -1)
    after, out = delta_chunk(operands, token_marks, by_group, precision=form.precision)
    out = out.astype(packed.dtype)
    y = gated_rms_normalise(out, z.reshape(*values, -1), norm_weight, eps=form.eps)
    return (after.reshape(state.shape), x[:, lead[1] :]), y.reshape(*lead, -1)
