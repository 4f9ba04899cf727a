# SPDX-License-Identifier: Apache-2.0
"""How far a long transfer of bytes has come: a live line in a terminal, else a few plain ones."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from lora_tune.console import Console

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

LEAST = 10**9
"""Bytes from which on a transfer is shown, where nothing else is said."""
EVERY = 30.0
"""Seconds between plain lines."""


def counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    """A function to be called with bytes as they are done, which tells `progress` their sum."""
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return tell


@contextlib.contextmanager
def shown_as(what: str, *, stream: TextIO | None = None, least: int = LEAST) -> Iterator[Progress]:
    """Shows a transfer of `least` bytes or more as bytes done and in all, rate and time left.

    Args:
      what: what is done, as `loading weights`.
      stream: where to write, None for stderr. In a terminal it is one live line; elsewhere one
        plain line every 30 seconds, and one at the end.
    """
    console = Console(stream or sys.stderr)
    shown = _Live(what, console, least) if console.is_terminal else _Lines(what, console, least)
    try:
        yield shown
    finally:
        shown.close()


class _Live:
    def __init__(self, what: str, console: Console, least: int) -> None:
        self._least = least
        columns = (TextColumn(what), BarColumn(bar_width=None), DownloadColumn())
        times = (TransferSpeedColumn(), TextColumn("ETA"), TimeRemainingColumn(compact=True))
        self._bar = Bar(*columns, *times, console=console)
        self._task = self._bar.add_task(what)
        self._started = False

    def __call__(self, done: int, total: int) -> None:
        if total >= self._least:
            if not self._started:
                self._started = True
                self._bar.start()
            self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._started:
            self._bar.stop()


class _Lines:
    def __init__(self, what: str, console: Console, least: int) -> None:
        self._what, self._console, self._least = what, console, least
        self._begun = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if total < self._least or (done < total and now - self._last < EVERY):
            return
        self._last = now
        rate = done / max(now - self._begun, 1e-9)
        left = (total - done) / max(rate, 1e-9)
        ending = f"ETA {clock(left)}" if done < total else f"done in {clock(now - self._begun)}"
        unit, name, digits = (1e9, "GB", 1) if total >= 1e9 else (1e6, "MB", 0)
        amount = f"{done / unit:,.{digits}f} of {total / unit:,.{digits}f} {name}"
        text = f"{self._what}: {amount}, {rate / 1e6:,.0f} MB/s, {ending}"
        self._console.print(text, markup=False, emoji=False)

    def close(self) -> None:
        pass


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: `0:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
