# SPDX-License-Identifier: Apache-2.0
"""The Python interface: models, adapters and whole runs."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lora_tune import build, build_data, progress
from lora_tune import recipe as recipes
from lora_tune.errors import InputError
from lora_tune.generation.generate import generate
from lora_tune.hf import merge, peft, save
from lora_tune.hf.hub import check_complete
from lora_tune.hf.load import check_tensors, open_base
from lora_tune.hf.shards import shard_bytes
from lora_tune.hf.table import bind, module_name
from lora_tune.lora import inject
from lora_tune.lora.config import LoraConfig
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.run import Result, train
from lora_tune.trained import read_recipe

__all__ = [
    "LoraConfig",
    "Result",
    "add_lora",
    "generate",
    "list_targets",
    "load_adapter",
    "load_model",
    "load_run",
    "save_adapter",
    "save_merged",
    "train",
]


def load_model(
    path: str | Path,
    *,
    dtype: str = "bfloat16",
    mesh: Mesh | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    scan_layers: bool = True,
    param_scan_axis: int = 0,
    remat: str = "full",
) -> tuple[Decoder, Any]:
    """Loads a model and its tokenizer.

    Args:
      path: a folder or hub id in Hugging Face format, or `lora_tune:NAME`.
      dtype: "bfloat16" or "float32", of weights and computation.
      mesh: a mesh with the axes of `lora_tune.sharding.make_mesh`; each device then loads its own
        slices of the weights.
      revision: branch, tag or commit of a hub id.
      chat_template: Jinja file used instead of the tokenizer's own chat template.
      scan_layers: run repeated layers under `jax.lax.scan`; False unrolls them.
      param_scan_axis: position of the stack axes in the weights of scanned layers.
      remat: what layers keep for the backward pass, as `model.remat` of a recipe.

    Returns:
      The model, called as `model(tokens, segment_ids=None, positions=None) -> logits [B, T, V]`,
      and the tokenizer.

    Raises:
      InputError: the folder, its configuration or its files are not what they should be.
    """
    _expect("path", path, str | Path)
    _expect("mesh", mesh, Mesh | None)
    for name, text in (("revision", revision), ("chat_template", chat_template)):
        _expect(name, text, str | None)
    _expect("scan_layers", scan_layers, bool)
    _expect("param_scan_axis", param_scan_axis, int)
    if dtype not in ("bfloat16", "float32"):
        raise InputError(f"dtype is {dtype!r}, expected 'bfloat16' or 'float32'")
    section = recipes.Model(
        path=str(path),
        revision=revision,
        dtype=cast(Any, dtype),
        remat=cast(Any, remat),
        scan_layers=scan_layers,
        param_scan_axis=param_scan_axis,
        chat_template=chat_template,
    )
    return _load(recipes.Recipe(model=section), mesh)


def _load(recipe: recipes.Recipe, mesh: Mesh | None) -> tuple[Decoder, Any]:
    """The base model of a recipe and its tokenizer; for use rather than for training."""
    section = recipe.model
    random = section.init == "random"
    source = build.find_source(section.path, revision=section.revision, weights=not random)
    options = DecoderOptions(
        dtype=jnp.dtype(section.dtype),
        param_dtype=jnp.dtype(section.dtype),
        scan_layers=section.scan_layers,
        param_scan_axis=section.param_scan_axis,
        remat=section.remat,
    )
    abstract = build.abstract_model(source, options)
    seed = recipe.train.seed if random else None
    model = build.load_weights(abstract, mesh=mesh, random_seed=seed)
    return model, build_data.make_tokenizer(recipe, source, abstract.config.vocab_size)


def load_run(folder: str | Path, overrides: Sequence[str] = ()) -> tuple[Decoder, Any]:
    """Loads what a run has made: its base model with its `adapter/`, or else its `merged/`.

    Args:
      folder: the run folder; its `recipe.yaml` says which base model, type, mesh and template.
      overrides: `key=value` strings that replace keys of that recipe, e.g. `model.path=…` where
        the base model has moved.

    Raises:
      InputError: this is no run folder, or the run has not written its result yet.
    """
    _expect("folder", folder, str | Path)
    folder = Path(folder)
    recipe = read_recipe(folder, overrides)
    adapter, merged = folder / "adapter", folder / "merged"
    if not adapter.is_dir() and not merged.is_dir():
        raise InputError(
            f"{folder} has neither adapter/ nor merged/, which a run writes at its end; give its "
            f"command again to go on, or model.path={recipe.model.path} for the base model alone"
        )
    mesh = build.make_mesh(recipe.mesh)
    if adapter.is_dir():
        model, tokenizer = _load(recipe, mesh)
        return load_adapter(model, adapter), tokenizer
    section = dataclasses.replace(recipe.model, path=str(merged), revision=None, init="pretrained")
    return _load(dataclasses.replace(recipe, model=section), mesh)


def _become(model: Decoder, other: Decoder) -> Decoder:
    """Makes `model` what `other` is: callers hold on to the object they have."""
    vars(model).clear()
    vars(model).update(vars(other))
    model.__class__ = type(other)
    return model


def add_lora(model: Decoder, config: LoraConfig | None = None, *, seed: int = 0) -> Decoder:
    """Adds adapters to a model, in place, and returns it.

    The base weights stay the same arrays, and the logits stay the same bit for bit until the
    adapters are trained. `nnx.state(model, nnx.LoRAParam)` holds the adapters.

    Raises:
      InputError: a target matches nothing, the model has adapters already, or an argument is of
        another type.
    """
    _expect("model", model, Decoder)
    _expect("config", config, LoraConfig | None)
    _expect("seed", seed, int)
    if not 0 <= seed < 2**32:
        raise InputError(f"seed is {seed}, expected at least 0 and below 2**32")
    return _become(model, inject.add_lora(model, config or LoraConfig(), seed=seed))


def load_adapter(model: Decoder, folder: str | Path) -> Decoder:
    """Adds a saved adapter, ours or any plain LoRA of PEFT, to a model in place; returns it.

    Raises:
      InputError: the adapter does not fit the model, or the model has adapters already.
    """
    _expect("model", model, Decoder)
    _expect("folder", folder, str | Path)
    return _become(model, build.with_adapter(model, folder))


def _expect(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        names = kind.__name__ if isinstance(kind, type) else re.sub(r"\w+\.", "", str(kind))
        raise InputError(f"{name} is {value!r:.80}, expected {names}")


def _config(model: Decoder, caller: str) -> LoraConfig:
    _expect("model", model, Decoder)
    if not hasattr(model, "adapter"):
        raise InputError(f"{caller}: the model has no adapters; add_lora or load_adapter first")
    return model.adapter.config


def save_adapter(
    model: Decoder, folder: str | Path, *, allow_untrained: bool = False
) -> dict[str, Any]:
    """Writes the adapters in PEFT format; returns the content of `adapter_config.json`.

    Raises:
      InputError: no adapters, adapters that are untrained or not finite, a folder that is not ours
        to replace, or a full disk.
    """
    config = _config(model, "save_adapter")
    return peft.save_adapter(
        nnx.state(model, inject.adapter_filter),
        bind(model.family, model),
        config,
        folder,
        model_type=model.origin.model_type,
        base=model.origin.base_name,
        revision=model.origin.commit,
        allow_untrained=allow_untrained,
    )


def save_merged(
    model: Decoder, folder: str | Path, *, max_shard_size: str | int | None = None
) -> merge.MergeReport:
    """Writes the whole model in Hugging Face format, its adapters merged into the weights.

    Merged tensors are computed in float32 from the base checkpoint and rounded once; every other
    tensor of the checkpoint is copied byte for byte.

    Args:
      model: with adapters.
      folder: to write.
      max_shard_size: largest file, as bytes or as `5GB`; None keeps the base's own files.

    Raises:
      InputError: no adapters, a folder that is not ours to replace, or a full disk.
    """
    _config(model, "save_merged")
    most = None if max_shard_size is None else shard_bytes(max_shard_size)
    with progress.shown_as("merging weights") as tell:
        return save.save_merged(
            nnx.state(model, inject.adapter_filter),
            bind(model.family, model),
            model.family,
            model.origin.folder,
            folder,
            max_shard_bytes=most,
            progress=tell,
        )


def list_targets(path: str, *, revision: str | None = None) -> list[tuple[str, tuple, int]]:
    """Every kind of module of a model that can take an adapter: (name, [out, in], count).

    Reads only the configuration; of a folder also what its files say they hold. Layer and expert
    numbers are shown as `*`.

    Raises:
      InputError: there is no such model, or the weights in the folder do not fit its configuration.
    """
    source = build.find_source(path, revision=revision, weights=False)
    model = build.abstract_model(source, DecoderOptions())
    leaves = bind(model.family, model)
    if Path(path).expanduser().is_dir():
        check_complete(source)
        check_tensors(open_base(source.folder, model.family), leaves, model.family)
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    for leaf in leaves:
        if leaf.adaptable:
            for name in np.ravel(leaf.names):
                stars = ["*" if part.isdigit() else part for part in module_name(name).split(".")]
                kind = (".".join(stars), tuple(leaf.hf_shape))
                kinds[kind] = kinds.get(kind, 0) + 1
    return [(name, shape, count) for (name, shape), count in kinds.items()]
