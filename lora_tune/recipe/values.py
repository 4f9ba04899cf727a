# SPDX-License-Identifier: Apache-2.0
"""Values against the types of the schema: what is wrong with one, what was most likely meant."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from lora_tune.recipe.names import MEANINGS, item_of, leaves, section_of, unknown_in
from lora_tune.recipe.schema import Recipe

# The one form of interpolation that recipes have. Others (`${name:argument}`) run code.
_REFERENCE = re.compile(r"(?<!\\)\$\{[\w.]+\}")
ONLY_REFERENCES = "may use `${…}` only to name a key of this recipe"
# What people write who mean null; YAML's own words for it never get here.
_MEANT_AS_NULL = {"none", "nil", "false", "off", "no"}


def known() -> Mapping[str, Any]:
    """Return full dotted key -> type of every section and every value of the schema."""
    return {**get_type_hints(Recipe), **leaves()}


def bad_value(key: str, value: Any) -> str | None:
    """Return what is wrong with the value of a known key, or None."""
    return _bad(key, known()[key], value)


def _bad(key: str, hint: Any, value: Any) -> str | None:
    if any("${" in _REFERENCE.sub("", text) for text in _texts(value)):
        return f"{key} {ONLY_REFERENCES}, got {shown(value)}"
    if _is_meant_as_null(hint, value):
        meaning = ", which trains every parameter" if key == "lora" else ""
        return f"{key} is {shown(value)}; write {key}=null (null in a file){meaning}"
    if isinstance(value, str) and str in (hint, *get_args(hint)):
        if not value.strip():
            instead = f"; write {key}=null for none" if NoneType in get_args(hint) else ""
            return f"{key} is an empty text{instead}"
        if "\0" in value:
            return f"{key} holds a NUL character, which no name has, got {shown(value)}"
    item = item_of(hint)
    if item is not None and isinstance(value, list):
        said = (_bad_item(f"{key}[{i}]", item, each) for i, each in enumerate(value))
        return next((problem for problem in said if problem), None)
    if _fits(hint, value):
        return None
    switched = isinstance(value, bool) and key in MEANINGS
    advice = f"; expected {MEANINGS[key]}" if switched else _advice(hint, value)
    return f"{key} must be {described(hint)}, got {shown(value)}{advice}"


def _bad_item(place: str, item: type, value: Any) -> str | None:
    """What is wrong with one item of a list of sections, or None."""
    hints = get_type_hints(item)
    if not isinstance(value, dict):
        return f"{place} must be a mapping with the keys {', '.join(hints)}, got {shown(value)}"
    for name, each in value.items():
        if name not in hints:
            return unknown_in(place, name, hints)
        if said := _bad(f"{place}.{name}", hints[name], each):
            return said
    needed = [name for name in hints if item.__dataclass_fields__[name].default == MISSING]
    absent = next((name for name in needed if value.get(name, MISSING) == MISSING), None)
    return None if absent is None else f"{place}.{absent} is required; set it in that item"


def shown(value: Any) -> str:
    """Return a value as a recipe would have it, at most 80 characters long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


_NAMES: Mapping[Any, str] = {
    NoneType: "null",
    bool: "true or false",
    float: "a number",
    int: "an integer",
    str: "text",
}


def described(hint: Any) -> str:
    """Return a type of the schema in words."""
    if hint in _NAMES:
        return _NAMES[hint]
    item, section = item_of(hint), section_of(hint)
    if item is not None:
        return f"a list of mappings with the keys {', '.join(item.__dataclass_fields__)}"
    if section is not None:
        return f"a section with the keys {', '.join(section.__dataclass_fields__)}"
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return " or ".join(arguments)
    if get_origin(hint) in (list, dict):
        items = described(arguments[-1]).split()[-1] + "s"
        return f"a list of {items}" if get_origin(hint) is list else f"a mapping to {items}"
    return " or ".join(described(part) for part in arguments)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from _texts(list(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _fits(hint: Any, value: Any) -> bool:
    """Return whether `value` is of the schema type `hint`; references are checked when resolved."""
    if isinstance(value, str) and ("${" in value or value == MISSING):
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(name, str) and _fits(arguments[1], item) for name, item in value.items()
        )
    if arguments:
        return any(_fits(part, value) for part in arguments)
    allowed = (int, float) if hint is float else hint
    return isinstance(value, allowed) and (hint is bool or not isinstance(value, bool))


def _is_meant_as_null(hint: Any, value: Any) -> bool:
    """Whether a value that may be null is Python's None, or a section is switched off."""
    parts = get_args(hint)
    if NoneType not in parts:
        return False
    if isinstance(value, str):
        return value.lower() in ({"none", "nil"} if str in parts else _MEANT_AS_NULL)
    return value is False


def _advice(hint: Any, value: Any) -> str:
    """Return what to write in place of a value of the wrong type, or nothing."""
    parts = (hint, *get_args(hint))
    if str in parts and not isinstance(value, list | NoneType):
        return "; put it in quotes"
    if int in parts and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    number = value.replace(",", ".") if isinstance(value, str) else ""
    if {int, float} & {*parts} and re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", number):
        return f"; write {number} without quotes"
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    close = get_close_matches(str(value), choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""
