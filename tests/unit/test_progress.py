# SPDX-License-Identifier: Apache-2.0
import io

import pytest

from lora_tune import progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(total, times, monkeypatch, stream):
    clock = iter(times)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.shown_as("loading weights", stream=stream) as tell:
        for step in range(1, len(times)):
            tell(step * total // (len(times) - 1), total)
    return stream.getvalue()


def test_a_long_transfer_is_a_few_plain_lines(monkeypatch):
    times = [0.0, 10.0, 20.0, 31.0, 40.0]
    assert shown(4 * 10**9, times, monkeypatch, io.StringIO()).splitlines() == [
        "loading weights: 3.0 of 4.0 GB, 97 MB/s, ETA 0:00:10",
        "loading weights: 4.0 of 4.0 GB, 100 MB/s, done in 0:00:40",
    ]


def test_a_smaller_one_is_shown_in_mb_where_that_is_asked_for(monkeypatch):
    times, stream = iter([0.0, 40.0, 80.0]), io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with progress.shown_as("tokenising", stream=stream, least=10**8) as tell:
        tell(10**8, 2 * 10**8)
        tell(2 * 10**8, 2 * 10**8)
    assert stream.getvalue().splitlines() == [
        "tokenising: 100 of 200 MB, 2 MB/s, ETA 0:00:40",
        "tokenising: 200 of 200 MB, 2 MB/s, done in 0:01:20",
    ]


@pytest.mark.parametrize("stream", [io.StringIO, Screen])
def test_a_small_one_is_silent(monkeypatch, stream):
    assert shown(10**9 - 1, [0.0, 40.0, 80.0], monkeypatch, stream()) == ""


def test_a_terminal_has_one_live_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    with progress.shown_as("merging weights", stream=screen) as tell:
        tell(10**9, 2 * 10**9)
        tell(2 * 10**9, 2 * 10**9)
    text = screen.getvalue()
    for words in ("merging weights", "2.0/2.0 GB", "ETA", "\x1b["):
        assert words in text


def test_bytes_are_added_up():
    told = []
    tell = progress.counted(lambda done, total: told.append((done, total)), 5)
    tell(2)
    tell(3)
    progress.counted(None, 5)(5)
    assert told == [(2, 5), (5, 5)]
