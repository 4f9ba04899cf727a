# SPDX-License-Identifier: Apache-2.0
"""Batches made ahead are the batches, in their order, and end as they do."""

import threading
import time
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.data.dataset import Dataset
from lora_tune.data.examples import DataReport, Examples, Part
from lora_tune.data.prefetch import ahead


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "lora-tune-batches"]


def waited(condition) -> bool:
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


@given(st.lists(st.integers() | st.none()), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_items_are_the_same_in_the_same_order(items, depth):
    assert list(ahead(iter(items), depth)) == items
    assert not threads()


def test_so_many_are_made_and_no_more():
    made = []

    def items():
        for i in count():
            made.append(i)
            yield i

    stream = ahead(items(), depth=3)
    assert next(stream) == 0
    assert waited(lambda: made == [0, 1, 2, 3])
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]
    assert next(stream) == 1
    assert waited(lambda: made == [0, 1, 2, 3, 4])
    stream.close()
    assert not threads()


def test_an_error_comes_in_its_place():
    def items():
        yield 1
        raise KeyError("gone")

    stream = ahead(items())
    assert next(stream) == 1
    with pytest.raises(KeyError, match="gone"):
        next(stream)
    assert not threads()


def test_one_that_nobody_refers_to_ends_its_thread():
    stream = ahead(count())
    next(stream)
    assert threads()
    del stream
    assert not threads()


def short_epochs() -> Dataset:
    """Batches that span several epochs, so that threads ask for different ones."""
    lengths = np.array([3, 5, 2, 7, 4, 6, 1, 8, 2])
    total = int(lengths.sum())
    tokens = np.arange(1, total + 1, dtype=np.int32)
    report = DataReport(9, 9, total, total - 9, {}, 0, 0)
    part = Part(tokens, np.ones(total, bool), lengths, np.arange(9), lengths - 1, report)
    return Dataset(Examples((part,)), max_length=8, batch_size=11, seed=3)


def test_what_is_known_is_had_while_another_epoch_is_arranged(monkeypatch):
    dataset = short_epochs()
    before = dataset.planned(0)
    arrange, begun, go_on = dataset._arrange, threading.Event(), threading.Event()

    def slowly(epoch):
        begun.set()
        assert go_on.wait(30)
        return arrange(epoch)

    monkeypatch.setattr(dataset, "_arrange", slowly)
    thread = threading.Thread(target=dataset.planned, args=(30,))
    thread.start()
    try:
        assert begun.wait(30)
        assert dataset.planned(0) == before
    finally:
        go_on.set()
        thread.join()


def test_batches_made_ahead_agree_with_plans_made_behind():
    plain = short_epochs()
    expected = [(plain.planned(step), plain.position(step)) for step in range(60)]
    batches = [batch for _, batch in islice(plain.batches(), 60)]
    shared = short_epochs()
    stream = ahead(batch for _, batch in shared.batches())
    for step, batch in enumerate(islice(stream, 60)):
        for name, array in batches[step].items():
            np.testing.assert_array_equal(batch[name], array)
        assert (shared.planned(step), shared.position(step)) == expected[step]
        assert shared.planned(step)["tokens"] == (batch["segment_ids"] > 0).sum()
    stream.close()
