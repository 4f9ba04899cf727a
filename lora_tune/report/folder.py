# SPDX-License-Identifier: Apache-2.0
"""What a run folder says of its run, and the report that is made of it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lora_tune import words
from lora_tune.errors import InputError
from lora_tune.hf.folder import replace_file
from lora_tune.secrets import masked, masked_in
from lora_tune.training.metrics import read_rows

NAME = "report.html"
SUMMARY = "summary.json"
"""What the report needs besides the log: data, devices, and how the run ended."""
_KEYS = {"report": {"run": str}}
_FOREIGN = {"output_dir": "run", "recipe": "run", "path": "run", "folder": "run"}


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run folder as its files tell, secrets masked; earlier versions lack some of the files.

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
        if not (path / "recipe.yaml").is_file():
            raise InputError(f"{path} is no run folder: there is no recipe.yaml in it")
        recipe = _text(path / "recipe.yaml")
        try:
            settings = yaml.safe_load(recipe)
        except yaml.YAMLError as error:
            raise InputError(f"{path / 'recipe.yaml'} is not YAML ({error})") from None
        table = _text(path / "adapters.tsv") if (path / "adapters.tsv").is_file() else ""
        config = path / "adapter" / "adapter_config.json"
        return cls(
            path,
            recipe,
            settings if isinstance(settings, dict) else {},
            masked_in(read_rows(path / "metrics.jsonl")),
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
    print(f"wrote {write_report(Path(given['run']))}")


def _text(path: Path) -> str:
    return masked(path.read_bytes().decode("utf-8", "replace"))


def _json(path: Path) -> dict[str, Any]:
    """The content of a JSON file, {} where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); mend or remove it") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object; mend or remove it")
    return found
