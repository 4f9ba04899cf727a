# SPDX-License-Identifier: Apache-2.0
"""The one exception type that reports a mistake in what the user gave us."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

_SHOWN = 5


class InputError(ValueError):
    """Bad user input; its text is one sentence that says what, where and what to do."""


@contextlib.contextmanager
def said_of(key: str) -> Iterator[None]:
    """Names the recipe key that an InputError is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


def short(value: Any) -> str:
    """The value as it is shown in a sentence."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of too many digits
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def shown(name: str) -> str:
    """A name from a file as it is shown in a sentence: harmless to a terminal."""
    return name if name.isprintable() and len(name) <= 200 else short(name)


def listed(items: Sequence[str], *, between: str = ", ", most: int = _SHOWN) -> str:
    """The first `most` of the items in a sentence, and how many more there are."""
    left = len(items) - most
    more = f"{between.strip().replace(',', '')} and {left} more" if left > 0 else ""
    return between.join(items[:most]) + more


class Problems:
    """Collects what is wrong with many things, to say it once with the first few.

    `head` says after their number what the things are and what cannot be done with them.
    """

    def __init__(self, head: str) -> None:
        self._head, self._count, self._shown = head, 0, list[str]()

    def add(self, message: str) -> None:
        """Takes one sentence."""
        self._count += 1
        if len(self._shown) < _SHOWN:
            self._shown.append(message)

    @property
    def first(self) -> tuple[str, ...]:
        """The first few sentences."""
        return tuple(self._shown)

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Takes the InputError that is raised inside."""
        try:
            yield
        except InputError as error:
            self.add(str(error))

    def raise_if_any(self) -> None:
        """Raises InputError with all that was taken."""
        if self._count == 1:
            raise InputError(self._shown[0])
        if self._count:
            all_of_them = [*self._shown, *[""] * (self._count - len(self._shown))]
            raise InputError(f"{self._count} {self._head}: {listed(all_of_them, between='; ')}")
