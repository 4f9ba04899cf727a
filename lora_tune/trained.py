# SPDX-License-Identifier: Apache-2.0
"""What a run has trained, read from its folder: the recipe, and the weights of its checkpoint."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_tune import build
from lora_tune import recipe as recipes
from lora_tune.checkpoint.choice import read_trained
from lora_tune.hf.adapters import SCALE
from lora_tune.hf.hub import Source
from lora_tune.hf.table import Leaf, bind
from lora_tune.hf.table import Path as LeafPath
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import adapted_stacks, add_lora
from lora_tune.models.decoder import Decoder, Origin
from lora_tune.recipe import schema
from lora_tune.training.state import Weights, split_model


def read_recipe(folder: Path, overrides: Sequence[str] = ()) -> schema.Recipe:
    """The recipe of a run folder, for use of what was trained rather than for training.

    Raises:
      InputError: this is no run folder, or an override is wrong.
    """
    recipe = recipes.load(recipes.of_run(folder), overrides)
    # What training kept for its backward pass is of no use here, and not every device can do it.
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, remat="full"))


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A run and the checkpoint that it exports: the newest, or the best if its recipe says so.

    Attributes:
      folder: the run folder.
      recipe: the recipe of the run.
      source: the base model.
      model: the base model as shapes.
      leaves: its bound table.
      lora: the adapters, None where every parameter was trained.
      step: of the checkpoint, None where there is none.
      weights: what was trained, by path; shapes alone where there is no checkpoint.
      best_by: the figure by which the checkpoint is the best; None where it is the newest.
    """

    folder: Path
    recipe: schema.Recipe
    source: Source
    model: Decoder
    leaves: tuple[Leaf, ...]
    lora: LoraConfig | None
    step: int | None
    weights: Weights
    best_by: str | None = None

    @property
    def origin(self) -> Origin:
        """Where the base came from."""
        assert self.model.origin is not None  # build gave it one
        return self.model.origin

    @property
    def model_type(self) -> str:
        """That of the base's `config.json`."""
        return self.origin.model_type

    def adapter_state(self) -> dict[LeafPath, Any]:
        """The adapters for `lora_tune.hf`, their scales those of the recipe; zeros for shapes."""
        assert self.lora is not None
        arrays: dict[LeafPath, Any] = {
            _path(key): array if self.step is not None else np.zeros(array.shape, array.dtype)
            for key, array in self.weights.items()
        }
        for path, stack in adapted_stacks(self.leaves, self.lora).items():
            arrays[(*path[:-1], SCALE)] = stack.scales
        return arrays


def read(folder: Path | str, overrides: Sequence[str] = ()) -> Trained:
    """Reads a run folder; nothing in it is changed, and no weight of the base is read.

    Args:
      folder: the run folder.
      overrides: `key=value` strings that replace keys of its recipe, as `model.path=…` where the
        base model has moved.

    Raises:
      InputError: this is no run folder, its base model is not there, or its checkpoint is
        damaged or not that of its recipe.
    """
    folder = Path(folder)
    recipe = read_recipe(folder, overrides)
    pretrained = recipe.model.init == "pretrained"
    with build.said_of("model.path"):
        path, revision = recipe.model.path, recipe.model.revision
        source = build.find_source(path, revision=revision, weights=pretrained)
        model = build.abstract_model(source, build.decoder_options(recipe))
    lora = None if recipe.lora is None else recipe.lora.config()
    wanted = split_model(model if lora is None else add_lora(model, lora)).trainable
    found = read_trained(folder / "checkpoints", wanted, metric=recipe.train.exported_by())
    leaves = bind(model.family, model)
    described = folder, recipe, source, model, leaves, lora
    if found is None:
        return Trained(*described, None, wanted)
    return Trained(*described, found.step, found.weights, found.metric)


def _path(key: str) -> LeafPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("/"))


def with_weights(model: Decoder, weights: Mapping[str, Any]) -> Decoder:
    """The model, which has adapters if the run has, with the trained weights of a run in place."""
    split = split_model(model)
    return split.merge({name: weights[name] for name in split.trainable})
