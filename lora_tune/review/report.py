# SPDX-License-Identifier: Apache-2.0
"""What the pages show: counts of sources, lengths, checks, and rows cut into pieces of one kind."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lora_tune.build_data import Data
from lora_tune.data.dataset import Dataset
from lora_tune.data.examples import DataReport
from lora_tune.data.messages import Example, preview
from lora_tune.review.checks import Check, run

Kind = Literal["trained", "context", "boundary", "padding"]


@dataclass(frozen=True)
class Piece:
    """Text of one kind; a boundary names the document that begins, padding its length."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Bar:
    """Examples of `first` to `last` tokens."""

    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Report:
    """Everything that is shown of the data of a recipe, its texts `printable`."""

    title: str
    sources: tuple[DataReport, ...]
    total: DataReport
    held_out: DataReport | None
    taken: tuple[int, ...]  # examples of each source in an epoch
    lengths: tuple[Bar, ...]
    sequences: int  # of an epoch
    checks: tuple[Check, ...]
    rows: tuple[tuple[Piece, ...], ...]

    @property
    def failed(self) -> list[Check]:
        """The checks that are errors."""
        return [check for check in self.checks if check.verdict == "error"]


def make(data: Data, tokenizer: Any, *, title: str, rows: int, max_overlap: float) -> Report:
    """Counts, checks and the first `rows` sequences that training sees."""
    dataset = data.train
    order = dataset.epoch_rows(0)
    edges = np.cumsum(dataset.examples.counts)
    ids = np.array([i for row in order for i in row])
    taken = np.bincount(np.searchsorted(edges, ids, side="right"), minlength=len(edges))
    return Report(
        title=printable(title),
        sources=tuple(replace(s, source=printable(s.source)) for s in dataset.examples.sources),
        total=dataset.report,
        held_out=None if data.held_out is None else data.held_out.report,
        taken=tuple(taken.tolist()),
        lengths=tuple(bars(dataset.examples.lengths)),
        sequences=len(order),
        checks=tuple(
            replace(check, text=printable(check.text))
            for check in run(data, tokenizer, max_overlap=max_overlap)
        ),
        rows=tuple(tuple(pieces(dataset, row, tokenizer)) for row in order[:rows]),
    )


def bars(lengths: Sequence[int] | np.ndarray) -> list[Bar]:
    """A histogram of lengths, each bar twice as wide as the one before, from the shortest on."""
    sizes = np.asarray(lengths)
    found, last = [], 1
    while last < sizes.max():
        first, last = last + 1, last * 2
        found.append(Bar(first, last, int(((sizes >= first) & (sizes <= last)).sum())))
    while found and not found[0].count:
        found.pop(0)
    return found


def pieces(dataset: Dataset, row: Sequence[int], tokenizer: Any) -> Iterator[Piece]:
    """One sequence: documents with what is trained in them, then padding."""
    examples = dataset.examples
    edges = np.cumsum(examples.counts)
    used = 0
    for i in row:
        source = examples.sources[int(np.searchsorted(edges, i, side="right"))]
        name = f"{source.source}, row {int(examples.rows[i]) + 1}"
        yield Piece("boundary", printable(name))
        yield from _document(examples[i], tokenizer)
        used += len(examples[i].tokens)
    if used < dataset.max_length:
        yield Piece("padding", f"{dataset.max_length - used:,} tokens of padding")


def _document(example: Example, tokenizer: Any) -> Iterator[Piece]:
    for text, trained in preview(example, tokenizer):
        yield Piece("trained" if trained else "context", printable(text))


def printable(text: str) -> str:
    """The text with a sign for each character that would steer a terminal or a page.

    Line breaks stay; other control characters, and those that reorder text, are replaced.
    """
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else _sign(c)
        for c in text
    )


def _sign(character: str) -> str:
    code = ord(character)
    if code < 32:
        return chr(0x2400 + code)
    return "\u200d" if code == 0x200D else f"<U+{code:04X}>"  # a joiner makes one emoji of several
