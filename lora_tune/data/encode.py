# SPDX-License-Identifier: Apache-2.0
"""From the rows of a source to examples, piece by piece, in this process or in several.

A piece is what some rows became, one after the other. Pieces are made by `encode_piece` wherever
they are made, and are put together here in the order of their rows: what comes out does not depend
on how many processes there are, or how rows are divided among them.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from lora_tune.data.examples import ARRAYS, SHOWN, DataReport, Examples, Part
from lora_tune.data.files import Row
from lora_tune.data.flat import Growing
from lora_tune.data.messages import Encoder, Example
from lora_tune.data.sources import Rows
from lora_tune.data.turns import RewrittenError
from lora_tune.data.workers import in_workers, worth
from lora_tune.errors import InputError

Progress = Callable[[int, int], None]
BAD_ROW = "malformed row"
_ROWS, _TOKENS = 256, 1 << 20
"""Where a piece ends that is made in this process."""


@dataclass
class Piece:
    """What some rows became.

    Attributes:
      arrays: the bytes of each array of a `Part`, of these rows.
      counts: of examples, tokens and trained tokens, and of the fields of `Encoded`.
      drops: examples that were dropped, by reason.
      problems: one sentence for each row that cannot be encoded.
      stopped: what ends the run at the last of these rows whatever is done with malformed ones.
      done: the number of rows up to here, from the first of the source on.
    """

    arrays: dict[str, bytes] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    stopped: str | None = None
    done: int = 0


def encode_piece(
    numbered: Iterable[tuple[int, Row]], encoder: Encoder, *, most: float = math.inf
) -> Piece:
    """Encode rows, each given with its number, until they end, are `most` tokens, or one stops."""
    piece, found, numbers = Piece(), list[Example](), list[int]()
    tokens = 0
    for number, (where, fields) in numbered:
        piece.done = number + 1
        try:
            encoded = encoder(fields, where=where)
        except RewrittenError as error:
            piece.stopped = str(error)
            break
        except InputError as error:
            piece.problems.append(str(error))
            continue
        found += encoded.examples
        numbers += [number] * len(encoded.examples)
        piece.drops.update(drop.reason for drop in encoded.drops)
        for name in ("truncated", "trained_tokens", "lost_trained_tokens", "rewritten"):
            piece.counts[name] += getattr(encoded, name)
        tokens += sum(len(example.tokens) for example in encoded.examples)
        if tokens >= most:
            break
    columns = {
        "lengths": [len(example.tokens) for example in found],
        "rows": numbers,
        "targets": [example.trained_tokens for example in found],
    }
    piece.counts.update(examples=len(found), tokens=tokens, kept=sum(columns["targets"]))
    piece.arrays = {
        "tokens": b"".join(example.tokens.astype(np.int32).tobytes() for example in found),
        "mask": b"".join(example.mask.tobytes() for example in found),
    } | {name: np.asarray(values, np.int64).tobytes() for name, values in columns.items()}
    return piece


def encode_rows(
    rows: Rows,
    encoder: Encoder,
    *,
    name: str | None = None,
    drop_bad_rows: bool = False,
    progress: Progress | None = None,
    num_proc: int | None = 1,
    folder: Path | None = None,
) -> Examples:
    """Encode every row, once.

    `progress(done, total)` is called with numbers of rows as they are done. `num_proc` processes
    work, None for as many as it is worth (`workers.worth`), and 1 for this one alone. `folder` is
    where the arrays are written, None for files that go with the examples.

    Raises InputError when rows cannot be encoded (the first few are named; with `drop_bad_rows`
    they are counted instead) or none is left, and when a process dies.
    """
    count = worth(rows.size) if num_proc is None else num_proc
    arrays = Growing(ARRAYS, folder)
    try:
        with contextlib.closing(_pieces(rows, encoder, count)) as pieces:
            report = _collect(pieces, arrays, rows, drop_bad_rows, progress)
        report = replace(report, source=name or rows.source)
        return Examples((Part(**arrays.finish(), report=report),))
    finally:
        arrays.close()


def _pieces(rows: Rows, encoder: Encoder, num_proc: int) -> Generator[Piece]:
    """What the rows became, in their order."""
    if num_proc > 1:
        yield from in_workers(rows.numbered(), encoder, num_proc)
        return
    left = rows.numbered()
    for first in left:
        yield encode_piece(chain([first], islice(left, _ROWS - 1)), encoder, most=_TOKENS)


def _collect(
    pieces: Iterable[Piece],
    arrays: Growing,
    rows: Rows,
    drop_bad_rows: bool,
    progress: Progress | None,
) -> DataReport:
    """Puts the arrays of pieces one behind the other, and counts."""
    counts, drops = Counter[str](), Counter[str]()
    problems, bad = list(rows.problems), len(rows.bad)
    for piece in pieces:
        for said in piece.problems:
            problems += [said] if bad < SHOWN else []
            bad += 1
            if bad >= SHOWN and not drop_bad_rows:
                _raise(problems, rows.source, stopped=True)
        if piece.stopped is not None:
            raise RewrittenError(piece.stopped)
        arrays.add(piece.arrays)
        counts.update(piece.counts)
        drops.update(piece.drops)
        if progress is not None:
            progress(piece.done, len(rows))
    if not drop_bad_rows or not counts["examples"]:
        _raise(problems, rows.source, stopped=False)
    if bad:
        drops[BAD_ROW] = bad
    if not counts["examples"]:
        raise InputError(
            f"the data set {rows.source!r} leaves no example of its {len(rows)} rows: "
            f"{', '.join(f'{n} x {reason}' for reason, n in drops.items())}; raise data.max_length "
            "or complete the rows"
        )
    return DataReport(
        rows=len(rows),
        examples=counts["examples"],
        tokens=counts["tokens"],
        trained_tokens=counts["kept"],
        drops=dict(drops),
        truncated=counts["truncated"],
        lost_trained_tokens=counts["lost_trained_tokens"],
        all_trained_tokens=counts["trained_tokens"],
        rewritten=counts["rewritten"],
        bad_rows=tuple(problems),
        source=rows.source,
    )


def _raise(problems: Sequence[str], source: str, *, stopped: bool) -> None:
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        where = " (stopped there)" if stopped else ""
        raise InputError(
            f"{len(problems)} rows of {source!r} cannot be trained on{where}: "
            + "; ".join(problems)
        )
