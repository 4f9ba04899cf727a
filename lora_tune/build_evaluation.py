# SPDX-License-Identifier: Apache-2.0
"""From a recipe to its evaluation: figures of every held-out set and of every source in it."""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from lora_tune import build, sharding
from lora_tune.build_answers import make_matching
from lora_tune.build_data import Data
from lora_tune.data.dataset import eval_batches
from lora_tune.recipe import schema
from lora_tune.recipe.figures import figure
from lora_tune.training.state import SplitModel, Weights
from lora_tune.training.step import make_eval_step

Sums = dict[str, np.ndarray]


def batch_rows(recipe: schema.Recipe, mesh: Mesh | None) -> int:
    """Rows of an evaluation batch: as the recipe says, rounded up to what the mesh divides."""
    shards = _shards(mesh)
    wanted = recipe.eval.batch_size or (
        recipe.train.batch_size // recipe.train.gradient_accumulation_steps
    )
    return -(-wanted // shards) * shards


def _shards(mesh: Mesh | None) -> int:
    return 1 if mesh is None else int(np.prod([mesh.shape[a] for a in sharding.BATCH_AXES]))


def make_evaluation(
    recipe: schema.Recipe,
    split: SplitModel,
    data: Data,
    mesh: Mesh | None,
    *,
    stop_ids: Sequence[int] = (),
) -> Callable[[Weights, Weights], dict[str, float]] | None:
    """Makes `evaluate(trainable, frozen)` over all held-out examples; None if there are none.

    Its figures are sums over tokens (or answers) divided once, so neither the batch size nor
    packing nor padding changes them: `eval_loss` and `eval_token_accuracy` over trained tokens, and
    `eval_accuracy`, the share of examples whose every trained token is the most likely one: those
    that greedy decoding answers word for word. All sets together have these; each set that has a
    name has `eval_NAME_loss` and so on, and each source of a set with several `eval_loss/SOURCE` or
    `eval_NAME_loss/SOURCE`. With `eval.num_exact_match` there are `eval_exact_match` and
    `eval_NAME_exact_match`, of answers that end with one of `stop_ids`.
    """
    held_out = data.held_out
    if held_out is None:
        return None
    step = jax.jit(make_eval_step(split, mesh=mesh, sources=len(held_out.counts)))
    place = build.make_place(mesh, 1)
    size = batch_rows(recipe, mesh)
    # Every device has all rows of the cache, so what it has of a batch of rows is the measure.
    tokens = size // _shards(mesh) * recipe.data.max_length
    room = {"rows": size, "tokens": tokens}
    match = make_matching(recipe.eval, split, data, **room, stop_ids=stop_ids)
    options = {
        "max_length": recipe.data.max_length,
        "batch_size": size,
        "packing": recipe.data.packing,
    }

    def evaluate(trainable: Weights, frozen: Weights) -> dict[str, float]:
        total: Sums = {}
        for batch in eval_batches(held_out, **options):
            rows = {name: array[0] for name, array in place(batch).items()}
            for name, value in jax.device_get(step(trainable, frozen, rows)).items():
                total[name] = total.get(name, 0.0) + value.astype(np.float64)
        figures = dict(_figures(total, data.eval_sets, held_out.names))
        return figures | match({**frozen, **trainable})

    return evaluate


def _figures(total: Sums, sets: tuple[str, ...], sources: list[str]) -> Iterator[tuple[str, float]]:
    """Figures of everything, then of each set, then of the sources of sets with several.

    Args:
      total: sums of each source.
      sets: the name of the set of each source.
      sources: the name of each source.
    """
    yield from _of("", "", {key: value.sum() for key, value in total.items()})
    for name in dict.fromkeys(sets):
        own = np.array([each == name for each in sets])
        if name:
            yield from _of(name, "", {key: value[own].sum() for key, value in total.items()})
        if own.sum() > 1:
            for i in np.flatnonzero(own).tolist():
                suffix = f"/{sources[i]}"
                yield from _of(name, suffix, {key: value[i] for key, value in total.items()})


def _of(name: str, suffix: str, sums: dict[str, float]) -> Iterator[tuple[str, float]]:
    tokens = max(sums["trained_tokens"], 1.0)
    yield figure("loss", name) + suffix, float(sums["nll"] / tokens)
    yield figure("token_accuracy", name) + suffix, float(sums["correct_tokens"] / tokens)
    answers = max(sums["documents"], 1.0)
    yield figure("accuracy", name) + suffix, float(sums["exact_documents"] / answers)
    yield figure("examples", name) + suffix, float(sums["documents"])
