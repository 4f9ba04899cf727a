# SPDX-License-Identifier: Apache-2.0
"""From a recipe to tokens: tokenizer, examples of every source, batches; without a model."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lora_tune import assets, machine, progress
from lora_tune.data import prepared
from lora_tune.data import tokenizer as tokenizers
from lora_tune.data.batch import Batch
from lora_tune.data.dataset import Dataset
from lora_tune.data.examples import Examples, join
from lora_tune.data.messages import Example
from lora_tune.data.prefetch import ahead
from lora_tune.data.store import Store
from lora_tune.errors import said_of
from lora_tune.hf.hub import Source
from lora_tune.recipe import schema

_ENCODING = (
    "max_length",
    "truncation_strategy",
    "assistant_only_loss",
    "completion_only_loss",
    "mask_history",
    "train_on_eos",
    "reasoning",
)
"""Keys of `data` that are options of `Encoder`."""
_SHOWN = 20_000_000
"""Bytes of rows from which on it is told how far tokenising has come."""


@dataclasses.dataclass(frozen=True)
class Data:
    """The rows of a run: endless training batches and, if there are any, held-out examples.

    Each source of the held-out examples belongs to one of the `eval_sets`, which are names; that of
    `data.eval_path` has none and is "".
    """

    train: Dataset
    held_out: Examples | None
    eval_sets: tuple[str, ...]
    first: Example

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Training batches from a step on, made ahead of the step that takes them."""
        return ahead(batch for _, batch in self.train.batches(start_step))

    def position(self, step: int) -> Mapping[str, Any]:
        """Where the data stands after `step` steps, for the checkpoint."""
        return self.train.position(step)

    def planned(self, step: int) -> Mapping[str, int]:
        """What step `step`, counted from 1, should count of tokens, for the tripwires."""
        return self.train.planned(step - 1)


def make_data(recipe: schema.Recipe, tokenizer: Any, local_rows: np.ndarray | None = None) -> Data:
    """Reads, encodes and packs the rows of a recipe; see `Dataset` on `local_rows`."""
    section = recipe.data
    examples = _training_examples(section, tokenizer, None)
    held_out, eval_sets = _held_out(section, tokenizer)
    given = section.all_sources()
    weights = [source.weight for source in given if source.weight is not None]
    dataset = Dataset(
        examples,
        max_length=section.max_length,
        batch_size=recipe.train.batch_size,
        packing=section.packing,
        seed=recipe.train.seed,
        shuffle=section.shuffle,
        weights=weights or None,
        local_rows=local_rows,
    )
    return Data(dataset, held_out, eval_sets, examples[0])


def first_examples(recipe: schema.Recipe, tokenizer: Any, count: int) -> list[Example]:
    """The examples of the first `count` training rows of a recipe."""
    found = _training_examples(recipe.data, tokenizer, count)
    return [found[i] for i in range(min(count, len(found)))]


def _training_examples(section: schema.Data, tokenizer: Any, count: int | None) -> Examples:
    """The examples of every source, or of the first `count` rows of the first one."""
    given = section.all_sources()
    if count is not None:
        given = [dataclasses.replace(given[0], max_samples=count)]
        section = dataclasses.replace(section, cache=False)
    parts = []
    for i, source in enumerate(given):
        with said_of(f"data.sources[{i}]" if section.sources else "data.path"):
            parts.append(_examples(section, tokenizer, source))
    return join(parts)


def _held_out(section: schema.Data, tokenizer: Any) -> tuple[Examples | None, tuple[str, ...]]:
    """The examples of all held-out sets, and the name of the set of each of their sources."""
    parts, names = [], []
    for i, each in enumerate(section.all_eval_sets()):
        for source in each.sources():
            with said_of(f"data.eval_sets[{i}]" if each.name else "data.eval_path"):
                parts.append(_examples(section, tokenizer, source))
            names.append(each.name)
    return join(parts) if parts else None, tuple(names)


def _examples(section: schema.Data, tokenizer: Any, source: schema.Source) -> Examples:
    read = prepared.Source(
        assets.resolve_all(source.path),
        split=source.split,
        subset=source.subset,
        columns=section.columns if source.columns is None else source.columns,
        format=source.format or section.format,
        max_samples=source.max_samples,
        drop_bad_rows=section.on_bad_row == "drop",
        name=source.called(),
    )
    options = {name: getattr(section, name) for name in _ENCODING}
    with progress.shown_as("tokenising", least=_SHOWN) as tell:
        means = prepared.Means(section.num_proc, _store(section.cache), progress=tell)
        return prepared.examples(read, tokenizer, options, means)


def _store(cache: bool | str) -> Store | None:
    if cache is False:
        return None
    if cache is not True:
        return Store(Path(os.path.expanduser(cache)))
    try:
        return Store(machine.user_cache() / "data")
    except FileNotFoundError:
        return None


def make_tokenizer(recipe: schema.Recipe, source: Source, vocab_size: int | None) -> Any:
    """The tokenizer of a recipe's model, with the recipe's chat template if it names one."""
    with said_of("model.path"):
        tokenizer = tokenizers.load(str(source.folder), vocab_size=vocab_size)
    template = recipe.model.chat_template
    if template is not None:
        with said_of("model.chat_template"):
            is_file = not tokenizers.is_template(template)
            given = str(assets.resolve(template)) if is_file else template
            tokenizers.use_template(tokenizer, given)
    return tokenizer
