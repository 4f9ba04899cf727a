# SPDX-License-Identifier: Apache-2.0
"""What a model card says of a run: data and its fingerprint, recipe, metrics."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from lora_tune import assets
from lora_tune.data.files import local_files
from lora_tune.errors import InputError
from lora_tune.hf.card import is_hub_id
from lora_tune.recipe import schema
from lora_tune.recipe.figures import figures
from lora_tune.trained import Trained

_SECTIONS = ("model", "lora", "data", "optim", "train")


def training_notes(run: Trained) -> str:
    """Markdown on how a run was trained; folders of this machine are not in it."""
    return "\n".join(_lines(run)) + "\n"


def _lines(run: Trained) -> Iterator[str]:
    yield from ("## Training", "")
    yield f"- {run.step} steps with lora-tune{_choice(run)}"
    for source in run.recipe.data.all_sources():
        yield f"- data: {fingerprint(source.path)}"
    for each in run.recipe.data.all_eval_sets():
        yield f"- eval data{each.name and f' {each.name}'}: {fingerprint(each.path)}"
    names = ["loss", *figures(run.recipe)]
    found = _newest(run.folder / "metrics.jsonl", run.step or 0, names)
    if found:
        yield from ("", "| figure | step | value |", "|---|---:|---:|")
        for name, (step, value) in found.items():
            yield f"| `{name}` | {step} | {value:.4g} |"
    yield from ("", "```yaml", _recipe(run.recipe).rstrip(), "```")


def _choice(run: Trained) -> str:
    """How the checkpoint was chosen, where the recipe asks for the best."""
    if run.best_by is not None:
        return f", the best of its checkpoints by `{run.best_by}`"
    metric = run.recipe.train.exported_by()
    return "" if metric is None else f", its newest checkpoint: none was evaluated by `{metric}`"


def fingerprint(path: str | list[str]) -> str:
    """The name of data and, of local files, the SHA-256 of their bytes one after the other."""
    shown = _public(path) if isinstance(path, str) else ", ".join(map(_public, path))
    try:
        files = local_files(assets.resolve_all(path))
    except InputError:
        return f"`{shown}`, no longer there"
    if files is None:
        return f"[{path}](https://huggingface.co/datasets/{path})"
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            while piece := content.read(1 << 20):
                digest.update(piece)
    return f"`{shown}`, SHA-256 `{digest.hexdigest()}`"


def _newest(path: Path, last: int, names: Sequence[str]) -> dict[str, tuple[int, float]]:
    """The newest value of each figure up to a step, and its step."""
    found: dict[str, tuple[int, float]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            row: Mapping[str, Any] = json.loads(line)
            if row["step"] <= last:
                found |= {n: (row["step"], row[n]) for n in names if n in row}
    return {name: found[name] for name in names if name in found}


def _recipe(recipe: schema.Recipe) -> str:
    """What the recipe says beyond the defaults, as YAML."""
    values = dataclasses.asdict(recipe)
    defaults = dataclasses.asdict(schema.Recipe())
    kept = {}
    for name in _SECTIONS:
        section, usual = values[name], defaults[name] or {}
        if section is None:
            kept[name] = None
            continue
        kept[name] = {
            key: _plain(value)
            for key, value in section.items()
            if key not in usual or value != usual[key]
        }
    return yaml.safe_dump(kept, sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _public(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _public(text: str) -> str:
    """The text; of a path on this machine its last part."""
    is_path = re.match(r"[~./]|[A-Za-z]:\\", text) and not is_hub_id(text)
    return PurePath(text).name if is_path and Path(text).name else text
