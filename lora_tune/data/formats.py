# SPDX-License-Identifier: Apache-2.0
"""The forms a row may have, and the three kinds that they become."""

from collections.abc import Mapping
from typing import Any, Literal

from lora_tune.data.conversation import from_json
from lora_tune.errors import InputError

Kind = Literal["messages", "prompt_completion", "text"]
FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
"""Format -> the columns that each of its rows must have, in the order they are looked for."""
COLUMNS = (
    "messages",
    "conversations",
    "tools",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "text",
)
ACCEPTED = (
    "`messages` or `conversations` (with optional `tools`), `prompt` and `completion`, "
    "`instruction` and `output` (with optional `input` and `system`), or `text`"
)


def missing(row: Mapping[str, Any], format: str) -> list[str]:
    """The columns that a row of this format needs and has not, or has as null."""
    return [column for column in FORMATS[format] if row.get(column) is None]


def detect(row: Mapping[str, Any]) -> str | None:
    """The first format whose columns a row has, or None.

    `conversations` that are plain text are no conversation: text columns go by that name too.
    """
    for name in FORMATS:
        is_prose = name == "sharegpt" and not isinstance(row.get("conversations"), list)
        if not is_prose and not missing(row, name):
            return name
    return None


def canonical(row: Mapping[str, Any], format: str, *, where: str) -> tuple[Kind, Mapping[str, Any]]:
    """A row of any format as one of three kinds, with the columns of that kind and `tools`.

    ShareGPT's `conversations` are messages. Alpaca's `instruction` and `input`, a blank line
    between them, are the user's message, `output` the assistant's and `system` the system's.

    Raises:
        InputError: the row lacks a column, an Alpaca column is no text, or a ShareGPT row has a
            system message both as a column and as a turn.
    """
    if format not in FORMATS:
        raise InputError(f"{where}: data format {format!r} is unknown")
    if absent := missing(row, format):
        names = ", ".join(f"`{column}`" for column in absent)
        found = ", ".join(f"`{column}`" for column in sorted(row)) or "no columns"
        raise InputError(f"{where}: column {names} is missing or null, found {found}")
    if format == "sharegpt":
        return "messages", {"messages": _sharegpt(row, where), "tools": row.get("tools")}
    if format == "alpaca":
        return "messages", {"messages": _alpaca(row, where), "tools": row.get("tools")}
    kinds: Mapping[str, Kind] = {
        "messages": "messages",
        "prompt_completion": "prompt_completion",
        "text": "text",
    }
    return kinds[format], row


def _sharegpt(row: Mapping[str, Any], where: str) -> Any:
    system, turns = _texts(row, ("system",), where), row["conversations"]
    if not system:
        return turns
    turns = from_json(turns, "`conversations`", where) if isinstance(turns, str) else turns
    if not isinstance(turns, list):
        return turns
    roles = [turn.get("role", turn.get("from")) for turn in turns if isinstance(turn, Mapping)]
    if "system" in roles:
        raise InputError(
            f"{where}: there is a `system` column and a system message in `conversations`; "
            "remove one of the two"
        )
    return [{"role": "system", "content": system[0]}, *turns]


def _alpaca(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    asked = "\n\n".join(_texts(row, ("instruction", "input"), where))
    answer = "".join(_texts(row, ("output",), where))
    turns = [{"role": "system", "content": text} for text in _texts(row, ("system",), where)]
    return [
        *turns,
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
    ]


def _texts(row: Mapping[str, Any], columns: tuple[str, ...], where: str) -> list[str]:
    """The texts of those columns that have one."""
    found = []
    for column in columns:
        value = row.get(column)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{where}: `{column}` must be a string, got {type(value).__name__}")
        if value:
            found.append(value)
    return found
