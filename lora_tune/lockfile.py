# SPDX-License-Identifier: Apache-2.0
"""`lock.json`: all that decides what a run computes, by content, for another run to be held to.

* The base: hub id and commit, the SHA-256 of `config.json`, and of every safetensors file a SHA-256
  over its size, its header (names, types, shapes and places of its tensors) and blocks of its
  content, evenly spread: 1 MiB of each file, so that 160 GB take seconds. A file of up to 1 MiB is
  read whole. A change between the blocks is not seen; the commit of a hub model covers it.
* The adapter that a run starts from, in the same way.
* Tokenizer and chat template; what the rows became (tokens, masks, order); versions of packages;
  and the recipe, but for what decides no number: `output_dir`, `locked`, `log`, `distributed`,
  `data.num_proc`, `data.cache` and `train.resume`, unless that names a checkpoint.
"""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lora_tune import __version__
from lora_tune.data import tokenizer as tokenizers
from lora_tune.errors import InputError
from lora_tune.hf.folder import replace_file
from lora_tune.hf.peft import WEIGHTS_FILE
from lora_tune.hf.peft_config import CONFIG_FILE
from lora_tune.prepare import Inputs
from lora_tune.recipe import files as recipes
from lora_tune.recipe import schema

NAME = "lock.json"
PACKAGES = ("flax", "jax", "jaxlib", "numpy", "optax", "qwix", "tokenizers", "transformers")
_FORMAT = 1
_BLOCKS, _BLOCK = 64, 16 << 10
_PLACE = ("step", "epoch", "row")
"""What a position of the data says of the step rather than of the data."""
_SHOWN = 5

Lock = dict[str, Any]


def current(inputs: Inputs) -> Lock:
    """The lock of a run as it would be now, as plain JSON values."""
    recipe, source, data = inputs.recipe, inputs.source, inputs.data
    position = data.position(0)
    held_out = None if data.held_out is None else data.held_out.fingerprint
    weights = sorted(source.folder.glob("*.safetensors"))
    if recipe.model.init == "random":
        weights = []
    lock = {
        "format": _FORMAT,
        "model": {
            "base": source.hub_id,
            "commit": source.commit,
            "config.json": _sha256((source.folder / "config.json").read_bytes()),
            "weights": {path.name: weights_hash(path) for path in weights},
        },
        "tokenizer": _tokenizer(inputs.tokenizer),
        "data": {
            "train": {key: value for key, value in position.items() if key not in _PLACE},
            "eval": held_out,
        },
        "packages": versions(),
        "recipe": _recipe(recipe),
    }
    if recipe.lora is not None and recipe.lora.adapter_path is not None:
        lock["adapter"] = _adapter(Path(recipe.lora.adapter_path))
    return json.loads(json.dumps(lock))


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those that numbers depend on."""
    own = {"python": platform.python_version(), "lora_tune": __version__}
    return own | {name: metadata.version(name) for name in PACKAGES}


def weights_hash(path: Path) -> str:
    """A SHA-256 of a safetensors file by size, header and evenly spread blocks."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        length = min(int.from_bytes(file.read(8), "little"), size)
        digest.update(file.read(length))
        rest = size - file.tell()
        start, count = file.tell(), min(_BLOCKS, -(-rest // _BLOCK))
        for number in range(count):
            last = max(rest - _BLOCK, 0)
            file.seek(start + (last * number // (count - 1) if count > 1 else 0))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def write(run_dir: Path, lock: Lock) -> None:
    """Writes the lock of a run into its folder."""
    replace_file(run_dir / NAME, json.dumps(lock, indent=1, sort_keys=True) + "\n")


def find(recipe: str | Path, run_dir: Path) -> Path:
    """The lock file that `locked: true` means.

    Raises:
      InputError: there is none.
    """
    own, beside = run_dir / NAME, _beside(recipes.find(recipe))
    for path in (own, beside):
        if path.is_file():
            return path
    raise InputError(
        f"locked=true needs a lock file, and there is neither {own} nor {beside}; run once with "
        f"locked=false, which writes the first, and copy it to the second to keep it"
    )


def read(path: Path) -> Lock:
    """The content of a lock file.

    Raises:
      InputError: it is damaged, or of another version of the format.
    """
    try:
        lock = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no lock file: it is not JSON ({error})") from None
    if not isinstance(lock, dict) or lock.get("format") != _FORMAT:
        raise InputError(
            f"{path} is no lock file of format {_FORMAT}; make it again with locked=false"
        )
    return lock


def check(path: Path, lock: Lock) -> None:
    """Compares a run as it would be now with a lock file.

    Raises:
      InputError: they differ; one sentence says in what.
    """
    found = differences(read(path), lock)
    if found:
        raise InputError(
            f"locked=true, but the run is not that of {path}: {listed(found)}; undo the change, or "
            "set locked=false to train all the same"
        )


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two locks, or two parts of them: `key was this, is that`."""
    before, after = dict(_flat(was)), dict(_flat(now))
    return [
        f"{key} was {_shown(before, key)}, is {_shown(after, key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _NOTHING) != after.get(key, _NOTHING)
    ]


def listed(found: list[str]) -> str:
    """The first few of a list of differences, and how many more there are."""
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def changed_packages(run_dir: Path) -> str | None:
    """One sentence on packages that a run folder was begun with in other versions, if any.

    A lock that cannot be read ends no run that goes on: the sentence says that instead.
    """
    path = run_dir / NAME
    if not path.is_file():
        return None
    try:
        packages = read(path).get("packages", {})
    except (InputError, OSError):
        packages = None
    if not isinstance(packages, Mapping):
        return f"note: {path} cannot be read, so versions are not compared with those before"
    found = differences(packages, versions())
    return f"note: other versions than before: {listed(found)}" if found else None


_NOTHING = object()


def _beside(recipe: Path) -> Path:
    return recipe.with_name(f"{recipe.stem}.{NAME}")


def _shown(flat: Mapping[str, Any], key: str) -> str:
    if key not in flat:
        return "not there"
    text = json.dumps(flat[key])
    is_hash = isinstance(flat[key], str) and len(flat[key]) in (32, 64)
    return f"{flat[key][:12]}…" if is_hash else text if len(text) <= 60 else f"{text[:57]}…"


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _adapter(folder: Path) -> dict[str, str]:
    """Hashes of an adapter's files; one that is missing is for whoever loads it to tell."""
    hashes = {CONFIG_FILE: lambda path: _sha256(path.read_bytes()), WEIGHTS_FILE: weights_hash}
    return {
        name: made_of(folder / name)
        for name, made_of in hashes.items()
        if (folder / name).is_file()
    }


def _tokenizer(tokenizer: Any) -> dict[str, str | None]:
    """Hashes of a tokenizer's rules and of its chat template."""
    template = tokenizer.chat_template
    return {
        "rules": _sha256(tokenizers.rules(tokenizer).encode()),
        "chat_template": None if template is None else _sha256(json.dumps(template).encode()),
    }


def _recipe(recipe: schema.Recipe) -> dict[str, Any]:
    values = dataclasses.asdict(recipe)
    for key in ("output_dir", "locked", "log", "distributed"):
        del values[key]
    for key in ("num_proc", "cache"):
        del values["data"][key]
    if recipe.train.resume in ("auto", "never"):
        del values["train"]["resume"]
    return values


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
