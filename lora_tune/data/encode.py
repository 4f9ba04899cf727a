# SPDX-License-Identifier: Apache-2.0
"""From the rows of a source to examples."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from lora_tune.data.examples import SHOWN, DataReport, Examples
from lora_tune.data.messages import Encoder, Example
from lora_tune.data.sources import Rows
from lora_tune.data.turns import RewrittenError
from lora_tune.errors import InputError

Progress = Callable[[int, int], None]
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
    problems = list(rows.bad.values())[:SHOWN]
    totals: Counter[str] = Counter({"bad": len(rows.bad)})
    for number, (where, fields) in rows.numbered():
        try:
            encoded = encoder(fields, where=where)
        except RewrittenError:
            raise
        except InputError as error:
            if totals["bad"] < SHOWN:
                problems.append(str(error))
            totals["bad"] += 1
            if totals["bad"] >= SHOWN and not drop_bad_rows:
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
        stopped = " (stopped there)" if len(problems) == SHOWN else ""
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
