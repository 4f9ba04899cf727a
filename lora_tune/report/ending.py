# SPDX-License-Identifier: Apache-2.0
"""What a run leaves of itself in any case: how it ended, and the report."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lora_tune.errors import InputError
from lora_tune.hf.folder import writable_output
from lora_tune.report.folder import write_report, write_summary
from lora_tune.secrets import masked
from lora_tune.training.metrics import MetricsLog
from lora_tune.training.tripwires import TripwireError


@dataclasses.dataclass
class End:
    """How a run ended that no error ended: its last step, and the signal that asked for it.

    `said` is what there is to say of a run that is finished.
    """

    step: int = 0
    interrupted: str | None = None
    said: str = ""


@contextlib.contextmanager
def reported(run_dir: Path, summary: Mapping[str, Any], metrics: MetricsLog) -> Iterator[End]:
    """Around a run: writes `summary.json` and, however the run ends, `report.html`.

    Args:
      run_dir: the run folder, with the recipe in it.
      summary: what the report says besides the log: `total_steps`, `parameters`, `data` and
        `environment`.
      metrics: the log of the run.

    Raises:
      InputError: the folder cannot be written to.
    """

    def write(how: str, step: int, said: str) -> Path:
        ended = {"how": how, "step": step, "said": masked(said)}
        write_summary(run_dir, {**summary, "ended": ended})
        return write_report(run_dir)

    with writable_output(run_dir):
        write_summary(run_dir, {**summary, "ended": None})
    end = End()
    try:
        yield end
    except BaseException as error:
        how, said = _told(error)
        # Where this fails as well, the first error is the one to hear of.
        with contextlib.suppress(OSError, InputError):
            write(how, max((row["step"] for row in metrics.rows()), default=0), said[:2000])
        raise
    with writable_output(run_dir):
        how = "finished" if end.interrupted is None else "interrupted"
        path = write(how, end.step, end.interrupted or end.said)
    metrics.note(f"wrote {path}")


def _told(error: BaseException) -> tuple[str, str]:
    """How a run ended that an error ended, and what the error says."""
    if isinstance(error, KeyboardInterrupt):  # with the signal's number, or Python's own for SIGINT
        number = next((n for n in error.args if n in list(signal.Signals)), signal.SIGINT)
        return "interrupted", signal.Signals(number).name
    said = " ".join(str(error).split()) or type(error).__name__
    return "tripwire" if isinstance(error, TripwireError) else "failed", said


def environment(mesh: Mesh | None) -> dict[str, str]:
    """The devices of a run, in words."""
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
    axes = {} if mesh is None else {name: size for name, size in mesh.shape.items() if size > 1}
    return {
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "mesh": ", ".join(f"{name} {size}" for name, size in axes.items()) or "one device",
    }
