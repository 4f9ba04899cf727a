# SPDX-License-Identifier: Apache-2.0
"""From a recipe to what trains: first all that it names, then the model on its devices."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from lora_tune import build, build_answers, build_data
from lora_tune.errors import said_of
from lora_tune.models.decoder import Decoder
from lora_tune.plan.model_flops import flops_per_token
from lora_tune.plan.roofline import peak_flops
from lora_tune.recipe import schema
from lora_tune.training import loop
from lora_tune.training.gauges import Gauges
from lora_tune.training.state import SplitModel, split_model


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a recipe names, read and checked, but for the weights of the model."""

    recipe: schema.Recipe
    source: Any
    mesh: Mesh | None
    tokenizer: Any
    data: build_data.Data

    @classmethod
    def read(cls, recipe: schema.Recipe) -> "Inputs":
        """Reads everything that a recipe names.

        Raises:
          InputError: something is missing, damaged or does not fit the rest.
        """
        mesh = build.make_mesh(recipe.mesh)
        path, revision = recipe.model.path, recipe.model.revision
        with said_of("model.path"):
            weights = recipe.model.init == "pretrained"
            source = build.find_source(path, revision=revision, weights=weights)
            abstract = build.abstract_model(source, build.DecoderOptions())
        build.check_size(recipe, abstract, mesh)
        tokenizer = build_data.make_tokenizer(recipe, source, abstract.config.vocab_size)
        data = build_data.make_data(recipe, tokenizer, build.local_rows(recipe, mesh))
        build_answers.matched_questions(recipe.eval, data)  # fails before weights are read
        inputs = cls(recipe, source, mesh, tokenizer, data)
        build.optimizer_of(recipe, inputs.total_steps)  # fails before weights are read
        return inputs

    @functools.cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        train = self.recipe.train
        if train.max_steps is not None:
            return train.max_steps
        assert train.num_train_epochs is not None  # the recipe's checks: one of the two is set
        return self.data.train.steps(train.num_train_epochs)


@dataclasses.dataclass(frozen=True)
class Training:
    """A model, its first optimizer state and its step, on their devices.

    Attributes:
      model: the model.
      split: its weights, split into trained and frozen ones.
      state: (trainable, opt_state, frozen) before the first step.
      fixed: arguments of `loop.run` that no resume changes.
    """

    model: Decoder
    split: SplitModel
    state: loop.State
    fixed: Mapping[str, Any]

    @classmethod
    def build(cls, inputs: Inputs) -> "Training":
        """Reads the weights and makes adapters, optimizer and step."""
        recipe, mesh = inputs.recipe, inputs.mesh
        model = build.make_model(recipe, inputs.source, mesh)
        split = split_model(model)
        optimizer, schedule = build.optimizer_of(recipe, inputs.total_steps)
        opt_state, opt_shardings = build.init_optimizer(optimizer, split, mesh)
        fixed = {
            "step_fn": build.jit_step(recipe, split, optimizer, opt_shardings, mesh),
            "data": inputs.data,
            "place": build.make_place(mesh, recipe.train.gradient_accumulation_steps),
            "schedule": schedule,
            "log_every": recipe.log.every,
            "seed": recipe.train.seed,
            "gauges": _gauges(model, split, inputs),
        }
        return cls(model, split, (split.trainable, opt_state, split.frozen), fixed)


def _gauges(model: Decoder, split: SplitModel, inputs: Inputs) -> Gauges:
    devices = jax.local_devices()[:1] if inputs.mesh is None else list(inputs.mesh.devices.flat)
    operations = flops_per_token(model, split, inputs.data.train.examples.lengths)
    return Gauges(devices, operations, peak_flops(devices[0].device_kind))
