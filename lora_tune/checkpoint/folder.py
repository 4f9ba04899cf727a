# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run folder: when they are written, which are kept, which is read."""

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from lora_tune.checkpoint import files
from lora_tune.checkpoint.files import Damaged, Meta, Restored
from lora_tune.distributed import any_of, from_first, is_first, is_left_alone
from lora_tune.errors import InputError
from lora_tune.training.best import Best, is_better

_LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|removed)$")
_OS_REASON = re.compile(
    "No space left on device|File too large|Disk quota exceeded|Permission denied|"
    "Read-only file system|Input/output error"
)


class Checkpoints:
    """The checkpoints of one run folder.

    Opening the folder removes what a killed save or a killed removal left there. A checkpoint is
    written while training goes on; leaving the object as a context waits for the last one.

    Args:
      folder: `RUN/checkpoints`; made if it does not exist.
      keep: how many of the newest to keep. The one with the best evaluation is kept besides.
      every: save after every so many steps; 0 saves only where the caller asks.
      fingerprint: plain JSON values that a continued run must share with the checkpoint.
      metric: the figure by which an evaluation is the best.
      warn: receives one sentence whenever a checkpoint has to be passed over.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int,
        every: int,
        fingerprint: Mapping[str, Any] | None = None,
        metric: str = "eval_loss",
        warn: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1 or every < 0:
            raise InputError(
                f"section save needs keep >= 1 and every >= 0, got keep = {keep}, every = {every}"
            )
        self.folder = Path(folder).absolute()
        self.every = every
        self._keep, self._metric = keep, metric
        self._fingerprint = files.plain(fingerprint or {})
        self._warn = warn or _to_stderr
        self._pending: tuple[Path, Any] | None = None
        self._open()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception) and not is_left_alone(error):
            try:
                self.wait()
            except InputError as late:  # what was raised first is what went wrong
                self._warn(f"warning: {late}")

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return self.every > 0 and step % self.every == 0

    def steps(self) -> list[int]:
        """The steps of all checkpoints in the folder, ascending."""
        return steps_in(self.folder)

    def latest(self) -> int | None:
        """The newest step, or None in a new run."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        state: tuple[Any, Any],
        *,
        position: Mapping[str, Any],
        counts: Mapping[str, int] | None = None,
        evaluation: Mapping[str, float] | None = None,
        best: Best | None = None,
    ) -> Path:
        """Begins to write (trainable, opt_state) after `step`; returns the checkpoint's folder.

        Waits for the checkpoint before, and until this state may be donated. The folder is there,
        whole, after `wait`.

        Raises:
          InputError: if the disk does not take it, or did not take the one before; earlier
            checkpoints are untouched.
        """
        self.wait()
        path = self.folder / str(step)
        meta = Meta(
            step,
            dict(position),
            dict(counts or {}),
            self._fingerprint,
            dict(evaluation or {}),
            None if best is None else asdict(best),
        )
        try:
            self._pending = path, files.start_writing(path, state, meta)
        except Exception as error:
            self._refused(path, error)
        return path

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is whole, and removes old ones.

        Raises:
          InputError: if the disk did not take it; earlier checkpoints are untouched.
        """
        if self._pending is None:
            return
        path, writer = self._pending
        self._pending = None
        try:
            with contextlib.closing(writer):
                writer.wait_until_finished()
        except Exception as error:
            self._refused(path, error)
        try:
            self._prune()
        except (OSError, InputError) as error:
            self._warn(f"warning: old checkpoints could not be removed: {error}")

    def restore(self, abstract: tuple[Any, Any]) -> Restored | None:
        """Reads the newest valid checkpoint, or returns None if the folder holds none.

        A damaged checkpoint is reported, renamed to `STEP.corrupt` and passed over.

        Args:
          abstract: as for `lora_tune.checkpoint.files.read`.

        Raises:
          InputError: if the checkpoint belongs to another run (fingerprint, or other adapters), or
            if all checkpoints are damaged.
        """
        found = from_first(self.steps())
        for step in reversed(found):
            path = self.folder / str(step)
            try:
                restored, problem = files.read(path, abstract, self._fingerprint), None
            except Damaged as error:
                restored, problem = None, error
            if not any_of(problem is not None):
                return restored
            self._set_aside(path, problem or Damaged("another process cannot read it"))
        if found:
            raise InputError(
                f"no checkpoint in {self.folder} can be read (steps {found}, now named "
                "STEP.corrupt); remove that folder to start from the beginning"
            )
        return None

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise InputError(
                f"the checkpoint folder {self.folder} cannot be used: {files.first_line(error)}; "
                "set another output_dir"
            ) from error

    def _refused(self, path: Path, error: Exception) -> None:
        """Raises what the user needs to know of a checkpoint that could not be written."""
        reason = _refusal(error)
        if reason is None:
            raise error
        self._sweep()
        raise InputError(
            f"the checkpoint of step {path.name} could not be written to {path}: {reason}; "
            "free space there or set another output_dir, then run the same command again"
        ) from error

    def _sweep(self) -> None:
        if not is_first():
            return
        for path in self.folder.iterdir():
            if _LEFTOVER.match(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self) -> None:
        if not is_first():
            return
        steps = self.steps()
        old = steps[: -self._keep]
        best = _best(self.folder, self._metric) if old else None
        for step in old:
            if step != best:
                # A removal cut short must not leave half a checkpoint under its name.
                doomed = (self.folder / str(step)).rename(self.folder / f"{step}.removed")
                shutil.rmtree(doomed)

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_name(f"{path.name}.corrupt")
        self._warn(
            f"warning: checkpoint {path} is damaged ({error}); it is passed over and "
            f"renamed to {aside.name}"
        )
        if is_first():
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints of a folder, ascending; none where there is no such folder."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def read_one(
    path: Path, abstract: tuple[Any, Any], fingerprint: Mapping[str, Any] | None = None
) -> Restored:
    """Reads the checkpoint that was asked for; nothing on disk is changed.

    Args:
      path: its folder.
      abstract: as for `lora_tune.checkpoint.files.read`.
      fingerprint: as for `Checkpoints`.

    Raises:
      InputError: it is damaged, or belongs to another run.
    """
    try:
        return files.read(path, abstract, files.plain(fingerprint or {}))
    except Damaged as error:
        raise InputError(f"checkpoint {path} is damaged ({error}); name another one") from error


def read_trained(
    folder: Path | str, abstract: Any, *, metric: str | None = None
) -> tuple[int, Any] | None:
    """Reads what was trained from one checkpoint, and changes nothing on disk.

    Args:
      folder: `RUN/checkpoints`.
      abstract: the trained weights, as for `lora_tune.checkpoint.files.read`.
      metric: the figure by which the best checkpoint is taken; None takes the newest, as where
        none has been evaluated.

    Returns:
      The step and the weights, None where there is no checkpoint.

    Raises:
      InputError: the checkpoint is damaged or has other weights.
    """
    folder = Path(folder).absolute()
    steps = steps_in(folder)
    if not steps:
        return None
    best = None if metric is None else _best(folder, metric)
    step = steps[-1] if best is None else best
    path = folder / str(step)
    try:
        return step, files.read_trained(path, abstract)
    except Damaged as error:
        raise InputError(
            f"checkpoint {path} is damaged ({error}); give the command that trained "
            "again, which goes on from the one before"
        ) from error


def _best(folder: Path, metric: str) -> int | None:
    """The step of the checkpoint with the best evaluation, the first of equal ones, if any."""
    found: tuple[int, float] | None = None
    for step in steps_in(folder):
        value = _evaluation(folder / str(step)).get(metric)
        if value is not None and (found is None or is_better(metric, value, found[1])):
            found = step, value
    return None if found is None else found[0]


def _evaluation(path: Path) -> Mapping[str, float]:
    try:
        return files.read_meta(path).evaluation
    except Damaged:  # since it was written: not a candidate for the best one
        return {}


def _refusal(error: Exception) -> str | None:
    """Why the operating system did not take a file; tensorstore hides that in a long ValueError."""
    found = _OS_REASON.search(str(error))
    if found:
        return found[0]
    return files.first_line(error) if isinstance(error, OSError) else None


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
