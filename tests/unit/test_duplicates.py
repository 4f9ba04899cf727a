# SPDX-License-Identifier: Apache-2.0
"""Examples that are there twice, counted as by comparing each with each."""

from typing import Any

import numpy as np
import pytest

from lora_tune.data import duplicates
from lora_tune.data.examples import DataReport, Examples, Part

NONE: Any = DataReport(0, 0, 0, 0, {}, 0, 0)


def drawn(rng: np.random.Generator, count: int) -> Examples:
    """Of one to three tokens, of two kinds, learned or not: many are the same, or nearly."""
    lengths = rng.integers(1, 4, count)
    total = int(lengths.sum())
    tokens, mask = rng.integers(0, 2, total).astype(np.int32), rng.random(total) < 0.5
    return Examples((Part(tokens, mask, lengths, np.arange(count), lengths, NONE),))


def plain(examples: Examples) -> list[tuple[list[int], list[bool]]]:
    each = [examples[i] for i in range(len(examples))]
    return [(one.tokens.tolist(), one.mask.tolist()) for one in each]


def prompts(examples: Examples) -> list[list[int]]:
    found = [tokens[: mask.index(True)] for tokens, mask in plain(examples) if any(mask)]
    return [each for each in found if each]


@pytest.mark.parametrize("seed", range(5))
def test_they_are_those_of_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    train, held_out = drawn(rng, 25), drawn(rng, 40)
    known, asked = plain(train), plain(held_out)
    seen = sum(each in known for each in asked)
    assert 0 < seen < len(asked)
    assert duplicates.seen_in_training(train, held_out) == seen
    same = sum(each in prompts(train) for each in prompts(held_out))
    assert duplicates.prompts_seen_in_training(train, held_out) == same > 0
    assert duplicates.repeated(held_out) == sum(asked.index(x) < i for i, x in enumerate(asked)) > 0
