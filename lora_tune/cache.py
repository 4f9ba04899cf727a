# SPDX-License-Identifier: Apache-2.0
"""Caches for generation: what each layer remembers of the tokens that went before.

Caches are stacked exactly as the layers are (`[block, layer, B, …]` inside a cycle) and travel
through the same scans, in the carry: a layer writes its few new entries into the stack in place and
reads its own part back, so that a step copies no cache. Callers from outside who keep one entry per
decoder layer go through `group_caches` and `ungroup_caches`.

All rows of a batch fill the same slots. Shorter prompts are padded on the left, with segment id 0:
such a slot is never attended to, and neither the convolution window nor the recurrent state moves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_tune.scan import LayerPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """Keys (rotated) and values of one attention layer, `[S, K, B, H]`, or a stack of them.

    With slots first, a token's entries are contiguous, and neither the write nor the products of
    attention make XLA change the layout of the whole array, on CPU and on TPU.
    """

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentCache:
    """Memory of one linear-attention layer, or a stack of them.

    Attributes:
      conv: the last inputs of the convolution, `[B, K - 1, C]`, oldest first.
      state: of the delta rule, float32 `[B, V, Dk, Dv]`.
    """

    conv: jax.Array
    state: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoCache:
    """Of a layer that remembers nothing of its own, or of a stack of them."""


LayerCache = AttentionCache | RecurrentCache | NoCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What a decoder remembers of a batch of `B` rows, with room for `S` tokens each.

    Attributes:
      layers: one entry per stack, in the order of `LayerPlan.stacks`.
      segment_ids: int32 `[B, S]`, the document of each filled slot; 0 is padding or still empty.
      index: int32 scalar, the number of slots filled, the same in all rows.
    """

    layers: tuple[LayerCache, ...]
    segment_ids: jax.Array
    index: jax.Array

    @property
    def size(self) -> int:
        """Number of slots of a row."""
        return self.segment_ids.shape[1]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One layer's place in the caches of its stack; lives inside a trace.

    Attributes:
      stack: the caches of all layers of the stack.
      at: index of the layer along each stack axis.
    """

    stack: LayerCache
    at: tuple[Any, ...] = ()

    def read(self, name: str) -> jax.Array:
        """The layer's own part of one of the arrays."""
        whole = getattr(self.stack, name)
        depth = len(self.at)
        start = (*self.at, *[0] * (whole.ndim - depth))
        sizes = (*[1] * depth, *whole.shape[depth:])
        return jax.lax.dynamic_slice(whole, start, sizes).reshape(whole.shape[depth:])

    def write(self, *, slot: Any = None, **values: jax.Array) -> "Entry":
        """Replaces arrays of the layer, or with `slot` the part of them that starts there.

        Args:
          slot: first index to write along S of arrays `[S, …]`; None for arrays without slots.
          values: `[T, …]` with a slot, otherwise the whole array, by name.
        """
        written = {}
        for name, value in values.items():
            whole = getattr(self.stack, name)
            inside = [0] * value.ndim
            if slot is not None:
                inside[0] = slot
            value = value.astype(whole.dtype).reshape(*[1] * len(self.at), *value.shape)
            written[name] = jax.lax.dynamic_update_slice(whole, value, (*self.at, *inside))
        return Entry(dataclasses.replace(self.stack, **written), self.at)


def slots_first(x: jax.Array) -> jax.Array:
    """`[B, T, K, H]` as attention has it -> `[T, K, B, H]` as `AttentionCache` has it."""
    return jnp.transpose(x, (1, 2, 0, 3))


def slots_last(x: jax.Array) -> jax.Array:
    """The inverse of `slots_first`."""
    return jnp.transpose(x, (2, 0, 1, 3))


def group_caches(plan: LayerPlan, flat: Sequence[LayerCache]) -> tuple[LayerCache, ...]:
    """Stacks one cache per decoder layer as the layers are stacked.

    Raises:
      ValueError: not one entry per layer.
    """
    stacks = plan.stacks().values()
    layers = sum(ids.size for ids in stacks)
    if len(flat) != layers:
        raise ValueError(f"group_caches: {len(flat)} caches for {layers} decoder layers")

    def stacked(ids: Any) -> LayerCache:
        return jax.tree.map(
            lambda *parts: jnp.stack(parts).reshape(*ids.shape, *parts[0].shape),
            *[flat[i] for i in ids.ravel()],
        )

    return tuple(stacked(ids) for ids in stacks)


def ungroup_caches(plan: LayerPlan, grouped: Sequence[LayerCache]) -> list[LayerCache]:
    """Lists stacked caches in the order of the decoder's layers, one entry a layer."""
    flat: dict[int, LayerCache] = {}
    for ids, stack in zip(plan.stacks().values(), grouped, strict=True):
        for place in np.ndindex(ids.shape):
            flat[int(ids[place])] = jax.tree.map(lambda whole, place=place: whole[place], stack)
    return [flat[i] for i in range(len(flat))]
