# SPDX-License-Identifier: Apache-2.0
"""Processes that encode rows: started, fed and ended here; what they do is in `worker.py`.

They are programs of their own, `python -m lora_tune.data.worker`, rather than forks: a process
with threads of jax or of a tokenizer cannot be forked safely, and what is spawned by
`multiprocessing` runs the user's script a second time. They never import jax, work at what comes
on their standard input, and end when that does, also where this process was killed.

What goes through the pipes is pickled, by these processes for each other and never on a disk.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

from lora_tune.data.files import Row
from lora_tune.data.formats import COLUMNS
from lora_tune.errors import InputError, short
from lora_tune.machine import cores

_WORTH = 16 << 20
"""Bytes of rows that take longer than a process takes to start."""
_TASK = 256 << 10
"""Bytes of rows that a process gets at a time."""
_AHEAD = 2
"""Tasks for each process that may be in work or wait to be collected."""
_ALONE = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment of a process that has one core."""


def worth(size: int) -> int:
    """How many processes are worth starting for so many bytes of rows, at most one a core."""
    return max(1, min(cores(), size // _WORTH))


def in_workers(numbered: Iterable[tuple[int, Row]], encoder: Any, count: int) -> Iterator[Any]:
    """`encode.encode_piece` of the rows, piece by piece in their order, made by `count` processes.

    Raises:
      InputError: a process died.
    """
    pool = _Pool(encoder, count)
    pending: deque[Future[Any]] = deque()
    try:
        for task in _tasks(numbered):
            pending.append(pool.submit(task))
            if len(pending) >= _AHEAD * count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.close()


def _tasks(numbered: Iterable[tuple[int, Row]]) -> Iterator[bytes]:
    """Rows, pickled one after the other, with the columns that are used."""
    rows, size = list[bytes](), 0
    for number, (where, fields) in numbered:
        used = {name: fields[name] for name in COLUMNS if name in fields}
        rows.append(pickle.dumps((number, (where, used)), pickle.HIGHEST_PROTOCOL))
        size += len(rows[-1])
        if size >= _TASK:
            yield b"".join(rows)
            rows, size = [], 0
    if rows:
        yield b"".join(rows)


class _Pool:
    """A thread for each process, which waits for it while Python goes on."""

    def __init__(self, encoder: Any, count: int) -> None:
        self._encoder = pickle.dumps(encoder, pickle.HIGHEST_PROTOCOL)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="lora-tune-data")
        self._own = threading.local()
        self._workers: list[_Worker] = []
        self._lock, self._closed = threading.Lock(), False

    def submit(self, task: bytes) -> "Future[Any]":
        return self._threads.submit(self._work, task)

    def _work(self, task: bytes) -> Any:
        if not hasattr(self._own, "worker"):
            with self._lock:
                if self._closed:
                    return None
                self._own.worker = _Worker()
                self._workers.append(self._own.worker)
            self._own.worker.send(self._encoder)
        return self._own.worker.ask(task)

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process, and what goes to and fro."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join([package, *(path for path in sys.path if path)])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lora_tune.data.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **_ALONE, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )
        except OSError as error:
            self._errors.close()
            raise InputError(
                f"a process that tokenises rows does not start ({error.strerror}); set "
                "data.num_proc to fewer, or to 1 to tokenise them here"
            ) from error

    def send(self, message: bytes) -> None:
        assert self.process.stdin is not None
        try:
            write_message(self.process.stdin, message)
        except OSError:
            raise self._dead() from None

    def ask(self, task: bytes) -> Any:
        """What the process makes of a task."""
        assert self.process.stdout is not None
        self.send(task)
        answer = read_message(self.process.stdout)
        if answer is None:
            raise self._dead()
        return pickle.loads(answer)

    def _dead(self) -> Exception:
        status = self.process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
            cause = ", as the system does when memory runs out" if -status == signal.SIGKILL else ""
        else:
            how, cause = f"ended with status {status}", f": {short(lines[-1])}" if lines else ""
        return InputError(
            f"a process that tokenises rows {how}{cause}; set data.num_proc to fewer, or to 1 to "
            "tokenise them here"
        )

    def close(self) -> None:
        for file in (self.process.stdin, self.process.stdout, self._errors):
            with contextlib.suppress(OSError):  # of what a process that is gone was still to get
                cast(IO[bytes], file).close()
        self.process.wait()


def write_message(file: IO[bytes], content: bytes) -> None:
    """Writes bytes with their length before them."""
    file.write(len(content).to_bytes(8, "little"))
    file.write(content)
    file.flush()


def read_message(file: IO[bytes]) -> bytes | None:
    """What `write_message` wrote, None at the end of the file."""
    head = file.read(8)
    size = int.from_bytes(head, "little")
    content = file.read(size) if len(head) == 8 else b""
    return content if len(head) == 8 and len(content) == size else None
