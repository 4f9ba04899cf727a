# SPDX-License-Identifier: Apache-2.0
"""What must be known of machine and process, also where jax is not imported."""

import errno
import importlib.metadata
import os
from importlib.util import find_spec
from pathlib import Path

COMPILER = "lora-tune-compiler"
"""Name of the thread that compiles while the main one waits for signals."""
_CHIPS = ("accel[0-9]*", "vfio/[0-9]*")
"""How the devices of TPUs are called: those up to v4, and later ones."""


def user_cache() -> Path:
    """`lora_tune` in `XDG_CACHE_HOME`, which only counts where it is absolute, or in `~/.cache`.

    Raises:
      FileNotFoundError: the user has no home folder.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "lora_tune"
    except RuntimeError as error:
        reason = "the user has no home folder, and XDG_CACHE_HOME is not set"
        raise FileNotFoundError(errno.ENOENT, reason) from error


def cores(*, groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use, by affinity and, in a container, by its share of time."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    try:
        quota, period = (groups / "cpu.max").read_text().split()
        return max(1, min(allowed, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return allowed


def leave_out_libtpu(*, devices: Path = Path("/dev")) -> None:
    """Keeps jax from starting libtpu where there is none of its chips.

    jax would try, and libtpu then warns of what it does not find and writes the stacks of all
    threads on SIGTERM. Nothing changes where jax was told what to use (`JAX_PLATFORMS`), or where
    it may find other devices than the CPU.
    """
    told = any(os.environ.get(name) for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT"))
    chips = any(any(devices.glob(pattern)) for pattern in _CHIPS)
    if told or chips or find_spec("libtpu") is None:
        return
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if not plugins and find_spec("jax_plugins") is None:
        os.environ["JAX_PLATFORMS"] = "cpu"
