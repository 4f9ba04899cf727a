# SPDX-License-Identifier: Apache-2.0
"""The command `plan`: from `key=value` words to a report."""

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from lora_tune.errors import InputError
from lora_tune.plan import planner, report, search, topologies

WORDS = ("recipe", "topology", "slices", "layers", "search", "json", "hlo")
"""Words of the command itself; all others are keys of the recipe."""


def plan(pairs: Sequence[tuple[str, str]]) -> int:
    """Plans a recipe for every topology that is named, prints and writes what was found.

    Returns:
      0 if the step fits everywhere, 1 if it does not.
    """
    _check_words([key for key, _ in pairs])
    given = {key: value for key, value in pairs if key in WORDS}
    overrides = [f"{key}={value}" for key, value in pairs if key not in WORDS]
    slices = _number(given, "slices") or 1
    wanted = topologies.parse(given["topology"], slices=slices)
    layers = _number(given, "layers")
    for word in ("json", "hlo"):
        _check_file(given, word)
    if "hlo" in given and len(wanted) > 1:
        raise InputError("hlo= takes the program of one topology; name one")
    if "hlo" in given and given.get("search", "false") != "false":
        raise InputError("hlo= takes the program of one plan, not of a search; remove one of them")
    recipe = planner.load(given["recipe"], overrides)
    keep = any(text.startswith("mesh.") for text in overrides)
    budget = _budget(given)
    fits, written = [], []
    for topology in wanted:
        if fits:
            print()
        options = {"layers": layers, "keep_mesh": keep}
        if budget is None:
            found = planner.plan(recipe, topology, **options)
            report.show(found)
            values = report.values(found)
        else:
            found, sought = search.search(recipe, topology, **options, budget=budget, say=_progress)
            report.show(found)
            report.show_search(sought)
            values = report.values(found)
            values["search"] = None if sought is None else report.search_values(sought)
        fits.append(found.fits)
        written.append(values)
        if "json" in given:
            report.write(written, given["json"])
        if "hlo" in given and found.compiled.text is not None:
            Path(given["hlo"]).write_text(found.compiled.text, encoding="utf-8")
    return 0 if all(fits) else 1


def _check_words(keys: Sequence[str]) -> None:
    """What is nearly a word of the command is no key of the recipe."""
    for key in keys:
        close = get_close_matches(key, WORDS, n=1)
        if key not in WORDS and close and "." not in key:
            raise InputError(f"unknown key {key!r}: did you mean {close[0]!r}?")


def _progress(trial: search.Trial) -> None:
    print(f"compiled {report.trial_line(trial)}", file=sys.stderr, flush=True)


def _budget(given: Mapping[str, str]) -> int | None:
    """Programs that a search may compile; None for no search."""
    text = given.get("search", "false")
    if text in ("true", "false"):
        return search.BUDGET if text == "true" else None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(
            f"search must be true, false or the most programs to compile, a number, got {text!r}"
        )
    return int(text)


def _number(given: Mapping[str, str], word: str) -> int | None:
    text = given.get(word)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{word} must be an integer of at least 1, got {text!r}")
    return int(text)


def _check_file(given: Mapping[str, str], word: str) -> None:
    """Refuses a file that cannot be written before minutes are spent on what goes into it."""
    if word not in given:
        return
    path = Path(given[word])
    if not given[word] or path.is_dir():
        raise InputError(f"{word} is {given[word]!r}, expected the name of a file")
    if not path.parent.is_dir():
        raise InputError(f"{word}: there is no folder {path.parent} for {path.name}; make it first")
