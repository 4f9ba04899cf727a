# SPDX-License-Identifier: Apache-2.0
"""Short causal depthwise convolution that never looks across documents or into padding."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lora_tune.layers.segments import mask_padding, running_segments


def causal_conv(
    x: Float[Array, "B T C"],
    kernel: Float[Array, "K C"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    state: Float[Array, "B K1 C"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B K1 C"]]:
    """Return (y, new_state): y_t = sum_s kernel[K-1-s] * x_{t-s}, per channel, without bias.

    kernel[K-1] weighs the current token, as in torch's conv1d after dropping its middle axis. A
    window reads zeros in place of padding (segment_ids 0) and of tokens of other segments, and y
    is zero on padding. Padding *inside* a segment takes up window slots; packers never make any.

    state [B, K-1, C], oldest first, holds the inputs before the row; it continues the row's first
    segment, also across padding before it (zeros when None). new_state holds the last K-1 real
    inputs of the segment that is running at the row's end, whatever padding follows them; a
    shorter segment leaves zeros in front. Sums are float32, y and new_state have x's dtype.
    """
    taps = kernel.shape[0]
    batch, time, channels = x.shape
    if state is None:
        state = jnp.zeros((batch, taps - 1, channels), x.dtype)
    state = state.astype(x.dtype)
    x = mask_padding(x, segment_ids)
    if segment_ids is None:
        padded = jnp.concatenate([state, x], axis=1)
        y = weighted_shifts(padded, kernel)
        return y.astype(x.dtype), padded[:, time:]
    real, run = running_segments(segment_ids)
    slots, padded = _place_state(state, x, real)
    usable = jnp.pad(real, ((0, 0), (taps - 1, 0))) | slots
    y = mask_padding(weighted_shifts(padded, kernel, in_own_run(run, taps)), segment_ids)
    usable &= jnp.pad(run, ((0, 0), (taps - 1, 0))) == run[:, -1:]
    return y.astype(x.dtype), _last_inputs(padded, usable, taps - 1)


def in_own_run(run: Int[Array, "B T"], taps: int) -> Bool[Array, "B T K1"]:
    """Say, for each token and s = 1 ... taps - 1, whether the token s before is in the same run.

    What stands before the row counts as run 0.
    """
    earlier = [jnp.pad(run, ((0, 0), (s, 0)))[:, : run.shape[1]] for s in range(taps)]
    return jnp.stack([run == other for other in earlier], axis=-1)[..., 1:]


def weighted_shifts(
    padded: Float[Array, "B TK C"],
    kernel: Float[Array, "K C"],
    own_run: Bool[Array, "B T K1"] | None = None,
) -> Float[Array, "B T C"]:
    """Sum the K shifted products in float32; one fused pass over the input.

    padded has K - 1 inputs in front of the row. own_run masks those of other runs.
    """
    taps = kernel.shape[0]
    time = padded.shape[1] - taps + 1
    kernel = kernel.astype(jnp.float32)
    total = jnp.zeros((padded.shape[0], time, padded.shape[2]), jnp.float32)
    for tap in range(taps):
        seen = padded[:, tap : tap + time].astype(jnp.float32)
        if own_run is not None and tap < taps - 1:
            seen = jnp.where(own_run[..., taps - 2 - tap, None], seen, 0.0)
        total = total + seen * kernel[tap][None, None]
    return total


def _place_state(
    state: Float[Array, "B K1 C"], x: Float[Array, "B T C"], real: Bool[Array, "B T"]
) -> tuple[Bool[Array, "B TK"], Float[Array, "B TK C"]]:
    """Put the earlier inputs right before each row's first real token, over padding if needed.

    Returns (which slots hold them [B, K-1+T], the extended input [B, K-1+T, C]).
    """
    kept, time = state.shape[1], x.shape[1]
    first = jnp.where(jnp.any(real, axis=1), jnp.argmax(real, axis=1), time)
    slot = jnp.arange(kept + time)[None, :] - first[:, None]
    held = (slot >= 0) & (slot < kept)
    padded = jnp.pad(x, ((0, 0), (kept, 0), (0, 0)))
    for index in range(kept):
        padded = jnp.where((slot == index)[..., None], state[:, index, None], padded)
    return held, padded


def _last_inputs(
    padded: Float[Array, "B TK C"], usable: Bool[Array, "B TK"], count: int
) -> Float[Array, "B K1 C"]:
    """Gather each row's last `count` usable inputs, oldest first, zeros where there are fewer."""
    from_end = jnp.cumsum(usable[:, ::-1], axis=1)[:, ::-1]
    wanted = jnp.arange(count, 0, -1)
    match = usable[:, None, :] & (from_end[:, None, :] == wanted[None, :, None])
    index = jnp.argmax(match, axis=2)
    found = jnp.any(match, axis=2)[..., None]
    return jnp.where(found, jnp.take_along_axis(padded, index[..., None], axis=1), 0)
