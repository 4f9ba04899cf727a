# SPDX-License-Identifier: Apache-2.0
"""Encoded documents, in flat arrays, and what is said of them."""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from lora_tune.data.flat import pieces
from lora_tune.data.messages import Example

SHOWN = 5
"""How many sentences on malformed rows are kept."""
ARRAYS = {
    "tokens": np.int32,
    "mask": np.bool_,
    "lengths": np.int64,
    "rows": np.int64,
    "targets": np.int64,
}
"""Arrays of a `Part` -> their types; the first two have an entry for each token."""


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
class Part:
    """Encoded documents of one source, one after the other.

    Attributes:
      tokens: int32 [total].
      mask: bool [total], where a token is trained.
      lengths: int64 [examples], tokens of each.
      rows: int64 [examples], the number of the row that an example comes from.
      targets: int64 [examples], trained tokens of each that have a token before them.
    """

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    report: DataReport

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where documents begin, and the last ends, int64 [examples + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])


@dataclass(frozen=True)
class Examples(Sized):
    """Encoded documents of one source after the other, numbered through."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        at = bisect_right(self._ends, index)
        part = self.parts[at]
        first = index - (self._ends[at] - len(part.lengths))
        inside = slice(part.offsets[first], part.offsets[first + 1])
        return Example(part.tokens[inside], part.mask[inside], at)

    @property
    def names(self) -> list[str]:
        """What each source is called."""
        return [source.source for source in self.sources]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.counts))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens in each example, int64 [examples]."""
        return _joined([part.lengths for part in self.parts])

    @cached_property
    def rows(self) -> np.ndarray:
        """The number of the row of its source that each example comes from, int64 [examples]."""
        return _joined([part.rows for part in self.parts])

    @cached_property
    def targets(self) -> np.ndarray:
        """Trained tokens in each example that have a token before them, int64 [examples]."""
        return _joined([part.targets for part in self.parts])

    @property
    def sources(self) -> tuple[DataReport, ...]:
        """What is said of each source."""
        return tuple(part.report for part in self.parts)

    @property
    def counts(self) -> list[int]:
        """Examples of each source."""
        return [len(part.lengths) for part in self.parts]

    @cached_property
    def report(self) -> DataReport:
        """What is said of all sources together."""
        return _summed(self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens, masks and boundaries."""
        digest = hashlib.blake2b(digest_size=16)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        tokens, masks = [p.tokens for p in self.parts], [p.mask for p in self.parts]
        for array in (*tokens, *masks, offsets):
            for piece in pieces(array):
                digest.update(piece.data)
        return digest.hexdigest()


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def join(parts: Sequence[Examples]) -> Examples:
    """The examples of several sources, one source after the other; no array is copied."""
    if len(parts) == 1:
        return parts[0]
    return Examples(tuple(part for each in parts for part in each.parts))


def _summed(reports: Sequence[DataReport]) -> DataReport:
    if len(reports) == 1:
        return reports[0]
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
    return DataReport(
        **{field: sum(getattr(report, field) for report in reports) for field in counted},
        drops=dict(drops),
        bad_rows=tuple(said for report in reports for said in report.bad_rows)[:SHOWN],
        source=", ".join(report.source for report in reports),
    )
