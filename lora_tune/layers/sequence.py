# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: rows cut along time, and mixers that see whole rows of a part of the heads.

Every device of the mesh axis `sequence` holds an equal range of each row's tokens. What works
token by token needs nothing else. Before a mixer its heads are dealt out: one `all_to_all` trades
tokens of all heads for all tokens of some heads, another trades back (Jacobs et al.,
"DeepSpeed Ulysses", arXiv 2309.14509). So attention and recurrences run as on one device, over
whole rows with their segments. All functions are the identity on whole rows.

Shapes: B batch, t time here, T time, N heads here, n heads after dealing them out.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lora_tune import sharding
from lora_tune.errors import InputError

_AXIS = "sequence"


def parts() -> int:
    """Number of devices that a row is cut over; 1 outside a manual region."""
    return sharding.manual_size(_AXIS)


def whole_rows(x: jax.Array) -> jax.Array:
    """Gathers `[B, t, ...]` to `[B, T, ...]`."""
    if parts() == 1:
        return x
    return jax.lax.all_gather(x, _AXIS, axis=1, tiled=True)


def deal_heads(x: jax.Array, *, shared: bool = False) -> jax.Array:
    """All tokens of a part of the heads: `[B, t, N, ...]` -> `[B, T, n, ...]`.

    Args:
      x: `[B, t, N, ...]`.
      shared: several devices may have the same head, where queries of several read it.

    Raises:
      InputError: the devices do not divide the heads (or, shared, the heads the devices).
    """
    count, heads = parts(), x.shape[2]
    if count == 1:
        return x
    _check(count, heads, shared=shared)
    if heads < count:
        x = jnp.repeat(x, count // heads, axis=2)
    return jax.lax.all_to_all(x, _AXIS, split_axis=2, concat_axis=1, tiled=True)


def check_heads(count: int, config: Any) -> None:
    """Checks that `mesh.sequence` suits the heads that a model's configuration tells of.

    Layers of other sizes are checked when they are traced.

    Raises:
      InputError: as `deal_heads` would.
    """
    for field in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads"):
        heads = getattr(config, field, None)
        if heads is not None and count > 1:
            _check(count, heads, shared=field == "num_key_value_heads")


def _check(count: int, heads: int, *, shared: bool) -> None:
    if heads % count and not (shared and count % heads == 0):
        raise InputError(
            f"mesh.sequence={count} does not divide the {heads} heads of a layer; choose a number "
            "that divides the heads of every layer"
        )


def collect_heads(x: jax.Array) -> jax.Array:
    """The tokens here of all heads: `[B, T, n, ...]` -> `[B, t, N, ...]`."""
    if parts() == 1:
        return x
    return jax.lax.all_to_all(x, _AXIS, split_axis=1, concat_axis=2, tiled=True)


def own_heads(x: jax.Array, axis: int) -> jax.Array:
    """Of something that every device has for all heads, what belongs to its own."""
    count = parts()
    if count == 1:
        return x
    size = x.shape[axis] // count
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(_AXIS) * size, size, axis)
