# SPDX-License-Identifier: Apache-2.0
"""From a recipe to greedy answers to held-out prompts: samples to look at, and exact matches."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lora_tune.build_data import Data
from lora_tune.data.messages import Example
from lora_tune.errors import InputError
from lora_tune.generation import engine
from lora_tune.generation.sampling import Sampling
from lora_tune.generation.text import decode as decode_text
from lora_tune.recipe import schema
from lora_tune.recipe.figures import EXACT_MATCH, figure
from lora_tune.training.state import SplitModel, Weights

_ENDED, _ANYTHING = -1, -2
"""In place of a token: the answer has ended, as in `engine.steps`; whatever it is, it is right."""


@dataclass(frozen=True)
class Question:
    """Tokens of a held-out example up to its first trained span, that span, and its set's name."""

    prompt: list[int]
    expected: list[int]
    eval_set: str


def questions(data: Data, eval_set: str | None = None) -> Iterator[Question]:
    """Of the held-out examples, in order, or of those of one set, what can be asked.

    Texts, and pieces of a conversation that begin within an answer, ask nothing.
    """
    if data.held_out is None:
        return
    first = 0
    for count, name in zip(data.held_out.counts, data.eval_sets, strict=True):
        if eval_set in (None, name):
            for i in range(first, first + count):
                example = data.held_out[i]
                if not example.mask[0]:
                    yield Question(*_cut(example), name)
        first += count


def _cut(example: Example) -> tuple[list[int], list[int]]:
    first = int(np.argmax(example.mask))
    after = np.flatnonzero(~example.mask[first:])
    last = len(example.mask) if not after.size else first + int(after[0])
    return example.tokens[:first].tolist(), example.tokens[first:last].tolist()


def matched_questions(section: schema.Eval, data: Data) -> list[Question]:
    """The first `eval.num_exact_match` questions of every held-out set.

    Raises:
      InputError: a set has none.
    """
    if not section.num_exact_match:
        return []
    found = []
    for name in dict.fromkeys(data.eval_sets):
        own = list(islice(questions(data, name), section.num_exact_match))
        if not own:
            which = f"the rows of data.eval_sets {name!r}" if name else "the rows of data.eval_path"
            raise InputError(
                f"eval.num_exact_match asks held-out prompts, and {which} have none before what is "
                "learned, as texts have none; set it to 0, or give conversations"
            )
        found += own
    return found


def make_matching(
    section: schema.Eval,
    split: SplitModel,
    data: Data,
    *,
    rows: int,
    tokens: int,
    stop_ids: Sequence[int],
) -> Callable[[Weights], dict[str, float]]:
    """Makes `match(weights)`: the share of questions that greedy decoding answers exactly.

    An answer is right if it is the expected one token for token and ends where that ends. Where
    what is learned has no token that ends it, as of an example that was cut, it is right if it
    begins so. A batch is given up as soon as none of its answers can be right any more. It has
    `rows` answers at most, and no more than have room in `tokens` slots of a cache together.
    """
    asked = matched_questions(section, data)
    wanted = [_wanted(question.expected, stop_ids) for question in asked]
    if not asked:
        return lambda weights: {}
    new = max(map(len, wanted))
    slots = engine.cache_slots(max(len(q.prompt) for q in asked), new)
    rows = min(rows, max(tokens // slots, 1))
    options = {
        "max_new_tokens": new,
        "stop_ids": stop_ids,
        "sampling": Sampling(),
        "batch": rows,
        "cache_size": slots,
    }

    def match(weights: Weights) -> dict[str, float]:
        right: list[bool] = []
        for at in range(0, len(asked), rows):
            prompts = [question.prompt for question in asked[at : at + rows]]
            steps = engine.steps(split.graphdef, weights, prompts, **options)
            right += _right(steps, wanted[at : at + rows])
        found = {figure(EXACT_MATCH): float(np.mean(right))}
        sets = [question.eval_set for question in asked]
        for name in dict.fromkeys(sets):
            own = [ok for ok, each in zip(right, sets, strict=True) if each == name]
            found[figure(EXACT_MATCH, name)] = float(np.mean(own))
        return found

    return match


def _wanted(expected: list[int], stop_ids: Sequence[int]) -> list[int]:
    """What `engine.steps` yields for the expected answer."""
    stop = next((i for i, token in enumerate(expected) if token in stop_ids), None)
    return expected if stop is None else [*expected[:stop], _ENDED]


def _right(steps: Iterator[np.ndarray], wanted: Sequence[list[int]]) -> list[bool]:
    """Which rows are as wanted; takes no more steps than it needs."""
    table = np.full((len(wanted), max(map(len, wanted))), _ANYTHING)
    for row, tokens in enumerate(wanted):
        table[row, : len(tokens)] = tokens
    right = np.ones(len(wanted), bool)
    for column, found in zip(table.T, steps, strict=False):
        right &= (column == found) | (column == _ANYTHING)
        if not right.any():
            break
    return right.tolist()


def make_sampler(
    section: schema.Eval,
    split: SplitModel,
    data: Data,
    tokenizer: Any,
    *,
    stop_ids: Sequence[int],
) -> Callable[[Weights, Weights], list[dict[str, str]]] | None:
    """Makes `sample(trainable, frozen)`: answers to the first questions, and what was expected.

    None where the recipe or the held-out rows ask nothing.
    """
    asked = list(islice(questions(data), section.num_samples))
    if not asked:
        return None
    decode = functools.partial(decode_text, tokenizer)
    prompts = [question.prompt for question in asked]
    options = {
        "max_new_tokens": section.max_new_tokens,
        "stop_ids": stop_ids,
        "sampling": Sampling(),
        "once": True,
    }

    def sample(trainable: Weights, frozen: Weights) -> list[dict[str, str]]:
        answers = engine.complete(split.graphdef, {**frozen, **trainable}, prompts, **options)
        return [
            {
                "prompt": decode(question.prompt).strip(),
                "answer": decode(answer).strip(),
                "expected": decode(question.expected).strip(),
            }
            for question, answer in zip(asked, answers, strict=True)
        ]

    return sample
