# SPDX-License-Identifier: Apache-2.0
"""Encoded documents, in flat arrays, and what is said of them."""

import hashlib
from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lora_tune.data.messages import Example

SHOWN = 5
"""How many sentences on malformed rows are kept."""


@dataclass(frozen=True)
class DataReport:
    """What the rows became.

    `drops` counts examples by reason; `all_trained_tokens` counts before truncation, which took
    `lost_trained_tokens` away. `rewritten` counts turns that the chat template writes differently
    later. `bad_rows` are the first sentences on rows that were dropped because they are malformed.
    `packing_efficiency` is the share of the positions of the first epoch's rows that hold a token.
    """

    rows: int
    examples: int
    tokens: int
    trained_tokens: int
    drops: dict[str, int]
    truncated: int
    lost_trained_tokens: int
    all_trained_tokens: int = 0
    rewritten: int = 0
    bad_rows: tuple[str, ...] = ()
    source: str = ""
    packing_efficiency: float = 1.0


@dataclass(frozen=True)
class Examples(Sized):
    """Encoded documents in flat arrays: document i is `[offsets[i], offsets[i + 1])`."""

    tokens: np.ndarray  # int32 [total]
    mask: np.ndarray  # bool [total]
    offsets: np.ndarray  # int64 [examples + 1]
    rows: np.ndarray  # int64 [examples]: the number of the row that an example comes from
    report: DataReport
    sources: tuple[DataReport, ...] = ()  # of each source; their examples follow one another

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        part = slice(self.offsets[index], self.offsets[index + 1])
        return Example(self.tokens[part], self.mask[part], int(self._source_of[index]))

    @property
    def names(self) -> list[str]:
        """What each source is called."""
        return [source.source for source in self.sources or (self.report,)]

    @cached_property
    def _source_of(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens in each example, int64 [examples]."""
        return np.diff(self.offsets)

    @property
    def counts(self) -> list[int]:
        """Examples of each source."""
        return [source.examples for source in self.sources or (self.report,)]

    @cached_property
    def targets(self) -> np.ndarray:
        """Trained tokens in each example that have a token before them, int64 [examples]."""
        counts = np.add.reduceat(self.mask, self.offsets[:-1], dtype=np.int64)
        return counts - self.mask[self.offsets[:-1]]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens, masks and boundaries."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.mask, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def join(parts: Sequence[Examples]) -> Examples:
    """The examples of several sources, one source after the other."""
    if len(parts) == 1:
        return parts[0]
    reports = [part.report for part in parts]
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
    drops: Counter[str] = Counter()
    for report in reports:
        drops.update(report.drops)
    counted = (
        "rows",
        "examples",
        "tokens",
        "trained_tokens",
        "truncated",
        "lost_trained_tokens",
        "all_trained_tokens",
        "rewritten",
    )
    whole = DataReport(
        **{field: sum(getattr(report, field) for report in reports) for field in counted},
        drops=dict(drops),
        bad_rows=tuple(said for report in reports for said in report.bad_rows)[:SHOWN],
        source=", ".join(report.source for report in reports),
    )
    ends = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
    return Examples(
        tokens=np.concatenate([part.tokens for part in parts]),
        mask=np.concatenate([part.mask for part in parts]),
        offsets=np.concatenate([np.zeros(1, np.int64), *ends]),
        rows=np.concatenate([part.rows for part in parts]),
        report=whole,
        sources=tuple(reports),
    )
