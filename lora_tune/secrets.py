# SPDX-License-Identifier: Apache-2.0
"""Access tokens and passwords: where a text holds one, and the same text without."""

import os
import re
from collections.abc import Iterator
from typing import Any

MASK = "[secret]"
_NAMED = re.compile(r"(^|_)(TOKEN|API_?KEY|ACCESS_KEY|SECRET|SECRET_KEY|PASSWORD|PASSWD)$")
_SHORTEST = 12
"""Characters of a value that is taken for a secret; shorter ones stand in any text by chance."""
# Tokens of the hub, OpenAI, Anthropic and GitHub, and access keys of AWS, by their beginnings.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])"
    r"(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16})"
)


def _values() -> list[str]:
    """Values of environment variables that are named as secrets are, the longest first."""
    found = {
        value.strip()
        for name, value in os.environ.items()
        if _NAMED.search(name.upper()) and len(value.strip()) >= _SHORTEST
    }
    return sorted(found, key=len, reverse=True)


def masked(text: str) -> str:
    """The text with `[secret]` in the place of everything that is or looks like a secret."""
    for value in _values():
        text = text.replace(value, MASK)
    return _TOKEN.sub(MASK, text)


def masked_in(value: Any) -> Any:
    """The same of every text in a structure of lists and dictionaries."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {masked_in(key): masked_in(item) for key, item in value.items()}
    return [masked_in(item) for item in value] if isinstance(value, list | tuple) else value


def held_in(value: Any, place: str = "") -> Iterator[str]:
    """The places in a structure, as dotted keys, of texts that hold a secret."""
    if isinstance(value, str):
        if masked(value) != value:
            yield place
    elif isinstance(value, dict):
        for key, item in value.items():
            if masked(str(key)) != str(key):
                yield place
            yield from held_in(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from held_in(item, f"{place}[{index}]")
