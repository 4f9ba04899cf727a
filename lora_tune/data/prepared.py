# SPDX-License-Identifier: Apache-2.0
"""The examples of a source: those that an earlier run has kept, or made now.

What is kept is found by a key of everything that decides it: the content of the data files, how
they are read and encoded, the tokenizer with its template, the source of this package's `data`
folder, and versions of the packages that read and tokenise. Content is hashed, not dated.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tune.data import sources, tokenizer
from lora_tune.data.encode import Progress, encode_rows
from lora_tune.data.examples import Examples
from lora_tune.data.messages import Encoder
from lora_tune.data.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORTH = 1 << 20
"""Bytes of data files from which on the examples are kept."""
_HASHED = 1 << 30
"""Bytes of data files up to which they are hashed for the sake of their first rows."""
_PACKAGES = ("datasets", "jinja2", "numpy", "pyarrow", "tokenizers", "transformers")
_OF_THE_DAY = "strftime_now"
"""The function of chat templates that writes the date."""


@dataclass(frozen=True)
class Source:
    """A source of rows and how they are read; see `sources.read`."""

    path: str | list[str]
    split: str = "train"
    subset: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    format: str = "auto"
    max_samples: int | None = None
    drop_bad_rows: bool = False
    name: str | None = None


@dataclass(frozen=True)
class Means:
    """How rows are encoded, with the same result.

    Attributes:
      num_proc: as of `encode_rows`.
      store: where examples are kept, None for nowhere.
      worth: bytes of data files from which on they are.
      progress: called with (bytes done, bytes in all), about.
    """

    num_proc: int | None = None
    store: Store | None = None
    worth: int = WORTH
    progress: Progress | None = None


def examples(
    source: Source,
    tok: "PreTrainedTokenizerBase",
    options: Mapping[str, Any],
    means: Means,
) -> Examples:
    """The examples of a source; `options` are those of `Encoder` besides the format.

    Raises InputError for rows that cannot be read or encoded; see `encode_rows`.
    """
    read = {name: getattr(source, name) for name in ("columns", "format", "max_samples")}
    sources.check_options(**read)
    opened = sources.find(
        source.path,
        split=source.split,
        subset=source.subset,
        streaming=source.max_samples is not None,
    )

    def make(folder: Path | None) -> Examples:
        rows = opened.read(**read, drop_bad_rows=source.drop_bad_rows)
        if rows.format in ("messages", "sharegpt", "alpaca"):
            tokenizer.require_chat_template(tok)
        return encode_rows(
            rows,
            Encoder(tok, format=rows.format, **options),
            name=source.name,
            drop_bad_rows=source.drop_bad_rows,
            progress=_of_bytes(means.progress, rows.size),
            num_proc=means.num_proc,
            folder=folder,
        )

    store = means.store
    if store is None or not _is_worth(opened, source, means):
        return make(None)
    assert opened.files is not None
    before = _states(opened.files)
    key = key_of(opened.files, source, tok, options)
    return store.get(key, make, unchanged=lambda: _states(opened.files) == before)


def _is_worth(opened: sources.Opened, source: Source, means: Means) -> bool:
    size = opened.size
    most = None if source.max_samples is None else _HASHED
    return size is not None and means.worth <= size and (most is None or size <= most)


def _of_bytes(progress: Progress | None, size: int) -> Progress | None:
    if progress is None:
        return None
    tell = progress
    return lambda done, rows: tell(size * done // rows, size)


def _states(files: tuple[Path, ...] | None) -> list[tuple[int, ...]]:
    """What changes when a file is written to, to notice that while it is read."""
    states = [path.stat() for path in files or ()]
    return [(state.st_size, state.st_mtime_ns, state.st_ino) for state in states]


def key_of(
    files: tuple[Path, ...],
    source: Source,
    tok: "PreTrainedTokenizerBase",
    options: Mapping[str, Any],
) -> str:
    """A name for all that the examples of a source follow from, 40 hexadecimal digits."""
    template = json.dumps(tok.chat_template)
    parts = {
        "code": _code(),
        "packages": _versions(),
        "files": [[str(path), _content(path)] for path in files],
        "source": asdict(source),
        "options": dict(options),
        "tokenizer": [
            type(tok).__name__,
            tokenizer.rules(tok),
            tok.special_tokens_map,
            sorted(tok.all_special_ids),
        ],
        "template": template,
        "day": date.today().isoformat() if _OF_THE_DAY in template else None,
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


@cache
def _code() -> str:
    """A hash of the source of this folder."""
    digest = hashlib.blake2b(digest_size=20)
    folder = resources.files("lora_tune.data")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _versions() -> dict[str, str]:
    installed = {found.metadata["Name"].lower() for found in metadata.distributions()}
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in _PACKAGES if name in installed
    }
