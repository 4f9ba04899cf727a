# SPDX-License-Identifier: Apache-2.0
"""Rows of local JSON Lines, JSON and Parquet files, each with the file and line it comes from."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import Any

from lora_tune.errors import InputError

EXTENSIONS = (".jsonl", ".json", ".parquet")
BROKEN = "\0broken"
"""Key of a row that could not be parsed: it travels as {BROKEN: message}, so that one pass finds
them all."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped surrogate, half of a pair
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+-]+):/+(?P<rest>.*)")  # slashes may be joined
_HUB_PAGE = re.compile(r"huggingface\.co/datasets/(?P<id>[^/]+/[^/?#]+)")
_BOM, _UTF16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_HEAD = 1 << 20

Row = tuple[str, dict[str, Any]]


def local_files(path: str) -> list[Path] | None:
    """The files that `path` names, itself or as a pattern, or None when it must be a hub id.

    Raises:
        InputError: there is no such file, or it is not of a kind that can be read.
    """
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
    if found.suffix.lower() in EXTENSIONS or not _HUB_ID.fullmatch(path):
        raise InputError(f"the data file {path!r} does not exist (looked for {found.absolute()})")
    return None


def _known(path: Path) -> Path:
    ending = path.suffix.lower()
    if ending in EXTENSIONS:
        return path
    hint = ""
    if ending in (".csv", ".tsv"):
        separator = r", sep='\t'" if ending == ".tsv" else ""
        hint = (
            f"; convert it in Python: datasets.Dataset.from_csv({str(path)!r}{separator})"
            f".to_json({str(path.with_suffix('.jsonl'))!r})"
        )
    elif ending in (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar"):
        hint = "; unpack it first"
    raise InputError(
        f"the data file {str(path)!r} ends in {path.suffix!r}: expected one of "
        f"{', '.join(EXTENSIONS)}{hint}"
    )


def open_files(files: list[Path]) -> Callable[[], Iterable[Row]]:
    """A function that yields the rows of the files, one file after the other, at every call."""
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
            _check_layout(path, file.read(_HEAD))
            file.seek(0)
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(_BOM) if number == 1 else line
                if line.strip():
                    yield _json_row(f"{path}:{number}", line)
    except OSError as error:
        raise InputError(f"the data file {str(path)!r} cannot be read: {error}") from error


def _check_layout(path: Path, head: bytes) -> None:
    """Raise InputError for a file that is JSON, perhaps, but not one object a line in UTF-8."""
    if head.startswith(_UTF16) or b"\0" in head[:64]:
        raise InputError(f"{path}:1: UTF-16 or no text at all, not UTF-8; save the file as UTF-8")
    text = head.removeprefix(_BOM).decode(errors="ignore").lstrip()
    if path.suffix.lower() == ".jsonl" and text.startswith("["):
        raise InputError(
            f"{path}:1: a JSON array, expected one object per line; write each row on a line of "
            "its own, or name the file .json if the array is all it holds"
        )
    if _spans_lines(text):
        raise InputError(
            f"{path}:1: a JSON object over several lines, expected one object per line; "
            f"`jq -c . {path.name}` writes it so"
        )


def _spans_lines(text: str) -> bool:
    """Whether the JSON object that `text` begins with goes on beyond its first line."""
    if text.split("\n", 1)[0].strip() == "{":
        return True
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _json_row(where: str, line: bytes) -> Row:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return where, {BROKEN: f"{where}: not UTF-8 text at byte {error.start} of the line"}
    except json.JSONDecodeError as error:
        return where, {BROKEN: f"{where}: broken JSON at column {error.colno} ({error.msg})"}
    except ValueError:
        return where, {BROKEN: f"{where}: a JSON number has too many digits"}
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
    except UnicodeEncodeError:
        return False
    return True


def _json_file(path: Path) -> Iterator[Row]:
    """A .json file is one array of objects or, as often met, JSON Lines."""
    with path.open("rb") as file:
        start = file.read(64).removeprefix(_BOM).lstrip()[:1]
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
