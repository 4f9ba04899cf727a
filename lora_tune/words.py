# SPDX-License-Identifier: Apache-2.0
"""The `key=value` words of commands: known keys, each with its type."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args

from lora_tune.errors import InputError

Pairs = Sequence[tuple[str, str]]


def parse(
    pairs: Pairs,
    command: str,
    keys: Mapping[str, Mapping[str, Any]],
    *,
    foreign: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The values by key, the last of equal keys.

    Args:
      pairs: key and text of each word.
      command: the one that they were given to.
      keys: command -> key -> type, of this command and of those it may be confused with.
      foreign: what other tools call a key -> the key.

    Raises:
      InputError: an unknown key, or a value that is not of the key's type.
    """
    known, foreign = keys[command], foreign or {}
    for key, _ in pairs:
        if key not in known:
            other = next((name for name, its in keys.items() if key in its), None)
            if other is not None:
                raise InputError(f"{key} has no meaning in {command}, only in {other}; remove it")
            close = get_close_matches(key, known, n=1)
            meant = foreign.get(key) if foreign.get(key) in known else next(iter(close), None)
            hint = f"did you mean {meant!r}?" if meant else f"expected one of {', '.join(known)}"
            raise InputError(f"unknown key {key!r}: {hint}")
    return {key: _value(key, known[key], text) for key, text in pairs}


def _value(key: str, hint: Any, text: str) -> Any:
    options = get_args(hint)
    if NoneType in options:
        if text == "null":
            return None
        hint = options[0]
    if hint is str:
        if not text:
            raise InputError(f"{key} is empty; give it a value or remove it")
        return text
    if hint is bool:
        if text not in ("true", "false"):
            raise InputError(f"{key} must be true or false, got {text!r}")
        return text == "true"
    try:
        if hint in (int, float):
            return hint(text)
        return [int(part) for part in text.strip("[]").split(",") if part.strip()]
    except ValueError:
        expected = {int: "an integer", float: "a number"}.get(hint, "integers with commas between")
        raise InputError(f"{key} must be {expected}, got {text!r}") from None
