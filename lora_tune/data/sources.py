# SPDX-License-Identifier: Apache-2.0
"""Read training rows of a data set, from local files or from a hub, in one of the formats.

`read` checks every row before it returns, so a broken line 900 000 is reported before training
starts; the rows themselves stay on disk and are read again on each iteration.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lora_tune.data.files import BROKEN, Row, local_files, open_files, without_none
from lora_tune.data.formats import ACCEPTED, COLUMNS, FORMATS, detect, missing
from lora_tune.errors import InputError, Problems

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

    `count` is that of all rows, and `bad` says what is wrong with those that are dropped.
    """

    source: str
    format: str
    count: int
    bad: Mapping[str, str]
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
            if where not in self.bad:
                yield number, (where, _renamed(fields, self._columns))


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
    """Open a data set.

    `path` is a file or a glob with one of the endings `files.EXTENSIONS`, a list of such, or else a
    hub id (`owner/name`) for which `split` and `subset` apply. `columns` maps our column names to
    those of the file. `format` is a key of `FORMATS`, or "auto" to let it follow from the columns
    of the first row, in the order of `FORMATS`; every row must have the columns of the format.
    Only the first `max_samples` rows count, if given; of a hub data set no more is fetched then.
    With `drop_bad_rows`, rows that cannot be read are left out and listed in `Rows.bad`.

    Raises InputError for a missing, empty, broken or unreadable file and for unknown columns.
    """
    if format != "auto" and format not in FORMATS:
        raise InputError(f"data format {format!r} is unknown: use auto or {', '.join(FORMATS)}")
    if max_samples is not None and max_samples < 1:
        raise InputError(f"data.max_samples must be at least 1 or null, got {max_samples}")
    if unknown := sorted(set(columns or ()) - {*COLUMNS}):
        raise InputError(
            f"data.columns has the key {_names(unknown)}, expected our names {_names(COLUMNS)}, "
            "each with the name in the file"
        )
    files = local_files(path)
    if files is None:
        assert isinstance(path, str)  # a list names files
        opened = _open_hub(path, split, subset, streaming=max_samples is not None)
    else:
        opened = open_files(files)
    return _checked(
        path if isinstance(path, str) else ", ".join(path),
        lambda: islice(opened(), max_samples),
        columns=columns or {},
        format=None if format == "auto" else format,
        drop_bad_rows=drop_bad_rows,
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
    bad: dict[str, str] = {}
    there: Iterable[str] = ()
    for where, raw in opened():
        count += 1
        if isinstance(raw.get(BROKEN), str):
            bad[where] = raw[BROKEN]
            continue
        there = raw.keys()
        unseen -= there
        fields = _renamed(raw, columns)
        format = format or detect(fields)
        if format is None:
            bad[where] = _unknown_columns(where, raw, columns)
            if not drop_bad_rows:
                raise InputError(bad[where])
        elif absent := missing(fields, format):
            bad[where] = f"{where}: column {_names(absent)} is missing or null, {_found(there)}"
    if unseen and there:
        raise InputError(
            f"data.columns names {_names(sorted(unseen))}, which no row of {source!r} has, "
            f"{_found(there)}: correct the name or remove it"
        )
    if not drop_bad_rows or len(bad) == count:
        problems = Problems(f"rows of {source!r} cannot be read")
        for said in bad.values():
            problems.add(said)
        problems.raise_if_any()
    if count == 0 or format is None:
        raise InputError(f"the data set {source!r} has no rows")
    return Rows(source, format, count, bad, opened, columns)


def _unknown_columns(where: str, raw: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    absent = [theirs for theirs in columns.values() if theirs not in raw]
    if absent:
        return f"{where}: data.columns names {_names(absent)}, which is not there, {_found(raw)}"
    pairs = [f"{{prompt: {p}, completion: {c}}}" for p, c in _PAIRS if {p, c} <= raw.keys()]
    # With both, a prompt is put together from the two.
    several = {"instruction", "input"} <= raw.keys()
    hint = f"; set data.columns={pairs[0]} to read them so" if pairs and not several else ""
    return f"{where}: unknown columns, {_found(raw)}, expected {ACCEPTED}{hint}"


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


def _open_hub(
    path: str, split: str, subset: str | None, *, streaming: bool
) -> Callable[[], Iterable[Row]]:
    import datasets

    try:
        loaded = datasets.load_dataset(path, subset, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the data path {path!r} is neither a local file nor a data set that the hub gives "
            f"with split {split!r} and subset {subset!r}: {' '.join(str(error).split())}"
        ) from error

    def opened() -> Iterator[Row]:
        for number, fields in enumerate(loaded):
            yield f"{path}[{split}] row {number}", without_none(dict(fields))

    return opened
