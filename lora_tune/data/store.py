# SPDX-License-Identifier: Apache-2.0
"""Encoded examples, kept in a folder from one run to the next.

An entry is a folder, named by the key of all that it follows from: the arrays of a `Part` as
`NAME.bin` and `entry.json`, which has the report and a hash of the arrays. It is written beside and
renamed, so that it is whole or not there, whoever else writes the same; a lock only saves them the
work. All of it is hashed again
whenever it is read; one that is damaged is removed. Those not used for longest make room for new
ones. Nothing in it is code or becomes code.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from lora_tune.data import flat
from lora_tune.data.examples import ARRAYS, DataReport, Examples, Part

_BYTES = 20 * 1024**3
"""Room for all entries of a folder."""
_ABANDONED = 24 * 3600
"""Seconds after which half an entry belongs to a run that has died."""
_ENTRY, _PARTIAL = "entry.json", ".partial"


class Store:
    """A folder of entries. What stands in the way of using it becomes a note on stderr."""

    def __init__(self, folder: Path, *, room: int = _BYTES) -> None:
        self.folder, self._room = folder, room

    def load(self, key: str) -> Examples | None:
        """The examples under a key, or None."""
        entry = self.folder / key
        try:
            if not os.path.isdir(entry):
                return None
            found = _read(entry)
            with contextlib.suppress(OSError):  # on a disk that can only be read
                os.utime(entry / _ENTRY)
            return found
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError) as error:
            if entry.is_dir():  # else another run has just removed it
                _note(f"tokenised rows in {entry} are damaged ({error}) and are made anew")
                self._remove(entry)
        except OSError as error:
            _note(f"tokenised rows in {entry} cannot be read ({error}) and are made anew")
        return None

    def get(
        self, key: str, make: Callable[[Path | None], Examples], *, unchanged: Callable[[], bool]
    ) -> Examples:
        """What is kept under a key, or else what `make` makes in the folder that it is given.

        That is kept if its data is still `unchanged` then. Where the folder of the store cannot be
        used, `make` is called with None. Of several runs that want the same at once, also on other
        hosts that share the folder, one makes it.
        """
        found = self.load(key)
        if found is not None:
            return found
        with self._alone(key):
            found = self.load(key)
            return self._made(key, make, unchanged) if found is None else found

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Waits while another run makes the same."""
        lock = filelock.FileLock(self.folder / f"{key[:16]}.lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                _note("waiting for another run that tokenises the same rows")
                lock.acquire(poll_interval=0.2)
        except (OSError, NotImplementedError):  # no locks there: then each makes its own
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(lock.lock_file)
            lock.release()

    def _made(
        self, key: str, make: Callable[[Path | None], Examples], unchanged: Callable[[], bool]
    ) -> Examples:
        partial = self._begin(key)
        if partial is None:
            return make(None)
        try:
            try:
                examples = make(partial)
            except flat.UnwritableError as error:
                _note(f"{_not_kept(self.folder)} ({error})")
                return make(None)
            if unchanged():
                self._keep(partial, self.folder / key, examples)
            return examples
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _begin(self, key: str) -> Path | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f"{key[:16]}.", suffix=_PARTIAL, dir=self.folder))
        except OSError as error:
            _note(f"{_not_kept(self.folder)} ({error})")
            return None

    def _keep(self, partial: Path, entry: Path, examples: Examples) -> None:
        try:
            [part] = examples.parts
            written = {
                "report": dataclasses.asdict(part.report),
                "tokens": int(part.lengths.sum()),
                "examples": len(part.lengths),
                "hash": examples.fingerprint,
                "numbers": _numbers(part),
            }
            (partial / _ENTRY).write_text(json.dumps(written, indent=1), encoding="utf-8")
            try:
                os.rename(partial, entry)
            except OSError:
                if not entry.is_dir():  # else another run has been faster
                    raise
        except OSError as error:
            _note(f"{_not_kept(self.folder)} ({error})")
            return
        with contextlib.suppress(OSError):  # of a folder that cannot be listed just now
            self._make_room(entry)

    def _make_room(self, newest: Path) -> None:
        """Removes entries, those not used for longest first, and what runs that died have left."""
        entries, total = [], 0
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another run removes them too
                if path.name.endswith(_PARTIAL):
                    if time.time() - _last_written(path) > _ABANDONED:
                        self._remove(path)
                elif (path / _ENTRY).is_file():
                    size = sum(file.stat().st_size for file in path.iterdir())
                    entries.append(((path / _ENTRY).stat().st_mtime, size, path))
                    total += size
        for _, size, path in sorted(entries):
            if total <= self._room:
                return
            if path != newest:
                self._remove(path)
                total -= size

    def _remove(self, path: Path) -> None:
        """Takes a folder out of the way at once, then removes it."""
        aside = path.with_name(f"{path.name[:16]}.{uuid.uuid4().hex[:12]}{_PARTIAL}")
        with contextlib.suppress(OSError):
            os.rename(path, aside)
            shutil.rmtree(aside, ignore_errors=True)


def _last_written(folder: Path) -> float:
    """When it or a file in it was last written to."""
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


def _read(entry: Path) -> Examples:
    said = json.loads((entry / _ENTRY).read_bytes())
    arrays = {}
    for name, dtype in ARRAYS.items():
        with (entry / f"{name}.bin").open("rb") as file:
            arrays[name] = flat.read(file, dtype)
    counts = {len(arrays[name]) for name in ("lengths", "rows", "targets")}
    if counts != {said["examples"]} or int(arrays["lengths"].sum()) != said["tokens"]:
        raise ValueError("an array has another size")
    if {len(arrays["tokens"]), len(arrays["mask"])} != {said["tokens"]}:
        raise ValueError("an array has another size")
    report = DataReport(**said["report"])
    report = dataclasses.replace(report, bad_rows=tuple(report.bad_rows))
    part = Part(**arrays, report=report)
    examples = Examples((part,))
    if (examples.fingerprint, _numbers(part)) != (said["hash"], said["numbers"]):
        raise ValueError("the content is not what was written")
    return examples


def _numbers(part: Part) -> str:
    """A hash of what the fingerprint of examples leaves out, the report included."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (part.rows, part.targets):
        for piece in flat.pieces(array):
            digest.update(piece.data)
    digest.update(json.dumps(dataclasses.asdict(part.report), sort_keys=True).encode())
    return digest.hexdigest()


def _not_kept(folder: Path) -> str:
    return (
        f"tokenised rows are not kept, since {folder} cannot be used; set data.cache to another "
        "folder, or to false"
    )


def _note(said: str) -> None:
    print(f"lora-tune: note: {said}", file=sys.stderr)
