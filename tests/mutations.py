# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that spoil what was well: text, JSON trees and bytes."""

import copy
import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

NASTY = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\ud800",
    "\\u0000",
    "\x00",
    "1e999",
    "NaN",
    "9" * 5000,
    "\ufeff",
    "null",
    "\r\n",
    "\n\n",
    "[" * 2000,
    '{"a":' * 2000,
    ",",
    "\\",
    "true",
    "-",
    "\udc80",
    " ",
]
_EDGES = [None, True, False, -1, 0, 1, 3, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-30, 1e308]
_EDGES += [math.inf, -math.inf, math.nan, "", " ", "x", "\x00", "1", "auto", "../..", "é🙂"]
_EDGES += [[], {}, [None], [1, 2], ["x"], {"x": 1}, {"": None}, [[[]]], [{"x": []}]]
VALUES = st.sampled_from(_EDGES) | st.integers() | st.floats() | st.text(max_size=6)
"""What a key of a configuration may be given instead."""


def share(part: float) -> int:
    """Examples of a test: this part of what the profile of hypothesis says, 100 by default."""
    return max(1, round(part * settings().max_examples))


def mutated(draw: st.DrawFn, line: str) -> str:
    """A line with something put in, taken out or written over."""
    at = draw(st.integers(0, len(line)))
    stop = draw(st.integers(at, min(len(line), at + 12)))
    return line[:at] + draw(st.sampled_from(NASTY) | st.text(max_size=3)) + line[stop:]


@st.composite
def spoilt_text(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> bytes:
    """A text in UTF-8, more or less, that was changed in one to three places."""
    text = draw(texts)
    for _ in range(draw(st.integers(1, 3))):
        text = mutated(draw, text)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def spoilt_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes that were cut, or changed in one to three places."""
    if draw(st.booleans()):
        return content[: draw(st.integers(0, len(content) - 1))]
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        found[draw(st.integers(0, len(found) - 1))] = draw(st.integers(0, 255))
    return bytes(found)


@st.composite
def spoilt_tree(draw: st.DrawFn, trees: st.SearchStrategy[Any]) -> Any:
    """A JSON tree in which one to three values were replaced, removed or added."""
    tree = copy.deepcopy(draw(trees))
    for _ in range(draw(st.integers(1, 3))):
        holders = [*_holders(tree)]
        holder, key = draw(st.sampled_from(holders))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if kind == "remove":
            del holder[key]
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=8))] = copy.deepcopy(draw(VALUES))
        else:
            holder[key] = copy.deepcopy(draw(VALUES))
        if not tree:
            break
    return tree


def _holders(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree: the list or object, and the key there."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    found = [(tree, key) for key in keys]
    for holder, key in list(found):
        found += _holders(holder[key])
    return found
