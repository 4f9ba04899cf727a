# SPDX-License-Identifier: Apache-2.0
"""A run folder is used by one process at a time."""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lora_tune.errors import InputError

NAME = ".in_use"
"""The file that a run holds locked. The system lets go of it when the process ends, however."""


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keeps a run folder, made if it does not exist, for this process alone.

    A file system without locks is no reason not to train: a note says so.

    Raises:
      InputError: another process has it, or it cannot be made.
    """
    path = run_dir / NAME
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = _take(path)
    except BlockingIOError:
        raise InputError(
            f"output_dir {run_dir} is in use by {_holder(path)}; wait for it, stop it, or set "
            "another output_dir"
        ) from None
    except OSError as error:
        raise InputError(
            f"output_dir {run_dir} cannot be written ({error.strerror or error}); "
            "free space there or set another output_dir"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
            run_dir.rmdir()  # only where nothing was written
        file.close()


def _take(path: Path) -> BinaryIO:
    """The file, open and locked."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError as error:
            print(
                f"lora-tune: note: {path.parent} has no file locks ({error.strerror}), so two runs "
                "in it would not notice each other",
                file=sys.stderr,
            )
        if _is_still(path, file):
            break
        file.close()  # its holder removed it between the two calls
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"process": os.getpid(), "host": socket.gethostname(), "since": started}
    file.truncate(0)
    file.write(json.dumps(holder).encode())
    file.flush()
    return file


def _is_still(path: Path, file: BinaryIO) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        known = json.loads(path.read_bytes())
        return f"process {known['process']} on {known['host']} since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
