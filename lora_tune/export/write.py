# SPDX-License-Identifier: Apache-2.0
"""What a run has trained, written as an adapter for PEFT or as a whole model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from lora_tune import build
from lora_tune.hf import peft, save
from lora_tune.hf.hub import Source
from lora_tune.hf.load import ignored_tensors, stored_names
from lora_tune.hf.table import Leaf
from lora_tune.hf.table import Path as LeafPath
from lora_tune.lora.config import LoraConfig
from lora_tune.models.decoder import Family, Origin
from lora_tune.recipe import schema

State = nnx.State | Mapping[LeafPath, Any]


def adapter(
    state: State,
    leaves: Sequence[Leaf],
    lora: LoraConfig,
    origin: Origin,
    folder: Path,
    *,
    notes: str = "",
) -> None:
    """Writes the adapters of a state in PEFT format; `notes` are added to the model card.

    Raises:
      InputError: as of `lora_tune.hf.peft.save_adapter`.
    """
    peft.save_adapter(
        state,
        leaves,
        lora,
        folder,
        model_type=origin.model_type,
        base=origin.base_name,
        revision=origin.commit,
        notes=notes,
    )


def whole(
    state: State,
    leaves: Sequence[Leaf],
    family: Family,
    origin: Origin,
    folder: Path,
    *,
    recipe: schema.Recipe,
    source: Source,
    card: str | None = None,
) -> None:
    """Writes the whole model: the base with its adapters merged, or every trained parameter.

    Raises:
      InputError: as of `lora_tune.hf.save`.
    """
    base = origin.folder
    if recipe.lora is not None:
        save.save_merged(state, leaves, family, base, folder, card=card)
        return
    dtype = build.declared_dtype(source) or recipe.model.dtype
    pretrained = recipe.model.init == "pretrained"
    save.save_full(
        state,
        leaves,
        family,
        base,
        folder,
        dtype=jnp.dtype(dtype),
        carried=ignored_tensors(base, family) if pretrained else (),
        stored=stored_names(base, family) if pretrained else None,
        card=card,
    )
