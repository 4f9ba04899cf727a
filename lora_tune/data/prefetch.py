# SPDX-License-Identifier: Apache-2.0
"""Items of an iterator made ahead, in a thread."""

import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Made(Generic[T]):
    item: T


def ahead(items: Iterable[T], depth: int = 2) -> Generator[T]:
    """The same items, of which up to `depth` are made before they are asked for.

    What the iterator raises is raised in its place. The thread ends with the last item, or when
    this generator is closed, which waits for the item that is being made.
    """
    ready: SimpleQueue[_Made[T] | BaseException | None] = SimpleQueue()
    room, closed = threading.Semaphore(depth), threading.Event()

    def fill() -> None:
        try:
            iterator = iter(items)
            while room.acquire() and not closed.is_set():
                ready.put(_Made(next(iterator)))
        except StopIteration:
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=fill, name="lora-tune-batches", daemon=True)
    thread.start()
    try:
        while (made := ready.get()) is not None:
            if isinstance(made, BaseException):
                raise made
            room.release()
            yield made.item
    finally:
        closed.set()
        room.release()
        thread.join()
