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

from lora_tune.checkpoint import choice, files
from lora_tune.checkpoint.choice import Chosen, steps_in
from lora_tune.checkpoint.files import Damaged, Meta, Restored
from lora_tune.distributed import any_of, from_first, is_first, is_left_alone, together
from lora_tune.errors import InputError
from lora_tune.training.best import Best

_LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|removed)$")
_OS_REASON = re.compile(
    "No space left on device|File too large|Disk quota exceeded|Permission denied|"
    "Read-only file system|Input/output error"
)


class Checkpoints:
    """The checkpoints of one run folder.

    Opening the folder removes what a killed save or a killed removal left there; the first save
    makes it. A checkpoint is written while training goes on; leaving the object as a context waits
    for the last one.

    Args:
      folder: `RUN/checkpoints`.
      keep: how many of the newest to keep. The one with the best evaluation is kept besides.
      every: save after every so many steps; 0 saves only where the caller asks.
      fingerprint: plain JSON values that a continued run must share with the checkpoint.
      metric: the figure by which an evaluation is the best.
      measured: what evaluations are made on, as of `choice.measured_on`.
      total_steps: of the whole run.
      warn: receives one sentence whenever a checkpoint has to be passed over.
    """

    stopping = "finishing this step, then saving"

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int,
        every: int,
        fingerprint: Mapping[str, Any] | None = None,
        metric: str = "eval_loss",
        measured: Mapping[str, Any] | None = None,
        total_steps: int = 0,
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
        self._measured = files.plain(measured or {})
        self._total_steps, self._since = total_steps, 0
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
            self._measured,
            self._total_steps,
            self._since,
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._pending = path, files.start_writing(path, state, meta)
        except Exception as error:
            self._refused(path, error)
        return path

    def add_evaluation(self, step: int, evaluation: Mapping[str, float], best: Best | None) -> None:
        """Adds to the checkpoint of a step, once it is whole, what was evaluated after it."""
        self.wait()
        if not is_first() or not evaluation:
            return
        path, record = self.folder / str(step), None if best is None else asdict(best)
        try:
            files.change_meta(path, evaluation=dict(evaluation), best=record)
        except (OSError, InputError, Damaged) as error:
            self._warn(f"warning: the evaluation of {path} could not be added to it: {error}")

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
                assert restored is not None  # for nobody has a problem
                self._since = changed_since(restored.meta, self._total_steps)
                return restored
            self._set_aside(path, problem or Damaged("another process cannot read it"))
        if found:
            raise InputError(
                f"no checkpoint in {self.folder} can be read (steps {found}, now named "
                "STEP.corrupt); set another output_dir to start from the beginning"
            )
        return None

    def best_value(self) -> float | None:
        """The best evaluation of all checkpoints here, on what evaluations are now made on."""
        with together("read the checkpoints"):
            found = choice.ranked(self.folder, self._metric, measured=self._measured)
        return from_first(found[0][1] if found else None)

    def read_best(self, abstract: Any) -> Chosen:
        """What was trained, of the best checkpoint; a damaged one is renamed to `STEP.corrupt`.

        Raises:
          InputError: as `choice.read_trained`.
        """
        found = choice.read_trained(
            self.folder, abstract, metric=self._metric, damaged=self._set_aside
        )
        assert found is not None  # the end of every run is saved
        return found

    def _open(self) -> None:
        try:
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
        if not is_first() or not self.folder.exists():
            return
        for path in self.folder.iterdir():
            if _LEFTOVER.match(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self) -> None:
        if not is_first():
            return
        steps = self.steps()
        old = steps[: -self._keep]
        best = [step for step, _ in choice.ranked(self.folder, self._metric)[:1]] if old else []
        for step in old:
            if step not in best:
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


def changed_since(meta: Meta, total_steps: int) -> int:
    """The step from which on a run, at this checkpoint, has had so many steps in all."""
    return meta.since if meta.total_steps == total_steps else meta.step


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


def _refusal(error: Exception) -> str | None:
    """Why the operating system did not take a file; tensorstore hides that in a long ValueError."""
    found = _OS_REASON.search(str(error))
    if found:
        return found[0]
    return files.first_line(error) if isinstance(error, OSError) else None


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
