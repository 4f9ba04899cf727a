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
from lora_tune.errors import InputError, Problems

FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
COLUMNS = ("messages", "tools", "prompt", "completion", "text")
ACCEPTED = (
    "`messages` or `conversations` (with optional `tools`), `prompt` and `completion`, or `text`"
)
# Pairs of names that others use for a prompt and its completion.
_PAIRS = (
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("prompt", "response"),
    ("query", "response"),
)


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
    of the file; a list under `conversations` counts as `messages`. `format` is a key of `FORMATS`,
    or "auto" to let it follow from the columns of the first row, in the order of `FORMATS`; every
    row must have the columns of the format. Only the first `max_samples` rows count, if given.

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
    opened = _open_hub(path, split, subset) if files is None else open_files(files)
    return _checked(
        path,
        lambda: islice(opened(), max_samples),
        columns=columns or {},
        format=None if format == "auto" else format,
    )


def _checked(
    source: str,
    opened: Callable[[], Iterable[Row]],
    *,
    columns: Mapping[str, str],
    format: str | None,
) -> Rows:
    """One pass over every row: choose the format, count, and collect what is wrong."""
    count, unseen = 0, set(columns.values())
    problems = Problems(f"rows of {source!r} cannot be read")
    there: Iterable[str] = ()
    for where, raw in opened():
        count += 1
        if isinstance(raw.get(BROKEN), str):
            problems.add(raw[BROKEN])
            continue
        there = raw.keys()
        unseen -= there
        fields = _renamed(raw, columns)
        format = format or _detect(where, raw, fields, columns)
        missing = [c for c in FORMATS[format] if fields.get(c) is None]
        if missing:
            problems.add(f"{where}: column {_names(missing)} is missing or null, {_found(there)}")
    if unseen and there:
        raise InputError(
            f"data.columns names {_names(sorted(unseen))}, which no row of {source!r} has, "
            f"{_found(there)}: correct the name or remove it"
        )
    problems.raise_if_any()
    if count == 0 or format is None:
        raise InputError(f"the data set {source!r} has no rows")
    return Rows(source, format, count, opened, columns)


def _detect(
    where: str, raw: Mapping[str, Any], fields: Mapping[str, Any], columns: Mapping[str, str]
) -> str:
    for name, needed in FORMATS.items():
        if all(fields.get(column) is not None for column in needed):
            return name
    absent = [theirs for theirs in columns.values() if theirs not in raw]
    if absent:
        raise InputError(
            f"{where}: data.columns names {_names(absent)}, which is not there, {_found(raw)}"
        )
    pairs = [f"{{prompt: {p}, completion: {c}}}" for p, c in _PAIRS if {p, c} <= raw.keys()]
    # With both, a prompt is put together from the two.
    several = {"instruction", "input"} <= raw.keys()
    hint = f"; set data.columns={pairs[0]} to read them so" if pairs and not several else ""
    raise InputError(f"{where}: unknown columns, {_found(raw)}, expected {ACCEPTED}{hint}")


def _renamed(fields: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names; ShareGPT's `conversations` are messages without being told so."""
    if "messages" not in {*fields, *columns} and isinstance(fields.get("conversations"), list):
        columns = {**columns, "messages": "conversations"}
    if not columns:
        return fields
    kept = {k: v for k, v in fields.items() if k not in columns and k not in columns.values()}
    return kept | {ours: fields[theirs] for ours, theirs in columns.items() if theirs in fields}


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f"`{c}`" for c in columns)


def _found(columns: Iterable[str]) -> str:
    return f"found {_names(sorted(columns)) or 'no columns'}"


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
