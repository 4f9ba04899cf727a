# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, kept in a folder of the user from one command to the next.

jax does the keeping; here are the place, the size, and what makes the folder safe to share:

* Programs for a CPU are made of the instructions of that CPU, and home folders travel. Each kind of
  machine has a folder of its own.
* A process that dies while it writes leaves half a program, which jax would fail to read in every
  later run. jax writes a time stamp behind each entry; an entry without one is removed.
* jax locks the folder while it reads, writes or evicts, so that several processes can share it.

jax's own variables still decide: `JAX_COMPILATION_CACHE_DIR` names another folder, which is then
used as it is, and `JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing.
"""

import hashlib
import platform
import sys
from pathlib import Path

import filelock
import jax

from lora_tune import machine

_BYTES = 2 * 1024**3
"""Room for the programs of a kind of machine; those not used for longest make place."""
_WORTH = 0.1
"""Seconds that a program must take to compile to be kept."""


def keep() -> None:
    """Turns the cache on; what stands in the way becomes a note, and nothing is kept then."""
    config = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    folder: Path | str = "a folder for them"
    try:
        folder = machine.user_cache() / "compiled" / _machine()
        folder.mkdir(parents=True, exist_ok=True)
        _remove_halves(folder)
    except (OSError, filelock.Timeout) as error:
        print(
            f"lora-tune: note: compiled programs are not kept, since {folder} cannot be used "
            f"({error}); set JAX_COMPILATION_CACHE_DIR to another folder, or "
            "JAX_ENABLE_COMPILATION_CACHE=false",
            file=sys.stderr,
        )
        return
    config.update("jax_compilation_cache_max_size", _BYTES)
    config.update("jax_persistent_cache_min_compile_time_secs", _WORTH)
    config.update("jax_compilation_cache_dir", str(folder))


def _machine() -> str:
    """A name for machines that can run each other's programs."""
    parts = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux: the processor's name has to do
        lines = []
    # What the processor can do, in the words of x86 and of Arm.
    parts += sorted({line for line in lines if line.lower().startswith(("flags", "features"))})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _remove_halves(folder: Path) -> None:
    with filelock.FileLock(folder / ".lockfile", timeout=10):
        for entry in folder.glob("*-cache"):
            if not entry.with_name(f"{entry.name.removesuffix('-cache')}-atime").exists():
                entry.unlink()
