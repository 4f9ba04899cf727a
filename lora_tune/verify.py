# SPDX-License-Identifier: Apache-2.0
"""The command `verify-resume`: trains the end of a run again and compares what was logged."""

import contextlib
import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from lora_tune import build, words
from lora_tune import recipe as recipes
from lora_tune.checkpoint.choice import steps_in
from lora_tune.checkpoint.files import Damaged, read_meta
from lora_tune.checkpoint.folder import changed_since, read_one
from lora_tune.errors import InputError
from lora_tune.prepare import Inputs, Training
from lora_tune.training import loop
from lora_tune.training.best import Best
from lora_tune.training.metrics import CLOCK, read_rows

_BASE = {"model.path": str, "model.revision": str}
_KEYS = {"verify-resume": {"run": str, "last": int, **_BASE}}
_FOREIGN = {"output_dir": "run", "recipe": "run", "steps": "last", "path": "model.path"}


def verify_resume(pairs: words.Pairs) -> str | None:
    """Trains from a checkpoint to the end of the log again; nothing in the run folder is changed.

    Returns:
      What differs first from what was logged, None if all of it is the same, bit for bit.

    Raises:
      InputError: there is nothing to compare.
    """
    given = words.parse(pairs, "verify-resume", _KEYS, foreign=_FOREIGN)
    if "run" not in given:
        raise InputError("expected run=DIR, the folder of a run")
    last = given.get("last", 10)
    if last < 1:
        raise InputError(f"last is {last}, expected at least 1, the number of losses to compare")
    folder = Path(given["run"])
    overrides = [f"{key}={given[key]}" for key in _BASE if key in given]
    recipe = recipes.load(recipes.of_run(folder), overrides)
    log = folder / "metrics.jsonl"
    logged = {row["step"]: row for row in read_rows(log) if "loss" in row}
    if not logged:
        raise InputError(f"{log} has no step that was trained, so there is nothing to compare with")
    inputs = Inputs.read(recipe)
    since = _changed_at(folder / "checkpoints", inputs.total_steps)
    if since:
        print(
            f"steps up to {since} were trained when the run was to have another number of steps, "
            "and so with other learning rates: they are left out"
        )
    start = _start(folder, sorted(step for step in logged if step > since), last, since)
    if (fewer := sum(step > start for step in logged)) < last:
        print(f"fewer steps than last={last} can be compared: {fewer}")
    replayed = _replay(inputs, folder, start, max(logged))
    wanted = {step: row for step, row in logged.items() if step > start}
    return _compare(wanted, replayed)


def _changed_at(checkpoints: Path, total_steps: int) -> int:
    """The last step of a run as it was before it was given another number of steps, or 0."""
    for step in reversed(steps_in(checkpoints)):
        with contextlib.suppress(Damaged):
            return changed_since(read_meta(checkpoints / str(step)), total_steps)
    return 0


def _start(folder: Path, logged: list[int], last: int, since: int) -> int:
    """The newest step to go on from with so many logged steps after it, or the oldest there is.

    `logged` are the steps after `since` that can be compared, ascending.
    """
    # A run begins with a logged step 1, unless it went on from the checkpoint of another.
    beginning = [0] if logged[:1] == [1] else []
    possible = [*beginning, *steps_in(folder / "checkpoints")]
    useful = [step for step in possible if logged and since <= step < logged[-1]]
    if not useful:
        after = f" from step {since} on" if since else ""
        raise InputError(
            f"{folder} has no checkpoint{after} with a logged step after it, so there is nothing "
            "to train again and compare; let it train on"
        )
    enough = [step for step in useful if sum(each > step for each in logged) >= last]
    return max(enough, default=min(useful))


@dataclasses.dataclass
class _Collected:
    """Keeps the rows that the loop logs."""

    rows: dict[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows[row["step"]] = row

    def note(self, sentence: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Unsaved:
    """A saver for a loop that leaves no trace."""

    stopping = "finishing this step"

    def __enter__(self) -> "_Unsaved":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        pass

    def due(self, step: int) -> bool:
        return False

    def best_value(self) -> float | None:
        return None

    def save(self, step: int, state: tuple[Any, Any], **_: Any) -> Path:
        return Path()

    def add_evaluation(self, step: int, evaluation: Mapping[str, float], best: Best | None) -> None:
        pass


def _replay(inputs: Inputs, folder: Path, start: int, end: int) -> dict[int, Mapping[str, Any]]:
    training = Training.build(inputs)
    trainable, opt_state, frozen = training.state
    counts: Mapping[str, int] = {}
    if start:
        fingerprint = build.fingerprint(inputs.recipe, inputs.source)
        path = folder / "checkpoints" / str(start)
        restored = read_one(path, (trainable, opt_state), fingerprint)
        inputs.data.train.check(dict(restored.meta.position))
        trainable, opt_state, counts = restored.trainable, restored.opt_state, restored.meta.counts
    print(f"training again from step {start + 1} to {end}", flush=True)
    collected = _Collected()
    outcome = loop.run(
        **training.fixed,
        state=(trainable, opt_state, frozen),
        checkpoints=_Unsaved(),
        metrics=collected,
        total_steps=end,
        start_step=start,
        counts=counts,
    )
    if outcome.interrupted:
        raise KeyboardInterrupt(signal.Signals[outcome.interrupted])
    return collected.rows


def _compare(
    logged: Mapping[int, Mapping[str, Any]], replayed: Mapping[int, Mapping[str, Any]]
) -> str | None:
    """Prints every logged step; says what differs first."""
    first, same = None, 0
    for step, row in logged.items():
        again = replayed.get(step, {})
        other = [key for key in row if key not in CLOCK and row[key] != again.get(key)]
        same += not other
        told = ", ".join(f"{key} {row[key]!r} is {again.get(key)!r} now" for key in other)
        print(f"step {step}: {told}" if told else f"step {step}: loss {row['loss']!r}, the same")
        if other and first is None:
            first = f"step {step} is not what was logged: {told}"
    print(f"{same} of {len(logged)} logged steps are the same, bit for bit")
    return first and (
        f"{first}; other devices, another number of them or other versions of jax give other "
        "roundings, anything else is a fault"
    )
