# SPDX-License-Identifier: Apache-2.0
"""What is wrong in a YAML text, in words for someone who does not know YAML's grammar."""

import re

import yaml


def fault(text: str, error: yaml.YAMLError) -> str:
    """Return one clause about the `error` that reading `text` gave, with the number of the line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"is not valid YAML: {' '.join(str(error).split())}"
    lines = text.split("\n")
    # A fault is often noticed on the line after it.
    for number in (mark.line, mark.line - 1):
        if 0 <= number < len(lines) and (said := _in_line(lines, number)):
            return f"is not valid YAML in line {number + 1}: {said}"
    return f"is not valid YAML in line {mark.line + 1}: {_of_error(text, error)}"


def _in_line(lines: list[str], number: int) -> str | None:
    """Return what a line shows to be wrong with it whatever the parser says, or None."""
    line = lines[number]
    if "\t" in line[: _indent(line)]:
        return "it is indented with a tab; use spaces"
    if key := re.match(r"\s*(?:- +)?([\w.]+):(?!//)[^\s:]", line):
        return f"a space is missing after `{key[1]}:`"
    return None


def _of_error(text: str, error: yaml.YAMLError) -> str:
    problem, mark = str(getattr(error, "problem", "")), getattr(error, "problem_mark", None)
    begins = getattr(error, "context_mark", None)
    assert mark is not None
    lines = text.split("\n")
    line = lines[mark.line] if mark.line < len(lines) else ""
    context = str(getattr(error, "context", ""))
    if ("flow" in context or "quoted" in context) and begins is not None:
        opened = lines[begins.line][begins.column :] if begins.line < len(lines) else ""
        what = f"the {opened[0]} of line {begins.line + 1}" if opened else "a bracket"
        return f"{what} is not closed{', or a comma is missing' if 'flow' in context else ''}"
    if "alias" in problem or "start any token" in problem:
        return f"a text that begins with {line[mark.column : mark.column + 1]} must be in quotes"
    if wrong := _indentation(lines, mark.line):
        return wrong
    if "mapping values" in problem:
        return "a text with a colon must be in quotes, and a section goes on the lines below"
    return problem


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _indentation(lines: list[str], number: int) -> str | None:
    """Return how the indentation of a line differs from what the lines above allow, or None."""
    above = [line for line in lines[:number] if line.strip() and not line.lstrip().startswith("#")]
    if number >= len(lines) or not above:
        return None
    levels: list[int] = []
    for line in above:
        levels = [level for level in levels if level < _indent(line)] + [_indent(line)]
    found = _indent(lines[number])
    if found > levels[-1] and not above[-1].rstrip().endswith(":"):
        return "it is indented deeper than the line above, which is no section"
    if found < levels[-1] and found not in levels:
        allowed = " or ".join(map(str, levels))
        return f"it is indented by {found}, expected {allowed} spaces as in the lines above"
    return None
