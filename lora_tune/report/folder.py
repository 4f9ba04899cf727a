# SPDX-License-Identifier: Apache-2.0
"""What a run folder says of its run, and the report that is made of it."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lora_tune import recipe as recipes
from lora_tune import words
from lora_tune.errors import InputError, short
from lora_tune.hf.folder import replace_file
from lora_tune.secrets import masked, masked_in
from lora_tune.training.metrics import read_rows

NAME = "report.html"
SUMMARY = "summary.json"
"""What the report needs besides the log: data, devices, and how the run ended."""
_NUMBER = int | float
_SHAPES: Mapping[str, Any] = {
    "recipe.yaml": {"model": {"path": str}},
    SUMMARY: {
        "total_steps": int,
        "parameters": {"trained": int},
        "data": {
            "drops": {"*": int},
            "packing_efficiency": _NUMBER,
            "sources": [{"packing_efficiency": _NUMBER}],
        },
        "environment": {},
        "ended": {"how": str, "step": int, "said": str},
    },
    "lock.json": {"model": {"base": str}, "packages": {}},
    "metrics.jsonl": {
        **dict.fromkeys(
            (
                *("loss", "eval_loss", "eval_accuracy", "eval_exact_match"),
                *("tokens_per_second", "total_tokens"),
            ),
            _NUMBER,
        ),
        "samples": [{"prompt": str, "answer": str}],
    },
    "adapter_config.json": {"base_model_name_or_path": str, "r": int, "rank_pattern": {"*": int}},
}
"""File -> types of what the report reads of it, "*" for any other key."""
_WORDS = {
    dict: "a mapping",
    list: "a list",
    str: "a text",
    int: "an integer",
    _NUMBER: "a number",
}
_KEYS = {"report": {"run": str}}
_FOREIGN = {"output_dir": "run", "recipe": "run", "path": "run", "folder": "run"}


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run folder as its files tell, secrets masked; earlier versions lack some of the files.

    What is null in a file is not there, and what the report reads has the type in `_SHAPES`.

    Attributes:
      path: the folder.
      recipe: the text of `recipe.yaml`.
      settings: the same as plain values.
      rows: of `metrics.jsonl`.
      adapters: lines of `adapters.tsv`, split, the head first; empty if nothing is adapted.
      summary: of `summary.json`.
      lock: of `lock.json`.
      adapter: of `adapter/adapter_config.json`, None where there is none.
      merged: whether there is a `merged/`.
    """

    path: Path
    recipe: str
    settings: Mapping[str, Any]
    rows: list[dict[str, Any]]
    adapters: list[list[str]]
    summary: Mapping[str, Any]
    lock: Mapping[str, Any]
    adapter: Mapping[str, Any] | None
    merged: bool

    @classmethod
    def read(cls, path: Path) -> "RunFolder":
        """Reads a run folder.

        Raises:
          InputError: it is none, or one of its files is damaged.
        """
        recipe = _text(recipes.of_run(path))
        try:
            settings = yaml.safe_load(recipe)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise InputError(
                f"{path / 'recipe.yaml'} is not YAML; the training command writes it anew"
            ) from None
        table = _text(path / "adapters.tsv") if (path / "adapters.tsv").is_file() else ""
        config = path / "adapter" / "adapter_config.json"
        log = path / "metrics.jsonl"
        return cls(
            path,
            recipe,
            _shaped(settings or {}, _SHAPES["recipe.yaml"], str(path / "recipe.yaml")),
            [
                _shaped(row, _SHAPES[log.name], f"{log}, step {row['step']}")
                for row in masked_in(read_rows(log))
            ],
            [line.split("\t") for line in table.splitlines()],
            _json(path / SUMMARY),
            _json(path / "lock.json"),
            _json(config) if config.is_file() else None,
            (path / "merged").is_dir(),
        )


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json` of a run folder, whole or not at all."""
    replace_file(run_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run folder, whole or not at all; returns its path.

    Raises:
      InputError: this is no run folder, or one of its files is damaged.
      OSError: it cannot be written.
    """
    from lora_tune.report.page import page

    text = page(RunFolder.read(run_dir))
    replace_file(run_dir / NAME, text.encode("utf-8", "replace").decode("utf-8"))
    return run_dir / NAME


def report(pairs: words.Pairs) -> None:
    """The command `report`: makes the report of a run folder again."""
    given = words.parse(pairs, "report", _KEYS, foreign=_FOREIGN)
    if "run" not in given:
        raise InputError("expected run=DIR, the folder of a run")
    written = write_report(Path(given["run"]))
    if not read_rows(written.with_name("metrics.jsonl")):
        print("note: metrics.jsonl has no rows, so the report has no curves", file=sys.stderr)
    print(f"wrote {written}")


def _text(path: Path) -> str:
    return masked(path.read_bytes().decode("utf-8", "replace"))


def _json(path: Path) -> dict[str, Any]:
    """The content of a JSON file, {} where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); mend or remove it") from None
    return _shaped(found, _SHAPES[path.name], str(path))


def _shaped(value: Any, shape: Any, where: str) -> Any:
    """The value without what is null in it, if it has the types of `shape` (None: any).

    Raises:
      InputError: it has not; `where` names it.
    """
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if kind is not None and not isinstance(value, kind):
        raise InputError(f"{where}: expected {_WORDS[kind]}, got {short(value)}; mend or remove it")
    if isinstance(shape, dict):
        return {
            key: _shaped(item, shape.get(key, shape.get("*")), f"{where}: {key}")
            for key, item in value.items()
            if item is not None
        }
    if isinstance(shape, list):
        return [_shaped(item, shape[0], where) for item in value]
    return value
