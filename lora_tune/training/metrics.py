# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a run go: `metrics.jsonl` first, then the terminal and others.

One JSON object a line. Lines of a training step carry `loss`, lines of an evaluation `eval_loss`,
lines of sample answers `samples`; `step` in each is the number of finished optimizer steps. A
column of one of several sources ends in `/SOURCE`; one of a held-out set is `eval_SET_…`.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lora_tune.errors import InputError
from lora_tune.hf.folder import replace_file
from lora_tune.secrets import masked, masked_in

Row = Mapping[str, Any]
CLOCK = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "seconds_per_step",
    "compile_seconds",
    "mfu",
    "input_bound_fraction",
    "device_peak_bytes",
    "host_rss_bytes",
)
"""Columns that the machine decides, not the recipe: the same run again has others."""


def columns_of(figure: str, keys: Iterable[str]) -> dict[str, str]:
    """The columns that hold a figure of a part of the data.

    Args:
      figure: its column for all data, as `loss` or `eval_loss`.
      keys: of a row.

    Returns:
      Column -> what it is of: an evaluation's set, a source, or `SET/SOURCE`.
    """
    prefix, kind = ("eval_", figure[5:]) if figure.startswith("eval_") else ("", figure)
    # No set's name ends in token, which makes a figure of another kind.
    a_set = "(?:([^/]+)(?<!token)_)?" if prefix else "()"
    pattern = re.compile(f"{prefix}{a_set}{re.escape(kind)}(?:/(.+))?", re.DOTALL)
    found = {key: pattern.fullmatch(key) for key in keys}
    named = {key: "/".join(filter(None, match.groups())) for key, match in found.items() if match}
    return {key: name for key, name in named.items() if name}


class Writer(Protocol):
    """Something that shows rows as they come."""

    def write(self, row: Row) -> None:
        """Shows one row."""
        ...

    def note(self, sentence: str) -> None:
        """Shows one sentence."""
        ...

    def close(self) -> None:
        """Ends the display."""
        ...


class MetricsLog:
    """The file `metrics.jsonl` of a run folder, and the writers that repeat it.

    A row is on disk before `write` returns. Numbers that JSON cannot hold (NaN, infinities) are
    written as null.

    Args:
      run_dir: the run folder; made if it does not exist.
      resume_step: the step of the checkpoint that the run goes on from. Rows of later steps, and a
        last line that a kill cut short, are removed, for the run will write them again. None starts
        a new file.
      writers: each row and note goes to these as well.

    Raises:
      InputError: if the file cannot be written, or a line before the last is not JSON.
    """

    def __init__(
        self, run_dir: Path | str, *, resume_step: int | None, writers: Sequence[Writer] = ()
    ) -> None:
        self.path = Path(run_dir) / "metrics.jsonl"
        self._writers = tuple(writers)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [] if resume_step is None else _rows_until(self.path, resume_step)
            replace_file(self.path, "".join(_line(row) for row in kept))
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write(self, row: Row) -> None:
        """Appends one row, flushed to disk, and passes it to the writers; secrets are masked."""
        row = masked_in(dict(row))
        whole = os.fstat(self._file.fileno()).st_size
        try:
            data = memoryview(_line(row).encode())
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), whole)
            raise _unwritable(self.path, error) from error
        for writer in self._writers:
            writer.write(row)

    def note(self, sentence: str) -> None:
        """Passes a sentence to the writers; it is not part of the file."""
        for writer in self._writers:
            writer.note(masked(sentence))

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the file, those of an earlier part of the run included."""
        return read_rows(self.path)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file and the writers."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._file.close)
            for writer in self._writers:
                closing.callback(writer.close)


class Unlogged(MetricsLog):
    """Stands for the log of a run folder in the processes that leave it to the first."""

    def __init__(self, run_dir: Path | str) -> None:
        self.path, self._writers = Path(run_dir) / "metrics.jsonl", ()

    def write(self, row: Row) -> None:
        """The first process has the same row."""

    def close(self) -> None:
        """There is nothing to close."""


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """Reads a `metrics.jsonl`; a last line that a kill cut short is left out.

    Raises:
      InputError: naming the first line before the last that is not a JSON object with a step.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    # Whatever follows the last line break was never finished.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise InputError(
                f"line {number} of {path} is not a JSON object with a step; "
                "mend or remove that line, or set another output_dir"
            ) from error
        rows.append(row)
    return rows


def lost_rows(run_dir: Path, start: int) -> str | None:
    """What to say of a log that a run does not go on with as it should, None of any other.

    Args:
      run_dir: the run folder.
      start: the step of its checkpoint that the run goes on from, 0 without one.
    """
    try:
        last = max((row["step"] for row in read_rows(run_dir / "metrics.jsonl")), default=0)
    except (InputError, OSError):
        last = None
    if start:  # where it cannot be read, opening it says so
        return f"note: metrics.jsonl has lost its rows up to step {start}" if last == 0 else None
    if last == 0:
        return None
    found = "cannot be read" if last is None else f"went up to step {last}"
    return (
        f"note: metrics.jsonl {found}, and there is no checkpoint to go on from: training begins "
        "anew, and so does the log"
    )


def _rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    return [row for row in read_rows(path) if row["step"] <= step]


def _line(row: Row) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _unwritable(path: Path, error: OSError) -> InputError:
    advice = "move it away" if isinstance(error, IsADirectoryError) else "free space there"
    return InputError(
        f"{path} cannot be written: {error.strerror or error}; "
        f"{advice} or set another output_dir, then run the same command again"
    )
