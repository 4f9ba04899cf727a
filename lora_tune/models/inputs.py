# SPDX-License-Identifier: Apache-2.0
"""What every layer sees beside the hidden states: segments, positions, and the slots of caches."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lora_tune.cache import Cache
from lora_tune.layers.segments import running_segments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """What every layer sees beside the hidden states.

    Attributes:
      segment_ids: int32 `[B, T]`; 0 is padding, equal ids are one document.
      positions: int32 `[B, T]`, restarting at 0 in every document.
      slots: what the layers' caches hold, where there are caches.
      own: `[B, T, P]`, what there is for this layer alone, see `Family.make_layer_inputs`.
      kept: what earlier layers have handed on, by name, see `Family.keeps`.
    """

    segment_ids: jax.Array
    positions: jax.Array
    slots: "Slots | None" = None
    own: jax.Array | None = None
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The state of all layers' caches at the time of a call.

    Attributes:
      segment_ids: int32 `[B, S]` of the slots, those of this call's tokens included.
      index: int32 scalar, the slot of this call's first token.
      continues: bool `[B]`, false where the first real token starts another document than the row
        ended with: recurrent layers then forget.
    """

    segment_ids: jax.Array
    index: jax.Array
    continues: jax.Array


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """Positions `[B, T]` that restart at 0 wherever the segment id changes."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None, :]
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(jnp.where(changed, index[:, 1:], 0), ((0, 0), (1, 0)))
    return index - jax.lax.cummax(starts, axis=1)


def fill_slots(cache: Cache, segment_ids: jax.Array) -> tuple[Slots, jax.Array]:
    """Enters a call's tokens into the cache's slots; returns them and the tokens' positions."""
    before, real = cache.segment_ids, segment_ids != 0
    newest = jnp.argmax(jnp.where(before != 0, jnp.arange(1, cache.size + 1)[None, :], 0), axis=1)
    last = jnp.take_along_axis(before, newest[:, None], axis=1)[:, 0]
    first = jnp.take_along_axis(segment_ids, jnp.argmax(real, axis=1)[:, None], axis=1)[:, 0]
    ids = jax.lax.dynamic_update_slice(before, segment_ids.astype(jnp.int32), (0, cache.index))
    seen = jnp.sum((before == last[:, None]) & (last != 0)[:, None], axis=1, dtype=jnp.int32)
    # A call of padding alone (first is 0) leaves a row as it stands.
    continues = (last != 0) & ((first == last) | (first == 0))
    _, run = running_segments(segment_ids)
    ahead = jnp.where((run == 0) & continues[:, None], seen[:, None], 0)
    return Slots(ids, cache.index, continues), segment_positions(segment_ids) + ahead
