# SPDX-License-Identifier: Apache-2.0
"""Read training rows from local JSON Lines, JSON and Parquet files or from a dataset hub.

`read` checks every row before it returns, so a broken line 900 000 is reported before training
starts; the rows themselves stay on disk and are read again on each iteration.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from lora_tune.errors import InputError

FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
EXTENSIONS = (".jsonl", ".json", ".parquet")
ACCEPTED = "`messages` (with optional `tools`), `prompt` and `completion`, or `text`"

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped surrogate, half of a pair
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SHOWN = 5

Row = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """Rows of one format; iterating yields `(where, fields)`, `where` naming file and line."""

    source: str
    format: str
    count: int
    _open: Callable[[], Iterable[Row]]
    _columns: Mapping[str, str]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Row]:
        for where, fields in self._open():
            yield where, _renamed(fields, self._columns)


def read(
    path: str,
    *,
    split: str = "train",
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    max_samples: int | None = None,
) -> Rows:
    """Open a data set.

    `path` is a file or a glob ending in .jsonl, .json or .parquet, or else a hub id
    (`owner/name`) for which `split` and `subset` apply. `columns` maps our column names to those
    of the file. `format` is a key of `FORMATS`, or "auto" to let it follow from the columns of the
    first row, in the order of `FORMATS`; every row must have the columns of the format. Only the
    first `max_samples` rows count, if given.

    Raises InputError for a missing, empty, broken or unreadable file and for unknown columns.
    """
    if format != "auto" and format not in FORMATS:
        raise InputError(f"data format {format!r} is unknown: use auto or {', '.join(FORMATS)}")
    if max_samples is not None and max_samples < 1:
        raise InputError(f"data.max_samples must be at least 1 or null, got {max_samples}")
    files = _local_files(path)
    opened = _open_hub(path, split, subset) if files is None else _open_files(files)
    return _checked(
        path,
        lambda: islice(opened(), max_samples),
        columns=columns or {},
        format=None if format == "auto" else format,
    )


def _local_files(path: str) -> list[Path] | None:
    """The files `path` names, or None when it must be a hub id."""
    found = Path(path).expanduser()
    if any(c in path for c in "*?["):
        files = sorted(p for p in map(Path, glob(str(found), recursive=True)) if p.is_file())
        if not files:
            raise InputError(f"no file matches the data path {path!r}: check the pattern")
        return [_known(p) for p in files]
    if found.is_dir():
        raise InputError(
            f"the data path {path!r} is a folder: name its files, as in {path}/*.jsonl"
        )
    if found.exists():
        return [_known(found)]
    if found.suffix.lower() in EXTENSIONS or not _HUB_ID.fullmatch(path):
        raise InputError(f"the data file {path!r} does not exist (looked for {found.absolute()})")
    return None


def _known(path: Path) -> Path:
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(
            f"the data file {str(path)!r} ends in {path.suffix!r}: expected one of "
            f"{', '.join(EXTENSIONS)}"
        )
    return path


def _checked(
    source: str,
    opened: Callable[[], Iterable[Row]],
    *,
    columns: Mapping[str, str],
    format: str | None,
) -> Rows:
    """One pass over every row: choose the format, count, and collect what is wrong."""
    count, problems, unseen = 0, _Problems(source), set(columns.values())
    for where, raw in opened():
        count += 1
        unseen -= raw.keys()
        fields = _renamed(raw, columns)
        if isinstance(fields.get(_BROKEN), str):
            problems.add(fields[_BROKEN])
            continue
        format = format or _detect(where, fields)
        missing = [c for c in FORMATS[format] if fields.get(c) is None]
        if missing:
            problems.add(f"{where}: column {_names(missing)} is missing or null, {_found(fields)}")
    problems.raise_if_any()
    if unseen:
        raise InputError(
            f"data.columns names {_names(sorted(unseen))}, which no row of {source!r} has: correct "
            "the name or remove it"
        )
    if count == 0 or format is None:
        raise InputError(f"the data set {source!r} has no rows")
    return Rows(source, format, count, opened, columns)


def _detect(where: str, fields: Mapping[str, Any]) -> str:
    for name, needed in FORMATS.items():
        if all(fields.get(column) is not None for column in needed):
            return name
    raise InputError(f"{where}: unknown columns, {_found(fields)}, expected {ACCEPTED}")


def _renamed(fields: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    if not columns:
        return fields
    kept = {k: v for k, v in fields.items() if k not in columns and k not in columns.values()}
    return kept | {ours: fields[theirs] for ours, theirs in columns.items() if theirs in fields}


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f"`{c}`" for c in columns)


def _found(fields: Mapping[str, Any]) -> str:
    return f"found {_names(sorted(fields)) or 'no columns'}"


class _Problems:
    """Collects messages, shows the first few and raises once."""

    def __init__(self, source: str) -> None:
        self.source, self.count, self.shown = source, 0, []

    def add(self, message: str) -> None:
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(message)

    def raise_if_any(self) -> None:
        if self.count == 1:
            raise InputError(self.shown[0])
        if self.count:
            head = f"{self.count} rows of {self.source!r} cannot be read"
            more = "" if self.count <= _SHOWN else f"; and {self.count - _SHOWN} more"
            raise InputError(f"{head}: {'; '.join(self.shown)}{more}")


# A row that could not be parsed travels as {_BROKEN: message}, so that one pass finds them all.
_BROKEN = "\0broken"


def _open_files(files: list[Path]) -> Callable[[], Iterable[Row]]:
    readers = {".jsonl": _json_lines, ".json": _json_file, ".parquet": _parquet}

    def opened() -> Iterator[Row]:
        for path in files:
            empty = True
            for row in readers[path.suffix.lower()](path):
                empty = False
                yield row
            if empty:
                raise InputError(f"the data file {str(path)!r} is empty: it has no rows")

    return opened


def _json_lines(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield _json_row(f"{path}:{number}", line)
    except OSError as error:
        raise InputError(f"the data file {str(path)!r} cannot be read: {error}") from error


def _json_row(where: str, line: bytes) -> Row:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return where, {_BROKEN: f"{where}: not UTF-8 text at byte {error.start} of the line"}
    except json.JSONDecodeError as error:
        return where, {_BROKEN: f"{where}: broken JSON at column {error.colno} ({error.msg})"}
    except ValueError:
        return where, {_BROKEN: f"{where}: a JSON number has too many digits"}
    except RecursionError:
        return where, {_BROKEN: f"{where}: JSON nested too deeply"}
    return _json_object(where, value, may_hold_halves=bool(_HALF.search(line)))


def _json_object(where: str, value: Any, *, may_hold_halves: bool) -> Row:
    if may_hold_halves and not _is_text(value):
        return where, {_BROKEN: f"{where}: a \\u escape is half of a surrogate pair, no text"}
    if isinstance(value, dict):
        return where, value
    kind = type(value).__name__
    return where, {_BROKEN: f"{where}: expected a JSON object with {ACCEPTED}, got a {kind}"}


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_file(path: Path) -> Iterator[Row]:
    """A .json file is one array of objects or, as often met, JSON Lines."""
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start != b"[":
        yield from _json_lines(path)
        return
    try:
        raw = path.read_bytes()
        values = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"the data file {str(path)!r} is broken JSON: {error}") from error
    may_hold_halves = bool(_HALF.search(raw))
    for number, value in enumerate(values):
        yield _json_object(f"{path}[{number}]", value, may_hold_halves=may_hold_halves)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    yield f"{path} row {number}", without_none(fields)
                    number += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"the data file {str(path)!r} is not readable Parquet: {error}") from error


def _open_hub(path: str, split: str, subset: str | None) -> Callable[[], Iterable[Row]]:
    import datasets

    try:
        loaded = datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the data path {path!r} is neither a local file nor a data set that the hub gives "
            f"with split {split!r} and subset {subset!r}: {' '.join(str(error).split())}"
        ) from error

    def opened() -> Iterator[Row]:
        for number, fields in enumerate(loaded):
            yield f"{path}[{split}] row {number}", without_none(dict(fields))

    return opened


def without_none(value: Any) -> Any:
    """Remove keys whose value is None, at every depth.

    Arrow gives all rows of a struct column the union of their keys and fills the gaps with None,
    so that a tool call would carry the arguments of every other tool.
    """
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_none(v) for v in value]
    return value
