# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with data that can be trained on: counted, and judged."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lora_tune.build_data import Data
from lora_tune.data import batch, duplicates
from lora_tune.data.dataset import Dataset
from lora_tune.data.examples import Examples, Part
from lora_tune.data.flat import pieces

Verdict = Literal["ok", "warning", "error"]
_FULL = 0.8


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, and what was found."""

    verdict: Verdict
    name: str
    text: str


def run(data: Data, tokenizer: Any, *, max_overlap: float) -> list[Check]:
    """Every check of the data of a run.

    `max_overlap` is the share of held-out examples that may be among the training examples too;
    more is an error, as are trained tokens that packing loses. The rest are warnings.
    """
    found = [*_conservation(data.train), *_rows(data.train), *_tokens(data.train, tokenizer)]
    if data.held_out is None:
        return [*found, Check("warning", "held-out rows", "none: set data.eval_path to evaluate")]
    return [*found, *_overlap(data.train.examples, data.held_out, max_overlap)]


def _conservation(dataset: Dataset) -> Iterator[Check]:
    """Trained tokens that rows had are in the batches, or counted as lost."""
    report, rows = dataset.examples.report, dataset.epoch_rows(0)
    packed = _trained_in_batches(dataset, rows)
    examples = [dataset.examples[i].trained_tokens for row in rows for i in row]
    kept = report.trained_tokens + report.lost_trained_tokens == report.all_trained_tokens
    whole = dataset.weights is not None or packed == report.trained_tokens
    text = (
        f"{report.all_trained_tokens:,} trained tokens in the rows, {packed:,} in the batches of "
        f"an epoch, {report.lost_trained_tokens:,} lost by truncation"
    )
    good = kept and whole and packed == sum(examples)
    yield Check("ok" if good else "error", "conservation", text)


def _trained_in_batches(dataset: Dataset, rows: list[list[int]]) -> int:
    total = 0
    for start in range(0, len(rows), dataset.batch_size):
        documents = [
            [dataset.examples[i] for i in row] for row in rows[start : start + dataset.batch_size]
        ]
        arrays = batch.build(documents, max_length=dataset.max_length)
        total += int(arrays["weights"].sum())
    return total


def _rows(dataset: Dataset) -> Iterator[Check]:
    report = dataset.report
    drops = ", ".join(f"{count:,} {reason}" for reason, count in report.drops.items())
    yield Check("warning" if drops else "ok", "dropped", drops or "nothing")
    for said in report.bad_rows:
        yield Check("warning", "malformed", said)
    lost = report.lost_trained_tokens / max(report.all_trained_tokens, 1)
    text = f"{report.truncated:,} examples, with {lost:.1%} of the trained tokens"
    yield Check("warning" if report.truncated else "ok", "truncated", text)
    text = f"{report.rewritten:,} turns are written differently once their conversation goes on"
    yield Check("warning" if report.rewritten else "ok", "chat template", text)
    again = duplicates.repeated(dataset.examples)
    text = f"{again:,} of {report.examples:,} examples equal an earlier one"
    yield Check("warning" if again else "ok", "duplicates", text)
    full = report.packing_efficiency
    text = f"sequences are {full:.0%} full"
    poor = dataset.packing and full < _FULL and len(dataset.epoch_rows(0)) > 1
    yield Check("warning" if poor else "ok", "packing", text)


def _tokens(dataset: Dataset, tokenizer: Any) -> Iterator[Check]:
    """Tokens that end and begin texts, where models and templates often disagree."""
    examples = dataset.examples
    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    special |= set(tokenizer.all_special_ids)
    ends = sum(_learned(part, special) for part in examples.parts)
    text = f"{ends:,} special tokens are learned, such as those that end a turn"
    yield Check(
        "ok" if ends else "warning",
        "ends",
        text if ends else "no special token is learned: the model does not learn to stop",
    )
    begin = tokenizer.bos_token_id
    if begin is not None:
        twice = sum(_begin_twice(part, begin) for part in examples.parts)
        text = f"{twice:,} examples begin with two"
        yield Check("warning" if twice else "ok", "begin tokens", text)


def _learned(part: Part, special: set[int]) -> int:
    """Trained tokens of a part that are among the special ones."""
    found = start = 0
    for tokens in pieces(part.tokens):
        learned = part.mask[start : start + len(tokens)]
        found += int((np.isin(tokens, list(special)) & learned).sum())
        start += len(tokens)
    return found


def _begin_twice(part: Part, begin: int) -> int:
    """Examples that begin with the token `begin` two times."""
    starts = part.offsets[:-1][part.lengths > 1]
    return int(((part.tokens[starts] == begin) & (part.tokens[starts + 1] == begin)).sum())


def _overlap(train: Examples, held_out: Examples, most: float) -> Iterator[Check]:
    same = duplicates.seen_in_training(train, held_out)
    share = same / len(held_out)
    verdict: Verdict = "error" if share > most else "warning" if same else "ok"
    text = f"{same:,} of {len(held_out):,} held-out examples are training examples too"
    text += f", more than {most:.0%}" if verdict == "error" else ""
    yield Check(verdict, "overlap", text)
    same = duplicates.prompts_seen_in_training(train, held_out)
    text = f"{same:,} held-out prompts are training prompts too"
    yield Check("warning" if same else "ok", "prompts", text)
