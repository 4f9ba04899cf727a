# SPDX-License-Identifier: Apache-2.0
"""What the figures of an evaluation are called in the log, as the Trainer of transformers does."""

from lora_tune.recipe.schema import Recipe

MEANS = ("loss", "token_accuracy", "accuracy")
"""Figures of every evaluation: means over trained tokens, and the share of examples all right."""

EXACT_MATCH = "exact_match"
"""The share of answers that are as expected, with `eval.num_exact_match`."""


def figure(kind: str, eval_set: str = "") -> str:
    """Return `eval_KIND`, or `eval_NAME_KIND` of a set with a name."""
    return f"eval_{eval_set}_{kind}" if eval_set else f"eval_{kind}"


def figures(recipe: Recipe) -> list[str]:
    """Return the figures that an evaluation of a recipe has, those of all sets together first."""
    names = ["", *(each.name for each in recipe.data.all_eval_sets() if each.name)]
    kinds = [*MEANS, *([EXACT_MATCH] if recipe.eval.num_exact_match else [])]
    return [figure(kind, name) for name in names for kind in kinds]
