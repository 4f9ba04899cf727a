# SPDX-License-Identifier: Apache-2.0
"""Rows of local JSON Lines, JSON, CSV and Parquet files, each with the file and line it is from."""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, cast

from lora_tune.data.formats import detect
from lora_tune.errors import InputError, short

EXTENSIONS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Kinds of files; all but Parquet may be compressed, as .jsonl.gz."""
BROKEN = "\0broken"
"""Key of a row that could not be parsed: it travels as {BROKEN: message}, so that one pass finds
them all."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped surrogate, half of a pair
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+-]+):/+(?P<rest>.*)")  # slashes may be joined
_HUB_PAGE = re.compile(r"huggingface\.co/datasets/(?P<id>[^/]+/[^/?#]+)")
_BOM, _UTF16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_HEAD = 1 << 20
_FIELD = 1 << 30  # characters in a CSV field; what Python allows by default is short for a text
_ROW_KEYS = ("data", "rows", "train", "examples", "instances")

Row = tuple[str, dict[str, Any]]


def local_files(path: str | list[str]) -> list[Path] | None:
    """The files that `path` names, itself or as a pattern, or None when it must be a hub id.

    A list names files and patterns, which are read one after the other.

    Raises:
        InputError: there is no such file, or it is not of a kind that can be read.
    """
    if isinstance(path, str):
        return _files_of(path)
    found: list[Path] = []
    for each in path:
        files = _files_of(each)
        if files is None:
            raise InputError(
                f"{each!r} is no file, and a list may name files only; give data sets of the hub "
                "as data.sources"
            )
        found += files
    return found


def _files_of(path: str) -> list[Path] | None:
    found = Path(path).expanduser()
    if found.is_dir():
        raise InputError(
            f"the data path {path!r} is a folder: name its files, as in {path}/*.jsonl"
        )
    if found.exists():
        return [_known(found)]
    if url := _URL.fullmatch(path):
        page = _HUB_PAGE.match(url["rest"])
        instead = f"give the hub id {page['id']}" if page else "download it and give the file"
        raise InputError(f"the data path {path!r} is an address on the net: {instead}")
    if any(c in path for c in "*?["):
        files = sorted(p for p in map(Path, glob(str(found), recursive=True)) if p.is_file())
        if not files:
            raise InputError(f"no file matches the data path {path!r}: check the pattern")
        return [_known(p) for p in files]
    if kind_of(found) in EXTENSIONS or not _HUB_ID.fullmatch(path):
        raise InputError(f"the data file {path!r} does not exist (looked for {found.absolute()})")
    return None


def kind_of(path: Path) -> str:
    """The ending that says how a file is read, that of compression left out."""
    packed = path.suffix.lower() == ".gz"
    return (path.with_suffix("") if packed else path).suffix.lower()


