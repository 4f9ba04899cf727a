# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM while a run trains: the first asks it to save and stop, a second ends it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stop:
    """What a signal has asked for, and whether it has to wait.

    Attributes:
      name: of the signal, None before one has come.
      waits: whether a signal waits for the step in progress, or else ends the program.
    """

    name: str | None = None
    waits = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While nothing has been done that could be saved: a signal ends the program."""
        self.waits = False
        try:
            yield
        finally:
            self.waits = True


@contextmanager
def heard(stopping: str) -> Iterator[Stop]:
    """Turns the first SIGINT or SIGTERM into a request; the system ends the program at a second.

    `stopping` says what the request makes the run do.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        stop.name = signal.Signals(number).name
        if not stop.waits:
            os.write(2, f"\n{stop.name}: stopped while compiling, nothing to save\n".encode())
            raise KeyboardInterrupt(number)
        # Printing is not safe in a signal handler, a plain write is.
        os.write(2, f"\n{stop.name}: {stopping}\n".encode())

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
