# SPDX-License-Identifier: Apache-2.0
"""From encoded examples to an endless, exactly resumable stream of batches.

The stream has no state. The order of epoch e follows from (seed, e); packing follows from that
order; the rows of all epochs, one after the other, are numbered, and step s takes the next batch
size of them from s * batch size on. So resuming at step s is starting at step s, on any number of
hosts. Sources with weights are mixed by `mixing.epoch_order`, which the same holds for.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from lora_tune.data import batch as batches
from lora_tune.data import mixing
from lora_tune.data import packing as packer
from lora_tune.data.batch import Batch
from lora_tune.data.messages import Encoder, Example
from lora_tune.data.sources import Rows
from lora_tune.data.turns import RewrittenError
from lora_tune.errors import InputError

Progress = Callable[[int, int], None]
_SHOWN = 5


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
        return Example(self.tokens[part], self.mask[part])

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


BAD_ROW = "malformed row"


def encode_rows(
    rows: Rows,
    encoder: Encoder,
    *,
    name: str | None = None,
    drop_bad_rows: bool = False,
    progress: Progress | None = None,
) -> Examples:
    """Encode every row, once. `progress(done, total)` is called after each row.

    Raises InputError when rows cannot be encoded (the first few are named; with `drop_bad_rows`
    they are counted instead) or none is left.
    """
    found: list[Example] = []
    origins: list[int] = []
    drops: Counter[str] = Counter()
    problems = list(rows.bad.values())[:_SHOWN]
    totals: Counter[str] = Counter({"bad": len(rows.bad)})
    for number, (where, fields) in rows.numbered():
        try:
            encoded = encoder(fields, where=where)
        except RewrittenError:
            raise
        except InputError as error:
            if totals["bad"] < _SHOWN:
                problems.append(str(error))
            totals["bad"] += 1
            if totals["bad"] >= _SHOWN and not drop_bad_rows:
                break
            continue
        found += encoded.examples
        origins += [number] * len(encoded.examples)
        drops.update(drop.reason for drop in encoded.drops)
        for field in ("truncated", "trained_tokens", "lost_trained_tokens", "rewritten"):
            totals[field] += getattr(encoded, field)
        if progress is not None:
            progress(number + 1, len(rows))
    if not drop_bad_rows or not found:
        _raise(problems, rows.source)
    if totals["bad"]:
        drops[BAD_ROW] = totals["bad"]
    if not found:
        raise InputError(
            f"the data set {rows.source!r} leaves no example of its {len(rows)} rows: "
            f"{', '.join(f'{n} x {reason}' for reason, n in drops.items())}; raise data.max_length "
            "or complete the rows"
        )
    report = DataReport(
        rows=len(rows),
        examples=len(found),
        tokens=sum(len(e.tokens) for e in found),
        trained_tokens=sum(e.trained_tokens for e in found),
        drops=dict(drops),
        truncated=totals["truncated"],
        lost_trained_tokens=totals["lost_trained_tokens"],
        all_trained_tokens=totals["trained_tokens"],
        rewritten=totals["rewritten"],
        bad_rows=tuple(problems),
        source=name or rows.source,
    )
    return _flatten(found, origins, report)


def _raise(problems: Sequence[str], source: str) -> None:
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        stopped = " (stopped there)" if len(problems) == _SHOWN else ""
        raise InputError(
            f"{len(problems)} rows of {source!r} cannot be trained on{stopped}: "
            + "; ".join(problems)
        )


def _flatten(found: list[Example], origins: list[int], report: DataReport) -> Examples:
    offsets = np.zeros(len(found) + 1, np.int64)
    np.cumsum([len(e.tokens) for e in found], out=offsets[1:])
    return Examples(
        tokens=np.concatenate([e.tokens for e in found]),
        mask=np.concatenate([e.mask for e in found]),
        offsets=offsets,
        rows=np.asarray(origins, np.int64),
        report=report,
        sources=(report,),
    )


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
        bad_rows=tuple(said for report in reports for said in report.bad_rows)[:_SHOWN],
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


@dataclass(frozen=True)
class _Epoch:
    first_row: int  # number of the epoch's first row in the endless stream
    rows: list[list[int]]  # example ids of each row


class Dataset:
    """Training batches of `batch_size` rows of `max_length` tokens, without end.

    `weights`, one for each source of the examples, are the proportions of an epoch's examples;
    None takes every example once. See `mixing.epoch_order`.

    Of a batch that several processes share, each fills its `local_rows` (bool `[batch_size]`) and
    leaves the others empty; which example stands where is the same for any number of processes.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        max_length: int,
        batch_size: int,
        packing: bool = True,
        seed: int = 0,
        shuffle: bool = True,
        weights: Sequence[float] | None = None,
        local_rows: np.ndarray | None = None,
    ) -> None:
        _check_lengths(examples, max_length)
        if weights is not None:
            mixing.shares(examples.counts, weights)  # refuses a source without a share
        self.examples = examples
        self.max_length = max_length
        self.batch_size = batch_size
        self.packing = packing
        self.seed = seed
        self.shuffle = shuffle
        self.weights = None if weights is None else list(weights)
        self._local = np.ones(batch_size, bool) if local_rows is None else local_rows
        self._first_rows = [0]
        self._epoch_rows: dict[int, list[list[int]]] = {}

    @property
    def report(self) -> DataReport:
        """The report of the examples, with the efficiency of the first epoch's rows."""
        rows = self._epoch(0).rows
        tokens = int(self.examples.lengths[[i for row in rows for i in row]].sum())
        efficiency = tokens / (len(rows) * self.max_length)
        return replace(self.examples.report, packing_efficiency=efficiency)

    def epoch_rows(self, epoch: int) -> list[list[int]]:
        """The examples in each row of an epoch, in order."""
        return self._epoch(epoch).rows

    def steps(self, epochs: float) -> int:
        """Steps for a number of epochs, rounded up; part of an epoch counts its rows in part."""
        whole = self._epoch(int(epochs))
        rows = whole.first_row + (epochs - int(epochs)) * len(whole.rows)
        return -int(-rows // self.batch_size)

    def batches(self, start_step: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield `(step, arrays [batch_size, max_length])` from `start_step` on."""
        for step in count(start_step):
            ids = zip(self.example_ids(step), self._local, strict=True)
            rows = [[self.examples[i] for i in row] if mine else [] for row, mine in ids]
            yield step, batches.build(rows, max_length=self.max_length)

    def example_ids(self, step: int) -> list[list[int]]:
        """The examples in each row of a step's batch, in the order they stand in it."""
        first = step * self.batch_size
        return [self._row(row) for row in range(first, first + self.batch_size)]

    def planned(self, step: int) -> dict[str, int]:
        """Tokens in a step's batch, and those of them that are targets to train."""
        ids = [i for row in self.example_ids(step) for i in row]
        examples = self.examples
        return {
            "tokens": int(examples.lengths[ids].sum()),
            "trained_tokens": int(examples.targets[ids].sum()),
        }

    def position(self, step: int) -> dict[str, int | str | bool]:
        """Where the stream stands before `step`, and all that the stream follows from."""
        epoch, row = self._locate(step * self.batch_size)
        return {"step": step, "epoch": epoch, "row": row} | self._identity()

    def check(self, position: dict[str, Any]) -> None:
        """Raise InputError unless this stream is the one that `position` was taken from."""
        here = self._identity()
        changed = [key for key in here if here[key] != position.get(key)]
        changed += ["mixture"] if "mixture" in position.keys() - here.keys() else []
        if changed:
            listed = ", ".join(
                "other tokens"
                if k == "fingerprint"
                else f"{k} was {position.get(k)}, is {here.get(k)}"
                for k in changed
            )
            raise InputError(
                "set another output_dir for this run, or undo the change to go on with the one "
                "there: the training data is not what the checkpoint at step "
                f"{position.get('step')} was trained on ({listed})"
            )

    def _identity(self) -> dict[str, int | str | bool]:
        identity: dict[str, int | str | bool] = {
            "fingerprint": self.examples.fingerprint,
            "examples": len(self.examples),
            "max_length": self.max_length,
            "batch_size": self.batch_size,
            "packing": self.packing,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        if self.weights is not None:
            identity["mixture"] = f"{self.examples.counts} by {self.weights}"
        return identity

    def _row(self, number: int) -> list[int]:
        epoch, row = self._locate(number)
        return self._rows_of(epoch)[row]

    def _locate(self, number: int) -> tuple[int, int]:
        """The epoch of a row of the endless stream, and its place there."""
        while self._first_rows[-1] <= number:
            epoch = len(self._first_rows) - 1
            self._first_rows.append(self._first_rows[epoch] + len(self._rows_of(epoch)))
        epoch = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        return epoch, number - self._first_rows[epoch]

    def _epoch(self, epoch: int) -> _Epoch:
        while len(self._first_rows) <= epoch:
            self._locate(self._first_rows[-1])
        return _Epoch(self._first_rows[epoch], self._rows_of(epoch))

    def _rows_of(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epoch_rows:
            if len(self._epoch_rows) > 1:  # a batch may span two epochs, never more are needed
                del self._epoch_rows[next(iter(self._epoch_rows))]
            self._epoch_rows[epoch] = self._arrange(epoch)
        return self._epoch_rows[epoch]

    def _arrange(self, epoch: int) -> list[list[int]]:
        order = mixing.epoch_order(
            self.examples.counts,
            weights=self.weights,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
        )
        if not self.packing:
            return order[:, None].tolist()
        rows = packer.pack(self.examples.lengths[order], self.max_length)
        return [order[row].tolist() for row in rows]


def eval_batches(
    examples: Examples, *, max_length: int, batch_size: int, packing: bool = False
) -> Iterator[Batch]:
    """Yield every example exactly once, in order; rows missing from the last batch are padding.

    Without packing, row r of batch b is example b * batch_size + r.
    """
    _check_lengths(examples, max_length)
    rows = [[i] for i in range(len(examples))]
    if packing:
        rows = packer.pack(examples.lengths, max_length)
    for start in range(0, len(rows), batch_size):
        documents = [[examples[i] for i in row] for row in rows[start : start + batch_size]]
        documents += [[] for _ in range(batch_size - len(documents))]
        yield batches.build(documents, max_length=max_length)


def _check_lengths(examples: Examples, max_length: int) -> None:
    longest = int(examples.lengths.max())
    if longest > max_length:
        raise InputError(
            f"the longest example has {longest} tokens, more than max_length {max_length}: encode "
            "the rows with the same max_length"
        )
