# SPDX-License-Identifier: Apache-2.0
"""Checks of `config.json` that every family makes: types, sizes, and what its layers lack.

Each yields one sentence per problem, so that a family can report all of them in one error.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST: Mapping[str, int] = {"num_hidden_layers": 500, "num_experts": 4096}
"""Far above any model there is; planning for what a slip of the pen asks for would take hours."""


def has_type_of(value: Any, example: Any) -> bool:
    """Whether a value of a JSON file can stand where the example stands; an int can for a float."""
    if isinstance(example, bool) or isinstance(value, bool):
        return type(value) is type(example)
    return isinstance(value, (int, float) if isinstance(example, float) else int)


def value_problems(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the fields that are one number or one truth value."""
    for name, default in defaults.items():
        value, least = values[name], 0 if name.startswith("num_experts") else 1
        if not has_type_of(value, default):
            yield f"{name} is {value!r}, expected {type(default).__name__}"
        elif type(default) is int and value < least:
            yield f"{name} is {value}, expected at least {least}"
        elif value > MOST.get(name, value):
            yield f"{name} is {value}, expected at most {MOST[name]}"


def unsupported(hf: Mapping[str, Any], only: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Fields that ask for something the layers do not do: those with another than these values."""
    for name, allowed in only.items():
        if name in hf and hf[name] not in allowed:
            yield f"{name}={hf[name]!r} is not supported (only {' or '.join(map(repr, allowed))})"


def positive(values: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """What is wrong with fields that must be numbers above 0."""
    for name in names:
        if not has_type_of(values[name], 1.0) or values[name] <= 0:
            yield f"{name} is {values[name]!r}, expected a number above 0"