def _known(path: Path) -> Path:
    ending, kind = path.suffix.lower(), kind_of(path)
    if kind in EXTENSIONS and not (kind == ".parquet" and ending == ".gz"):
        return path
    packed = ending in (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar")
    raise InputError(
        f"the data file {str(path)!r} ends in {path.suffix!r}: expected one of "
        f"{', '.join(EXTENSIONS)}{'; unpack it first' if packed else ''}"
    )


def open_files(files: list[Path]) -> Callable[[], Iterable[Row]]:
    """A function that yields the rows of the files, one file after the other, at every call."""
    readers = {
        ".jsonl": _json_lines,
        ".json": _json_file,
        ".csv": _csv,
        ".tsv": _csv,
        ".parquet": _parquet,
    }

    def opened() -> Iterator[Row]:
        for path in files:
            empty = True
            try:
                for row in readers[kind_of(path)](path):
                    empty = False
                    yield row
            except (OSError, EOFError, zlib.error) as error:
                reason = str(error) or type(error).__name__
                raise InputError(f"the data file {str(path)!r} cannot be read: {reason}") from error
            if empty:
                raise InputError(f"the data file {str(path)!r} is empty: it has no rows")

    return opened


def _open(path: Path) -> BinaryIO:
    packed = path.suffix.lower() == ".gz"
    return cast(BinaryIO, gzip.open(path, "rb") if packed else path.open("rb"))


def _json_lines(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        _check_layout(path, file.read(_HEAD))
        file.seek(0)
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield _json_row(f"{path}:{number}", line)


def _check_layout(path: Path, head: bytes) -> None:
    """Raise InputError for a file that is JSON, perhaps, but not one object a line in UTF-8."""
    _check_encoding(path, head)
    text = head.removeprefix(_BOM).decode(errors="ignore").lstrip()
    if kind_of(path) == ".jsonl" and text.startswith("["):
        raise InputError(
            f"{path}:1: a JSON array, expected one object per line; write each row on a line of "
            "its own, or name the file .json if the array is all it holds"
        )
    if _spans_lines(text):
        raise InputError(
            f"{path}:1: a JSON object over several lines, expected one object per line; "
            f"`jq -c . {path.name}` writes it so"
        )


def _check_encoding(path: Path, head: bytes) -> None:
    if head.startswith(_UTF16) or b"\0" in head[:64]:
        raise InputError(f"{path}:1: UTF-16 or no text at all, not UTF-8; save the file as UTF-8")


def _spans_lines(text: str) -> bool:
    """Whether the JSON object that `text` begins with goes on beyond its first line."""
    if text.split("\n", 1)[0].strip() == "{":
        return True
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _json_row(where: str, line: bytes) -> Row:
    try:
        value = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return where, {BROKEN: f"{where}: not UTF-8 text at byte {error.start} of the line"}
    except json.JSONDecodeError as error:
        return where, {BROKEN: f"{where}: broken JSON at column {error.colno} ({error.msg})"}
    except ValueError as error:
        reason = str(error) if "JSON" in str(error) else "a JSON number has too many digits"
        return where, {BROKEN: f"{where}: {reason}"}
    except RecursionError:
        return where, {BROKEN: f"{where}: JSON nested too deeply"}
    return _json_object(where, value, may_hold_halves=bool(_HALF.search(line)))


def _json_object(where: str, value: Any, *, may_hold_halves: bool) -> Row:
    if may_hold_halves and not _is_text(value):
        return where, {BROKEN: f"{where}: a \\u escape is half of a surrogate pair, no text"}
    if isinstance(value, dict):
        return where, value
    kind = type(value).__name__
    return where, {BROKEN: f"{where}: expected a JSON object, got a {kind}"}


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _json_file(path: Path) -> Iterator[Row]:
    """An array of objects, an object that holds one under a usual name, or JSON Lines."""
    with _open(path) as file:
        head = file.read(_HEAD)
    _check_encoding(path, head)
    text = head.removeprefix(_BOM).decode(errors="ignore").lstrip()
    keyed = re.match(r"\{\s*\"", text) and any(f'"{key}"' in text for key in _ROW_KEYS)
    if not text.startswith("[") and not keyed:
        yield from _json_lines(path)
        return
    with _open(path) as file:
        raw = file.read()
    try:
        values = _DECODER.decode(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if not text.startswith("["):
            yield from _json_lines(path)
            return
        raise InputError(f"the data file {str(path)!r} is broken JSON: {error}") from error
    place = str(path)
    if isinstance(values, dict):
        lists = [key for key, value in values.items() if _is_rows(value)]
        key = lists[0] if len(lists) == 1 else None
        if key not in _ROW_KEYS or detect(values):
            yield from _json_lines(path)
            return
        values, place = values[key], f"{path}[{key}]"
    may_hold_halves = bool(_HALF.search(raw))
    for number, value in enumerate(values):
        yield _json_object(f"{place}[{number}]", value, may_hold_halves=may_hold_halves)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _csv(path: Path) -> Iterator[Row]:
    """Texts by the names in the first line; fields may be quoted and hold line breaks."""
    before = csv.field_size_limit(_FIELD)
    with _open(path) as file:
        _check_encoding(path, file.read(64))
        file.seek(0)
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        delimiter = "\t" if kind_of(path) == ".tsv" else ","
        table = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            names = next(table, [])
            if names and (len(set(names)) < len(names) or not all(names)):
                raise InputError(
                    f"{path}:1: the first line must name every column once, got {short(names)}"
                )
            first = table.line_num + 1
            for values in table:
                where, first = f"{path}:{first}", table.line_num + 1
                if len(values) == len(names):
                    yield where, dict(zip(names, values, strict=True))
                elif values:
                    said = f"{len(values)} fields, expected {len(names)} as the first line has"
                    yield where, {BROKEN: f"{where}: {said}"}
        except UnicodeDecodeError as error:
            place = f"after line {table.line_num}"
            raise InputError(f"{path}: not UTF-8 text {place} ({error.reason})") from error
        except csv.Error as error:
            raise InputError(f"{path}:{table.line_num}: broken CSV ({error})") from error
        finally:
            csv.field_size_limit(before)


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
