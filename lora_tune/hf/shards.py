# SPDX-License-Identifier: Apache-2.0
"""How tensors are spread over files: the largest size of one, the names, the index."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lora_tune.errors import InputError, short
from lora_tune.hf.files import SINGLE
from lora_tune.hf.header import Entry

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(?:([KMGT])(i?)B)?", re.ASCII)

_Item = TypeVar("_Item")


def shard_bytes(size: str | int) -> int:
    """Bytes of a size as transformers writes it: `5GB` is 5 * 10**9, `5GiB` 5 * 2**30.

    Raises:
      InputError: it is no size, or below one byte.
    """
    found = _SIZE.fullmatch(str(size))
    amount = 0
    if found is not None:
        base = 1024 if found[3] else 1000
        amount = int(float(found[1]) * base ** (" KMGT".index(found[2]) if found[2] else 0))
    if amount < 1:
        raise InputError(f"max_shard_size must be a size such as 5GB or 500MB, got {short(size)}")
    return amount


def plan_shards(items: Sequence[_Item], sizes: Sequence[int], most: int) -> dict[str, list[_Item]]:
    """File name -> the items that go there, in order; a file ends before it would exceed `most`."""
    shards: list[list[_Item]] = [[]]
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, start=1)}


def index_of(shards: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    """The index of several files."""
    total = sum(entry[3] for entries in shards.values() for entry in entries)
    weights = {entry[0]: file for file, entries in shards.items() for entry in entries}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
