# SPDX-License-Identifier: Apache-2.0
"""What a run has trained, written as an adapter for PEFT or as a whole model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from lora_tune import build, progress
from lora_tune.errors import shown
from lora_tune.hf import peft, save
from lora_tune.hf.hub import Source
from lora_tune.hf.load import ignored_tensors, stored_names
from lora_tune.hf.merge import MergeReport
from lora_tune.hf.shards import shard_bytes
from lora_tune.hf.table import Leaf
from lora_tune.hf.table import Path as LeafPath
from lora_tune.lora.config import LoraConfig
from lora_tune.models.family import Family, Origin
from lora_tune.recipe import schema

_SHOWN = 20

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
    max_shard_size: str | None = None,
    card: str | None = None,
) -> list[str]:
    """Writes the whole model: the base with its adapters merged, or every trained parameter.

    Args:
      state, leaves, family, origin: what was trained, and of which model.
      folder: to write.
      recipe: of the run.
      source: the base model.
      max_shard_size: largest file, as `5GB`; None takes the recipe's.
      card: text of the folder's README.md, None for none.

    Returns:
      Sentences that the user should read.

    Raises:
      InputError: as of `lora_tune.hf.save`.
    """
    base = origin.folder
    size = max_shard_size or recipe.save.max_shard_size
    most = None if size is None else shard_bytes(size)
    if recipe.lora is not None:
        with progress.shown_as("merging weights") as tell:
            options = {"max_shard_bytes": most, "card": card, "progress": tell}
            report = save.save_merged(state, leaves, family, base, folder, **options)
        return not_finite_note(report, base)
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
        max_shard_bytes=most or save.FULL_SHARD,
        card=card,
    )
    return []


def not_finite_note(report: MergeReport, base: Path) -> list[str]:
    """A sentence that names copied tensors with a NaN or an infinity, if there are any."""
    names = [shown(name) for name in report.not_finite]
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [
        f"warning: {', '.join(names[:_SHOWN])}{more} hold a NaN or an infinity; the model does not "
        f"use them, and they were copied as they are in {base}"
    ]
