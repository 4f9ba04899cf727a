# SPDX-License-Identifier: Apache-2.0
"""The command `export`: from the checkpoint of a run to a folder, and to the hub."""

import sys
from pathlib import Path
from typing import Any

from lora_tune import trained, words
from lora_tune.errors import InputError
from lora_tune.export import write
from lora_tune.export.notes import training_notes
from lora_tune.hf.card import is_hub_id, model_card
from lora_tune.hf.folder import check_apart, check_replaceable
from lora_tune.hf.shards import shard_bytes
from lora_tune.hf.upload import check_target, upload
from lora_tune.trained import Trained
from lora_tune.training.state import unflatten

FORMATS = ("peft", "merged")
_BASE = {"model.path": str, "model.revision": str}
_KEYS = {
    "export": {
        **{"run": str, "to": str, "format": str, "max_shard_size": str},
        **{"push": str, "private": bool},
        **_BASE,
    },
}
_FOREIGN = {
    "output_dir": "run",
    "recipe": "run",
    "out": "to",
    "repo_id": "push",
    "push_to_hub": "push",
    "hub_model_id": "push",
}
_SECRET = ("token", "hf_token", "hub_token", "api_key", "password")


def export(pairs: words.Pairs) -> None:
    """Writes what a run has trained to `to=`, in the form `format=`, and pushes it to `push=`.

    Raises:
      InputError: the words, the run, the folder or the hub are not what they must be.
    """
    for key, _ in pairs:
        if key.lower() in _SECRET:
            raise InputError(
                f"{key}= would show a secret to everyone on this machine; set HF_TOKEN in the "
                "environment or run `hf auth login`"
            )
    given = words.parse(pairs, "export", _KEYS, foreign=_FOREIGN)
    missing = [f"{key}=" for key in ("run", "to") if key not in given]
    if missing:
        raise InputError(f"export lacks {' and '.join(missing)}; see lora-tune --help")
    form, folder, push = given.get("format", FORMATS[0]), Path(given["to"]), given.get("push")
    if form not in FORMATS:
        raise InputError(f"format is {form!r}, expected one of {', '.join(FORMATS)}")
    if "private" in given and push is None:
        raise InputError("private= is of the repository that push= names; remove it")
    size = given.get("max_shard_size")
    if size is not None and form != "merged":
        raise InputError("max_shard_size= is of format=merged; an adapter is one file; remove it")
    if size is not None:
        shard_bytes(size)
    if push is not None:
        check_target(push)
    run = trained.read(given["run"], [f"{key}={given[key]}" for key in _BASE if key in given])
    _check(run, form, push)
    check_apart(folder, run.folder)
    check_replaceable(folder, kind=_kind(run, form))
    for note in _write(run, form, folder, size):
        print(note, file=sys.stderr)
    print(f"wrote {folder}, step {run.step} of {run.folder}")
    if push is not None:
        print(f"pushed to {upload(folder, push, private=given.get('private', False))}")


def _kind(run: Trained, form: str) -> str:
    return "adapter" if form == "peft" else "full" if run.lora is None else "merged"


def _check(run: Trained, form: str, push: str | None) -> None:
    if run.step is None:
        raise InputError(
            f"{run.folder}/checkpoints holds no checkpoint; train first, or take adapter/ or "
            "merged/ of the run as they are"
        )
    if form == "peft" and run.lora is None:
        raise InputError(f"{run.folder} trained every parameter (lora=null); use format=merged")
    if form == "merged" and run.lora is not None and run.recipe.model.init == "random":
        raise InputError(f"{run.folder}: a base drawn at random (model.init=random) is not merged")
    if form == "peft" and push is not None and not is_hub_id(run.source.base_name):
        raise InputError(
            f"push={push}: the adapter's base is a folder of this machine, {run.source.folder}, "
            "which nobody else has; name it on the hub with model.path=OWNER/NAME, or push "
            "format=merged"
        )


def _write(run: Trained, form: str, folder: Path, size: str | None) -> list[str]:
    notes = training_notes(run)
    if form == "peft":
        assert run.lora is not None
        state = run.adapter_state()
        write.adapter(state, run.leaves, run.lora, run.origin, folder, notes=notes)
        return []
    state = unflatten(run.weights) if run.lora is None else run.adapter_state()
    base = run.source.base_name if is_hub_id(run.source.base_name) else None
    card = model_card(base, run.source.commit, notes=notes)
    options: dict[str, Any] = {"recipe": run.recipe, "source": run.source, "card": card}
    options["max_shard_size"] = size
    return write.whole(state, run.leaves, run.model.family, run.origin, folder, **options)
