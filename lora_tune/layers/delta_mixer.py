# SPDX-License-Identifier: Apache-2.0
"""What Gated DeltaNet does between its projections, from the packed one to the output's input.

Convolution, delta rule, normalisation and gate run chunk by chunk. So of all that lies between the
two projections, only the ends exist for all tokens, and the state before each chunk.

Shapes: B batch, T time, K key heads, G value heads a key head serves, Dk and Dv their widths.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lora_tune.layers.chunk_scan import chunk_scan
from lora_tune.layers.conv import in_own_run, weighted_shifts
from lora_tune.layers.delta_chunks import Marks, Operands, delta_chunk
from lora_tune.layers.delta_net import fill_up, make_marks
from lora_tune.layers.norms import gated_rms_normalise

_EXACT = jax.lax.Precision.HIGHEST


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
    keys, values = heads.key_heads, heads.key_heads * heads.groups
    carry = (
        jnp.zeros((batch, keys, heads.key_dim, heads.groups, heads.value_dim), jnp.float32),
        jnp.zeros((batch, taps - 1, keys * heads.inner), packed.dtype),
    )
    y, _ = chunk_scan(
        partial(_mix, heads=heads, eps=eps, precision=precision),
        size=size,
        params=(_by_key_head(kernel, heads), norm_weight),
        marks=(marks, in_own_run(marks.run, taps)),
        rows=rows,
        carry=carry,
    )
    return y[:, :time].reshape(batch, time, values * heads.value_dim)


def _by_key_head(kernel: Array, heads: Heads) -> Array:
    """Put the channels `[q, k, values]` of each key head next to each other."""
    split = [heads.key_heads * heads.key_dim * i for i in (1, 2)]
    parts = jnp.split(kernel, split, axis=-1)
    parts = [part.reshape(kernel.shape[0], heads.key_heads, -1) for part in parts]
    return jnp.concatenate(parts, axis=-1).reshape(kernel.shape)


def _mix(
    params: tuple[Array, Array],
    marks: tuple[Marks, Array],
    rows: tuple[Array, Array, Array],
    carry: tuple[Array, Array],
    *,
    heads: Heads,
    eps: float,
    precision: jax.lax.PrecisionLike,
) -> tuple[Any, Array]:
    (kernel, norm_weight), (packed, g, beta), (state, window) = params, rows, carry
    token_marks, own_run = marks
    lead = packed.shape[:2]
    values = (*lead, heads.key_heads, heads.groups)
    packed = jnp.where(token_marks.real[..., None], packed, 0).reshape(*lead, heads.key_heads, -1)
    x, z = jnp.split(packed, [heads.inner], axis=-1)
    x = jnp.concatenate([window, x.reshape(*lead, -1)], axis=1)
    mixed = weighted_shifts(x, kernel, own_run).astype(packed.dtype)
    mixed = jax.nn.silu(mixed).reshape(*lead, heads.key_heads, -1)
    q, k, v = jnp.split(mixed, [heads.key_dim, 2 * heads.key_dim], axis=-1)
    v = v.reshape(*values, -1)
    operands = Operands(q, k, v, g.reshape(values), beta.reshape(values))
    state, out = delta_chunk(operands, token_marks, state, precision=precision)
    out = out.astype(packed.dtype)
    y = gated_rms_normalise(out, z.reshape(*values, -1), norm_weight, eps=eps)
    return (state, x[:, lead[1] :]), y.reshape(*lead, -1)
