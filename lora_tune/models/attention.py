# SPDX-License-Identifier: Apache-2.0
"""Attention as layers of every family call it: in training, and over a cache of earlier tokens."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lora_tune.cache import AttentionCache, Entry, slots_first, slots_last
from lora_tune.layers import sequence
from lora_tune.layers.attention import attention
from lora_tune.models.decoder import LayerInputs


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    inputs: LayerInputs,
    entry: Entry | None,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> tuple[jax.Array, Entry | None]:
    """Attends over this call's tokens, and with a cache over what it holds as well.

    Args:
      q: rotated queries `[B, T, N, H]`.
      k: rotated keys `[B, T, K, H]`.
      v: values `[B, T, K, H]`.
      inputs: segments, and the slots of the cache.
      entry: the layer's place in the cache, which `k` and `v` are written to; None in training.
      scale: of the logits, `H ** -0.5` where it is None.
      sliding_window: how many tokens a query sees, itself included; None for all before it.

    Returns:
      `[B, T, N, H]`, and the entry after the call.
    """
    usual = q.shape[-1] ** -0.5
    run = functools.partial(
        attention, scale=usual if scale is None else scale, sliding_window=sliding_window
    )
    slots = inputs.slots
    if entry is None or slots is None:
        rows = sequence.whole_rows(inputs.segment_ids)
        keys, values = (sequence.deal_heads(x, shared=True) for x in (k, v))
        y = sequence.collect_heads(run(sequence.deal_heads(q), keys, values, segment_ids=rows))
    else:
        entry = entry.write(slot=slots.index, k=slots_first(k), v=slots_first(v))
        y = run(
            q,
            slots_last(entry.read("k")),
            slots_last(entry.read("v")),
            segment_ids=inputs.segment_ids,
            key_segment_ids=slots.segment_ids,
            query_offset=slots.index,
        )
    return y, entry


def make_attention_cache(
    heads: int, head_dim: int, *, batch: int, size: int, dtype: DTypeLike
) -> AttentionCache:
    """An empty cache of `batch` rows with `size` slots for `heads` key/value heads."""
    shape = (size, heads, batch, head_dim)
    return AttentionCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
