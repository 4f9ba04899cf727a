# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a row are real and where a new document begins; integer arrays only.

A row's `segment_ids` hold 0 on padding and a positive id on every token of a document. The layers
with memory (convolution, delta rule) need the *run* of a token instead of its id: the number of
documents that ended before it. A run starts at a real token whose id differs from the last real
token before it, and goes on through any padding until the next one starts. So run 0 is the row's
first document together with the padding before it, and it is the run that a state handed in from
an earlier call belongs to.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def running_segments(
    segment_ids: Int[Array, "B T"],
) -> tuple[Bool[Array, "B T"], Int[Array, "B T"]]:
    """Return (real [B, T], run [B, T] int32): not padding, and the run each token stands in."""
    real = segment_ids != 0
    index = jnp.where(real, jnp.arange(real.shape[1], dtype=jnp.int32)[None, :], 0)
    last = jnp.take_along_axis(segment_ids, jax.lax.cummax(index, axis=1), axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))
    starts = real & (before != 0) & (before != segment_ids)
    return real, jnp.cumsum(starts, axis=1, dtype=jnp.int32)


def mask_padding(
    x: Float[Array, "B T *rest"], segment_ids: Int[Array, "B T"] | None
) -> Float[Array, "B T *rest"]:
    """Return x with exact zeros on padding (whatever stood there, NaN included)."""
    if segment_ids is None:
        return x
    real = jnp.expand_dims(segment_ids != 0, tuple(range(2, x.ndim)))
    return jnp.where(real, x, jnp.zeros((), x.dtype))
