# SPDX-License-Identifier: Apache-2.0
"""How fast a run goes and what it holds: figures of the machine, beside those of training."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Gauges:
    """What a row says of the machine.

    Attributes:
      devices: those that train.
      flops_per_token: operations of the model in training, see `lora_tune.plan.model_flops`.
      peak_flops: of one device, a second, as published for dense bfloat16; None where it is not
        known, as of CPUs.
    """

    devices: Sequence[Any] = ()
    flops_per_token: float | None = None
    peak_flops: float | None = None

    def read(self, *, tokens: int, seconds: float, waited: float) -> dict[str, float | int | None]:
        """The figures of a stretch of training.

        `mfu` is the model's operations over what the devices could do at their peak in that time
        (Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B), None without both figures.

        Args:
          tokens: of the stretch, over all devices.
          seconds: that it took.
          waited: seconds of these in which the devices had nothing to do but wait for a batch.
        """
        speed = tokens / seconds / max(len(self.devices), 1)
        known = self.flops_per_token is not None and self.peak_flops is not None
        return {
            "tokens_per_second_per_device": speed,
            "mfu": speed * self.flops_per_token / self.peak_flops if known else None,  # pyright: ignore
            "input_bound_fraction": min(waited / seconds, 1.0),
            "device_peak_bytes": _most(self.devices),
            "host_rss_bytes": _resident(),
        }


def _most(devices: Iterable[Any]) -> int | None:
    """The most that a device of this host has held since the start, None where none tells."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in local]
    return max((peak for peak in peaks if peak is not None), default=None)


def _resident() -> int | None:
    """Bytes of the machine's memory that this process holds, None where the system has no /proc."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
