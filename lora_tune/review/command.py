# SPDX-License-Identifier: Apache-2.0
"""The command `data`: from `key=value` words to a report. Needs a tokenizer, no weights."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from lora_tune import assets, build_data, words
from lora_tune import recipe as recipes
from lora_tune.errors import InputError, said_of
from lora_tune.hf.files import read_json
from lora_tune.hf.folder import replace_file
from lora_tune.hf.hub import Source, find_model
from lora_tune.review import page, report, terminal

_KEYS = {"data": {"recipe": str, "rows": int, "html": str, "max_overlap": float}}


def review(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Prints, and with `html=` writes, what training will see; returns the checks that failed.

    Raises:
      InputError: a word or the recipe is wrong, or the rows cannot be trained on.
    """
    own = _KEYS["data"]
    for key, _ in pairs:
        close = get_close_matches(key, own, n=1)
        if key not in own and close and "." not in key:
            raise InputError(f"unknown key {key!r}: did you mean {close[0]!r}?")
    given = words.parse([pair for pair in pairs if pair[0] in own], "data", _KEYS)
    rows, most = given.get("rows", 3), given.get("max_overlap", 0.01)
    if rows < 0:
        raise InputError(f"rows must be at least 0, got {rows}")
    if not 0 <= most <= 1:
        raise InputError(f"max_overlap must be a share from 0 to 1, got {most:g}")
    html = _file(given)
    overrides = [f"{key}={value}" for key, value in pairs if key not in own]
    recipe = recipes.load(given["recipe"], overrides)
    with said_of("model.path"):
        folder = str(assets.resolve(recipe.model.path))
        source = find_model(folder, revision=recipe.model.revision, weights=False)
    tokenizer = build_data.make_tokenizer(recipe, source, _vocab_size(source))
    data = build_data.make_data(recipe, tokenizer)
    title = f"Data of {given['recipe']}"
    found = report.make(data, tokenizer, title=title, rows=rows, max_overlap=most)
    terminal.show(found)
    if html is not None:
        replace_file(html, page.render(found))
    return [f"{check.name}: {check.text}" for check in found.failed]


def _file(given: Mapping[str, str]) -> Path | None:
    if "html" not in given:
        return None
    path = Path(given["html"]).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"html={path} must name a file in a folder that exists")
    return path


def _vocab_size(source: Source) -> int | None:
    """Rows of the model's embedding, if its configuration says."""
    where = source.folder / "config.json"
    config = read_json(where) if where.is_file() else {}
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None
