# SPDX-License-Identifier: Apache-2.0
"""Kinds of attention-and-MLP layers, and which of them share keys and values."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

SLIDING, FULL = "sliding_attention", "full_attention"
OWN, KEPT, SHARED = "own", "kept", "shared"


class Kind(NamedTuple):
    """The kind of a layer.

    Attributes:
      layer_type: what attention sees.
      sparse: whether the feed-forward is a mixture of experts.
      keys: whether keys and values are the layer's own, its own and kept for later layers, or
        shared: those that an earlier layer of the same type has kept.
    """

    layer_type: str
    sparse: bool
    keys: str = OWN


def key_sharing(types: Sequence[str], shared: int) -> tuple[str, ...]:
    """`Kind.keys` of layers of these types, of which the last `shared` have no keys of their own.

    They read those of the last layer of their type before them.
    """
    if not shared:
        return (OWN,) * len(types)
    own = types[:-shared]
    last = {kind: i for i, kind in enumerate(own)}
    keys = [KEPT if last[kind] == i else OWN for i, kind in enumerate(own)]
    return (*keys, *[SHARED] * shared)


def sharing_problems(types: Sequence[str], shared: int) -> Iterator[str]:
    """What is wrong with `num_kv_shared_layers`."""
    name, count = "num_kv_shared_layers", len(types)
    if shared >= count:
        yield f"{name} is {shared}, expected less than num_hidden_layers ({count})"
        return
    for kind in sorted({*types[count - shared :]} - {*types[: count - shared]}):
        yield (
            f"{name} is {shared}, but no earlier layer is of type {kind!r}, whose keys and values "
            "the last layers could share"
        )
