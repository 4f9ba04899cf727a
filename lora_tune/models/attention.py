# SPDX-License-Identifier: Apache-2.0
"""Attention as layers of every family call it: in training, and over a cache of earlier tokens."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lora_tune.cache import AttentionCache, Entry, slots_first, slots_last
from lora_tune.layers import sequence
from lora_tune.layers.attention import attention
from lora_tune.models.inputs import LayerInputs


def remember(
    k: jax.Array, v: jax.Array, inputs: LayerInputs, entry: Entry | None
) -> tuple[jax.Array, jax.Array, Entry | None]:
    """Writes keys and values to the cache, if there is one, and reads all that it holds.

    Args:
      k: rotated keys of this call `[B, T, K, H]`.
      v: values `[B, T, K, H]`.
      inputs: the slots of the cache.
      entry: the layer's place in the cache; None in training.

    Returns:
      Keys and values `[B, S, K, H]` of all slots, those given where there is no cache, and the
      entry after the call.
    """
    if entry is None or inputs.slots is None:
        return k, v, entry
    entry = entry.write(slot=inputs.slots.index, k=slots_first(k), v=slots_first(v))
    return slots_last(entry.read("k")), slots_last(entry.read("v")), entry


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    inputs: LayerInputs,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> jax.Array:
    """Attends over this call's tokens, and with a cache over what it holds as well.

    Args:
      q: rotated queries `[B, T, N, H]`.
      k: what `remember` has of the keys: `[B, T, K, H]`, or `[B, S, K, H]` with a cache.
      v: the same of the values.
      inputs: segments, and the slots of the cache.
      scale: of the logits, `H ** -0.5` where it is None.
      sliding_window: how many tokens a query sees, itself included; None for all before it.

    Returns:
      `[B, T, N, H]`.
    """
    usual = q.shape[-1] ** -0.5
    run = functools.partial(
        attention, scale=usual if scale is None else scale, sliding_window=sliding_window
    )
    slots = inputs.slots
    if slots is not None:
        return run(
            q,
            k,
            v,
            segment_ids=inputs.segment_ids,
            key_segment_ids=slots.segment_ids,
            query_offset=slots.index,
        )
    rows = sequence.whole_rows(inputs.segment_ids)
    keys, values = (sequence.deal_heads(x, shared=True) for x in (k, v))
    return sequence.collect_heads(run(sequence.deal_heads(q), keys, values, segment_ids=rows))


def make_attention_cache(
    heads: int, head_dim: int, *, batch: int, size: int, dtype: DTypeLike
) -> AttentionCache:
    """An empty cache of `batch` rows with `size` slots for `heads` key/value heads."""
    shape = (size, heads, batch, head_dim)
    return AttentionCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
