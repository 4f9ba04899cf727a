# SPDX-License-Identifier: Apache-2.0
"""Read training rows of a data set, from local files or from a hub, in one of the formats.

`read` checks every row before it returns, so a broken line 900 000 is reported before training
starts; the rows themselves stay on disk and are read again on each iteration.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from lora_tune.data.files import BROKEN, Row, local_files, open_files, without_none
from lora_tune.data.formats import ACCEPTED, COLUMNS, FORMATS, detect, missing
from lora_tune.errors import InputError, Problems

_ROW = 1000  # bytes of a row, where nothing says how many there are
# Pairs of names that others use for a prompt and its completion.
_PAIRS = (
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "response"),
    ("input", "output"),
    ("prompt", "response"),
    ("query", "response"),
)


@dataclass(frozen=True)
class Rows:
    """Rows of one format; iterating yields `(where, fields)`, `where` naming file and line.

    `count` is that of all rows, `bad` has the numbers of those that are dropped, from 0 on among
    all rows, and `problems` says what is wrong with the first of them. `size` is about how many
    bytes there are to read.
    """

    source: str
    format: str
    count: int
    size: int
    bad: Set[int]
    problems: tuple[str, ...]
    _open: Callable[[], Iterable[Row]]
    _columns: Mapping[str, str]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Row]:
        for _, row in self.numbered():
            yield row

    def numbered(self) -> Iterator[tuple[int, Row]]:
        """The rows, each with its number from 0 on among all rows, the bad ones included."""
        for number, (where, fields) in enumerate(self._open()):
            if number not in self.bad:
                yield number, (where, _renamed(fields, self._columns))


@dataclass(frozen=True)
class Opened:
    """A data set that is there, before its rows are looked at.

    `files` are those that hold the rows, all of them, so that their content is that of the data
    set; None where there are none, as of what is streamed from a hub.
    """

    source: str
    files: tuple[Path, ...] | None
    rows: Callable[[], Iterable[Row]]

    @property
    def size(self) -> int | None:
        """Bytes of the files."""
        return None if self.files is None else sum(path.stat().st_size for path in self.files)

    def read(
        self,
        *,
        columns: Mapping[str, str] | None = None,
        format: str = "auto",
        max_samples: int | None = None,
        drop_bad_rows: bool = False,
    ) -> Rows:
        """Check every row; see the function `read`, which checks these options too."""
        rows = _checked(
            self.source,
            lambda: islice(self.rows(), max_samples),
            columns=columns or {},
            format=None if format == "auto" else format,
            drop_bad_rows=drop_bad_rows,
        )
        size = self.size if max_samples is None else None
        return rows if size is None else replace(rows, size=size)


def check_options(
    *,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    max_samples: int | None = None,
) -> None:
    """Raise InputError for options of `read` that no data set can be read with."""
    if format != "auto" and format not in FORMATS:
        raise InputError(f"data format {format!r} is unknown: use auto or {', '.join(FORMATS)}")
    if max_samples is not None and max_samples < 1:
        raise InputError(f"data.max_samples must be at least 1 or null, got {max_samples}")
    if unknown := sorted(set(columns or ()) - {*COLUMNS}):
        raise InputError(
            f"data.columns has the key {_names(unknown)}, expected our names {_names(COLUMNS)}, "
            "each with the name in the file"
        )


def find(
    path: str | list[str], *, split: str = "train", subset: str | None = None, streaming: bool
) -> Opened:
    """Open a data set; see `read` for the arguments.

    With `streaming`, no more of a hub data set is fetched than is read.

    Raises InputError for a file that is missing and for a hub id that is none.
    """
    files = local_files(path)
    if files is None:
        assert isinstance(path, str)  # a list names files
        return _open_hub(path, split, subset, streaming=streaming)
    name = path if isinstance(path, str) else ", ".join(path)
    return Opened(name, tuple(files), open_files(files))


def read(
    path: str | list[str],
    *,
    split: str = "train",
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    max_samples: int | None = None,
    drop_bad_rows: bool = False,
) -> Rows:
    """Open a data set and check its rows.

    `path` is a file or a glob with one of the endings `files.EXTENSIONS`, a list of such, or else a
    hub id (`owner/name`) for which `split` and `subset` apply. `columns` maps our column names to
    those of the file. `format` is a key of `FORMATS`, or "auto" to let it follow from the columns
    of the first row, in the order of `FORMATS`; every row must have the columns of the format.
    Only the first `max_samples` rows count, if given; of a hub data set no more is fetched then.
    With `drop_bad_rows`, rows that cannot be read are left out and counted in `Rows.bad`.

    Raises InputError for a missing, empty, broken or unreadable file and for unknown columns.
    """
    check_options(columns=columns, format=format, max_samples=max_samples)
    opened = find(path, split=split, subset=subset, streaming=max_samples is not None)
    return opened.read(
        columns=columns, format=format, max_samples=max_samples, drop_bad_rows=drop_bad_rows
    )


def _checked(
    source: str,
    opened: Callable[[], Iterable[Row]],
    *,
    columns: Mapping[str, str],
    format: str | None,
    drop_bad_rows: bool,
) -> Rows:
    """One pass over every row: choose the format, count, and collect what is wrong."""
    count, unseen = 0, set(columns.values())
    bad: set[int] = set()
    problems = Problems(f"rows of {source!r} cannot be read")

    def refuse(said: str) -> None:
        bad.add(count - 1)
        problems.add(said)

    there: Iterable[str] = ()
    for where, raw in opened():
        count += 1
        if isinstance(raw.get(BROKEN), str):
            refuse(raw[BROKEN])
            continue
        there = raw.keys()
        unseen -= there
        fields = _renamed(raw, columns)
        format = format or detect(fields)
        if format is None:
            refuse(said := _unknown_columns(where, raw, columns))
            if not drop_bad_rows:
                raise InputError(said)
        elif absent := missing(fields, format):
            refuse(f"{where}: column {_names(absent)} is missing or null, {_found(there)}")
    if unseen and there:
        raise InputError(
            f"data.columns names {_names(sorted(unseen))}, which no row of {source!r} has, "
            f"{_found(there)}: correct the name or remove it"
        )
    if not drop_bad_rows or len(bad) == count:
        problems.raise_if_any()
    if count == 0 or format is None:
        raise InputError(f"the data set {source!r} has no rows")
    return Rows(source, format, count, count * _ROW, bad, problems.first, opened, columns)


def _unknown_columns(where: str, raw: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    absent = [theirs for theirs in columns.values() if theirs not in raw]
    if absent:
        return f"{where}: data.columns names {_names(absent)}, which is not there, {_found(raw)}"
    pairs = [f"{{prompt: {p}, completion: {c}}}" for p, c in _PAIRS if {p, c} <= raw.keys()]
    # With both, a prompt is put together from the two.
    several = {"instruction", "input"} <= raw.keys()
    hint = f"; set data.columns={pairs[0]} to read them so" if pairs and not several else ""
    null = [name for name, value in raw.items() if value is None]
    said = f" ({_names(null)}: null)" if null else ""
    return f"{where}: unknown columns, {_found(raw)}{said}, expected {ACCEPTED}{hint}"


def _renamed(fields: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names."""
    if not columns:
        return fields
    kept = {k: v for k, v in fields.items() if k not in columns and k not in columns.values()}
    return kept | {ours: fields[theirs] for ours, theirs in columns.items() if theirs in fields}


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f"`{c}`" for c in columns)


def _found(columns: Iterable[str]) -> str:
    return f"found {_names(sorted(columns)) or 'no columns'}"


def _open_hub(path: str, split: str, subset: str | None, *, streaming: bool) -> Opened:
    import datasets

    try:
        loaded = datasets.load_dataset(path, subset, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the data path {path!r} is neither a local file nor a data set that the hub gives "
            f"with split {split!r} and subset {subset!r}: {' '.join(str(error).split())}"
        ) from error

    def rows() -> Iterator[Row]:
        for number, fields in enumerate(loaded):
            yield f"{path}[{split}] row {number}", without_none(dict(fields))

    held = [] if streaming else [Path(file["filename"]) for file in loaded.cache_files]
    return Opened(path, tuple(held) or None, rows)
