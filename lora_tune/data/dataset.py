# SPDX-License-Identifier: Apache-2.0
"""From encoded examples to an endless, exactly resumable stream of batches.

The stream has no state. The order of epoch e follows from (seed, e); packing follows from that
order; the rows of all epochs, one after the other, are numbered, and step s takes the next batch
size of them from s * batch size on. So resuming at step s is starting at step s, on any number of
hosts. Sources with weights are mixed by `mixing.epoch_order`, which the same holds for.
"""

import threading
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import numpy as np

from lora_tune.data import batch as batches
from lora_tune.data import mixing
from lora_tune.data import packing as packer
from lora_tune.data.batch import Batch
from lora_tune.data.examples import DataReport, Examples
from lora_tune.errors import InputError

_KEPT = 4
"""Epochs whose rows are kept: a batch may span some, and batches are made ahead."""


@dataclass(frozen=True)
class _Rows(Sized):
    """The rows of an epoch: row i has the examples `ids[starts[i]:starts[i + 1]]`."""

    ids: np.ndarray  # int64 [examples of the epoch]
    starts: np.ndarray  # int64 [rows + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> list[int]:
        return self.ids[self.starts[row] : self.starts[row + 1]].tolist()


@dataclass(frozen=True)
class _Epoch:
    first_row: int  # number of the epoch's first row in the endless stream
    rows: _Rows


class Dataset:
    """Training batches of `batch_size` rows of `max_length` tokens, without end.

    `weights`, one for each source of the examples, are the proportions of an epoch's examples;
    None takes every example once. See `mixing.epoch_order`.

    Of a batch that several processes share, each fills its `local_rows` (bool `[batch_size]`) and
    leaves the others empty; which example stands where is the same for any number of processes.
    Several threads may ask it at once.
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
        self._epoch_rows: dict[int, _Rows] = {}
        self._lock = threading.Lock()  # of the two
        self._arranging = threading.Lock()  # so that no epoch is arranged twice

    @property
    def report(self) -> DataReport:
        """The report of the examples, with the efficiency of the first epoch's rows."""
        rows = self._epoch(0).rows
        tokens = int(self.examples.lengths[rows.ids].sum())
        efficiency = tokens / (len(rows) * self.max_length)
        return replace(self.examples.report, packing_efficiency=efficiency)

    def epoch_rows(self, epoch: int) -> list[list[int]]:
        """The examples in each row of an epoch, in order."""
        rows = self._epoch(epoch).rows
        return [rows[row] for row in range(len(rows))]

    def steps(self, epochs: float) -> int:
        """Steps for a number of epochs, rounded up; part of an epoch counts its rows in part."""
        whole = self._epoch(int(epochs))
        rows = whole.first_row + (epochs - int(epochs)) * len(whole.rows)
        return -int(-rows // self.batch_size)

    def batches(self, start_step: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield `(step, arrays [batch_size, max_length])` from `start_step` on."""
        for step in count(start_step):
            ids = zip(self.example_ids(step), self._local, strict=True)
            rows = [row if mine else [] for row, mine in ids]
            yield step, _batch_of(self.examples, rows, self.max_length)

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
            self._count(len(self._first_rows) - 1)
        epoch = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        return epoch, number - self._first_rows[epoch]

    def _epoch(self, epoch: int) -> _Epoch:
        while len(self._first_rows) <= epoch:
            self._count(len(self._first_rows) - 1)
        return _Epoch(self._first_rows[epoch], self._rows_of(epoch))

    def _count(self, epoch: int) -> None:
        """Notes where the epoch after this one begins."""
        rows = len(self._rows_of(epoch))
        with self._lock:
            if len(self._first_rows) == epoch + 1:
                self._first_rows.append(self._first_rows[epoch] + rows)

    def _rows_of(self, epoch: int) -> _Rows:
        """Rows that are kept are had at once, also while another epoch is arranged."""
        found = self._kept(epoch)
        if found is None:
            with self._arranging:
                found = self._kept(epoch)
                if found is None:
                    found = self._arrange(epoch)
                    self._keep(epoch, found)
        return found

    def _kept(self, epoch: int) -> _Rows | None:
        with self._lock:
            return self._epoch_rows.get(epoch)

    def _keep(self, epoch: int, rows: _Rows) -> None:
        with self._lock:
            if len(self._epoch_rows) >= _KEPT:
                del self._epoch_rows[next(iter(self._epoch_rows))]
            self._epoch_rows[epoch] = rows

    def _arrange(self, epoch: int) -> _Rows:
        order = mixing.epoch_order(
            self.examples.counts,
            weights=self.weights,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
        )
        if not self.packing:
            return _Rows(order, np.arange(len(order) + 1))
        rows = packer.pack(self.examples.lengths[order], self.max_length)
        starts = np.cumsum([0, *map(len, rows)])
        return _Rows(order[np.fromiter(chain.from_iterable(rows), np.int64, len(order))], starts)


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
        given = rows[start : start + batch_size]
        given += [[] for _ in range(batch_size - len(given))]
        yield _batch_of(examples, given, max_length)


def _batch_of(examples: Examples, rows: Sequence[Sequence[int]], max_length: int) -> Batch:
    documents = [[examples[i] for i in row] for row in rows]
    several = len(examples.counts) > 1
    return batches.build(documents, max_length=max_length, with_sources=several)


def _check_lengths(examples: Examples, max_length: int) -> None:
    longest = int(examples.lengths.max())
    if longest > max_length:
        raise InputError(
            f"the longest example has {longest} tokens, more than max_length {max_length}: encode "
            "the rows with the same max_length"
        )
