# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.data.packing import WINDOW, pack


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 90))
def test_every_document_is_in_exactly_one_row_that_holds_it(lengths, max_length):
    rows = pack(lengths, max_length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= max_length for row in rows)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_it_packs_as_a_plain_best_fit_decreasing_does(lengths):
    loads: list[int] = []
    for size in sorted(lengths, reverse=True):
        fits = [load for load in loads if load + size <= 30]
        if fits:
            loads.remove(max(fits))
            loads.append(max(fits) + size)
        else:
            loads.append(size)
    rows = pack(lengths, 30)
    assert sorted(sum(lengths[i] for i in row) for row in rows) == sorted(loads)


def test_golden_rows():
    assert pack([6, 3, 7, 4, 1], 10) == [[0, 3], [1, 2], [4]]


def test_windows_are_packed_on_their_own_and_in_order():
    lengths = np.full(2 * WINDOW + 1, 5)
    rows = pack(lengths, 10)
    assert rows == [[i, i + 1] for i in range(0, 2 * WINDOW, 2)] + [[2 * WINDOW]]


def test_rows_are_not_ordered_by_length():
    lengths = np.random.default_rng(0).integers(1, 100, WINDOW)
    rows = pack(lengths, 100)
    counts = np.array([len(row) for row in rows])
    half = len(rows) // 2
    assert abs(counts[:half].mean() - counts[half:].mean()) < 0.3
    assert lengths.sum() / (len(rows) * 100) > 0.98


@pytest.mark.parametrize("lengths", [[0], [11], [3, 11]])
def test_lengths_that_cannot_be_packed_are_refused(lengths):
    with pytest.raises(ValueError, match=r"in 1\.\.10"):
        pack(lengths, 10)


def test_nothing_packs_into_nothing():
    assert pack([], 10) == []
