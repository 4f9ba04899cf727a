# SPDX-License-Identifier: Apache-2.0
"""Mixtures of sources: shares, coverage and order, against counts worked out by hand."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.data.mixing import epoch_order, shares
from lora_tune.errors import InputError


def epoch(counts, weights, e=0, *, seed=3, shuffle=True):
    order = epoch_order(counts, weights=weights, seed=seed, epoch=e, shuffle=shuffle)
    return order.tolist()


@pytest.mark.parametrize(
    ("counts", "weights", "expected"),
    [
        ([10, 10], [1, 1], [10, 10]),
        ([90, 10], [1, 1], [50, 50]),
        ([5, 5], [0.1, 0.2], [3, 7]),
        ([1, 1, 1], [1, 1, 1], [1, 1, 1]),
        ([7, 3], [70, 30], [7, 3]),
    ],
)
def test_shares_by_hand(counts, weights, expected):
    assert shares(counts, weights) == expected


def test_a_share_of_nothing_is_refused():
    with pytest.raises(InputError, match=r"data\.sources\[1\] has weight 0\.001, which is none of"):
        shares([10, 10], [1, 0.001])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 5), st.booleans())
def test_without_weights_an_epoch_has_every_example_once(counts, e, shuffle):
    order = epoch(counts, None, e, shuffle=shuffle)
    assert sorted(order) == list(range(sum(counts)))
    assert shuffle or order == sorted(order)


@given(
    st.lists(st.tuples(st.integers(4, 30), st.floats(0.5, 2)), min_size=1, max_size=4),
    st.booleans(),
)
def test_no_example_comes_again_before_all_others_of_its_source(sources, shuffle):
    counts, weights = [list(column) for column in zip(*sources, strict=True)]
    taken, seen = shares(counts, weights), Counter()
    for e in range(4):
        order = epoch(counts, weights, e, shuffle=shuffle)
        assert len(order) == sum(counts)
        seen.update(order)
        first = 0
        for count, share in zip(counts, taken, strict=True):
            times = [seen[i] for i in range(first, first + count)]
            assert sum(times) == (e + 1) * share
            assert max(times) - min(times) <= 1
            first += count


def test_the_order_follows_from_seed_and_epoch_alone():
    counts, weights = [20, 30], [1, 2]
    orders = [tuple(epoch(counts, weights, e, seed=s)) for e in (0, 1) for s in (3, 4)]
    assert len(set(orders)) == 4
    assert epoch(counts, weights, 1) == epoch(counts, weights, 1)
    # An epoch is mixed, not one source after the other.
    firsts = np.array(epoch(counts, weights)[:25]) < 20
    assert 3 <= firsts.sum() <= 14


def test_without_shuffle_sources_are_spread_evenly_and_keep_their_order():
    assert epoch([2, 6], [1, 3], shuffle=False) == [2, 0, 3, 4, 5, 1, 6, 7]
    assert epoch([2, 6], [3, 1], 1, shuffle=False)[:4] == [0, 1, 4, 0]
