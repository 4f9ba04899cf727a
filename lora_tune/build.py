# SPDX-License-Identifier: Apache-2.0
"""From a recipe to the parts of a run: mesh, model, data, optimizer, step, checkpoints.

With `build_data`, the only file that knows both the recipe and every component.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_tune import assets, distributed, progress, sharding
from lora_tune.errors import InputError, said_of
from lora_tune.hf.files import read_json
from lora_tune.hf.hub import Source, check_complete, find_model
from lora_tune.hf.load import load_params
from lora_tune.hf.peft import adapter_arrays, load_adapter
from lora_tune.hf.table import bind
from lora_tune.layers import sequence
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import adapted_stacks, add_lora
from lora_tune.lora.targets import StackTarget
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions, Family, Origin
from lora_tune.models.fields import max_positions
from lora_tune.models.initial import initialise
from lora_tune.recipe import schema
from lora_tune.training.optim import Schedule, make_optimizer
from lora_tune.training.state import SplitModel
from lora_tune.training.step import make_step

Batch = Mapping[str, np.ndarray]
_HOST_BYTES = 20
"""Bytes of a token in a batch: five arrays of 32 bits (`lora_tune.data.batch`)."""


def find_source(path: str, *, revision: str | None = None, weights: bool = True) -> Source:
    """Finds a model by folder, hub id or `lora_tune:NAME`; with `weights`, a complete one."""
    source = find_model(str(assets.resolve(path)), revision=revision, weights=weights)
    if weights:
        check_complete(source)
    return source


def abstract_model(source: Source, options: DecoderOptions) -> Decoder:
    """Builds the decoder that a model folder describes, without weights.

    Raises:
      InputError: no readable `config.json`, an unknown model type, or a configuration that asks
        for something the family does not do.
    """
    where = source.folder / "config.json"
    config = read_json(where)
    model = decoder_of(config, options, where=str(where))
    model.origin = Origin(config["model_type"], source.folder, source.base_name, source.commit)
    return model


def decoder_of(config: Mapping[str, Any], options: DecoderOptions, *, where: str) -> Decoder:
    """Builds the decoder of a Hugging Face configuration, of shapes; `where` is what errors name.

    Raises:
      InputError: an unknown model type, or something that the family does not do.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    family: Family = FAMILIES[model_type]
    return Decoder(family, family.read_config(config), options)


def declared_dtype(source: Source) -> str | None:
    """The type that a model's `config.json` gives its weights: that of a fully trained export."""
    config = read_json(source.folder / "config.json")
    declared = config.get("dtype", config.get("torch_dtype"))
    return declared if declared in ("float32", "bfloat16") else None


def make_mesh(section: schema.Mesh) -> Mesh | None:
    """The mesh of a recipe, None for a single device."""
    sizes = dataclasses.asdict(section)
    mesh = sharding.make_mesh(**sizes)
    if jax.process_count() > 1 and mesh.size < jax.device_count():
        raise InputError(
            f"mesh: {jax.process_count()} processes have {jax.device_count()} devices together, "
            f"the mesh uses {mesh.size}; make the mesh axes multiply to {jax.device_count()}"
        )
    return mesh if mesh.size > 1 else None


def check_remat(remat: str, platform: str) -> None:
    """Refuses to keep layer inputs in another memory where there is but one."""
    if remat == "offload" and platform == "cpu":
        raise InputError(
            "model.remat=offload keeps what layers need for the backward pass in the host's memory "
            "instead of the device's, but the device is a cpu, which has no other; use "
            "model.remat=full, which keeps the same on the device"
        )


def load_weights(model: Decoder, *, mesh: Mesh | None, random_seed: int | None = None) -> Decoder:
    """Returns the abstract model with its checkpoint's weights, or fresh ones from a seed.

    Each device receives its own slices; adapters and the step follow this placement.

    Raises:
      InputError: what `model.remat` asks for cannot be had on these devices, or they do not divide
        a weight or the heads of a layer.
    """
    platform = (jax.devices() if mesh is None else mesh.devices.flat)[0].platform
    check_remat(model.options.remat, platform)
    leaves = bind(model.family, model)
    shardings = None
    if mesh is not None:
        sequence.check_heads(mesh.shape["sequence"], model.config)
        sharding.check_divides({leaf.dotted: (leaf.shape, leaf.axes) for leaf in leaves}, mesh)
        shardings = {leaf.path: sharding.named_sharding(mesh, leaf.axes) for leaf in leaves}
    if random_seed is not None:
        return initialise(model, seed=random_seed, shardings=shardings)
    with progress.shown_as("loading weights") as tell:
        folder = model.origin.folder
        state = load_params(model, model.family, folder, shardings=shardings, progress=tell)
    return nnx.merge(nnx.split(model)[0], state)


def with_adapter(model: Decoder, folder: Path | str, *, dropout: float | None = None) -> Decoder:
    """Returns the model with a saved adapter, ours or PEFT's.

    Args:
      model: a decoder with weights; not modified.
      folder: of the adapter.
      dropout: of its inputs in training, None for what the adapter says.

    Raises:
      InputError: the adapter does not fit the model (see `lora_tune.hf.peft.load_adapter`).
    """
    leaves = bind(model.family, model)
    config, adapters = load_adapter(folder, leaves, model_type=model.origin.model_type)
    if dropout is not None:
        config = dataclasses.replace(config, lora_dropout=dropout)
    adapted = add_lora(model, config)
    for path, array in adapter_arrays(adapters).items():
        variable = _at(adapted, path)
        variable.set_value(distributed.put(array, variable.get_value().sharding))
    return adapted


def _at(module: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        module = module[part] if isinstance(part, int) else getattr(module, part)
    return module


def decoder_options(recipe: schema.Recipe) -> DecoderOptions:
    """How the decoder of a recipe is laid out and run in training."""
    dtype = jnp.dtype(recipe.model.dtype)
    return DecoderOptions(
        dtype=dtype,
        # Updates of trained weights round to zero in bfloat16; frozen weights have no updates.
        param_dtype=jnp.dtype(jnp.float32) if recipe.lora is None else dtype,
        scan_layers=recipe.model.scan_layers,
        param_scan_axis=recipe.model.param_scan_axis,
        remat=recipe.model.remat,
        loss_chunk=recipe.train.loss_chunk_size,
    )


def make_model(recipe: schema.Recipe, source: Source, mesh: Mesh | None) -> Decoder:
    """The model of a recipe, with weights and, unless `lora: null`, with adapters."""
    lora, train = recipe.lora, recipe.train
    abstract = abstract_model(source, decoder_options(recipe))
    if lora is not None:
        # A misspelt target fails before any weight is read.
        adapted_stacks(bind(abstract.family, abstract), lora.config())
    seed = train.seed if recipe.model.init == "random" else None
    model = load_weights(abstract, mesh=mesh, random_seed=seed)
    if lora is None:
        return model
    if lora.adapter_path is not None:
        return _warm_start(model, lora)
    return add_lora(model, lora.config(), seed=train.seed if lora.seed is None else lora.seed)


def _warm_start(model: Decoder, lora: schema.Lora) -> Decoder:
    with said_of("lora.adapter_path"):
        adapted = with_adapter(model, lora.adapter_path or "", dropout=lora.lora_dropout)
    leaves = bind(model.family, model)
    held: LoraConfig = adapted.adapter.config
    found, asked = (_placement(adapted_stacks(leaves, c)) for c in (held, lora.config()))
    if found != asked:
        targets = held.target_modules
        raise InputError(
            f"lora.adapter_path: {lora.adapter_path} has other modules, ranks or scales than the "
            f"recipe asks for; set lora.r={held.r}, lora.lora_alpha={held.lora_alpha:g}, "
            f"lora.use_rslora={str(held.use_rslora).lower()} and lora.target_modules="
            f"{targets if isinstance(targets, str) else '[' + ','.join(targets) + ']'} as it has"
        )
    return adapted


def _placement(stacks: Mapping[Any, StackTarget]) -> dict[Any, tuple[Any, ...]]:
    return {
        path: (stack.ranks.tolist(), np.round(stack.scales, 6).tolist())
        for path, stack in stacks.items()
    }


def check_positions(recipe: schema.Recipe, config: Mapping[str, Any]) -> None:
    """Refuses rows or answers longer than a configuration has positions for."""
    limit = max_positions(config)
    wanted = {"data.max_length": recipe.data.max_length}
    if recipe.eval.num_samples:
        wanted["eval.max_new_tokens"] = recipe.eval.max_new_tokens
    for key, tokens in wanted.items():
        if limit is not None and tokens > limit:
            raise InputError(
                f"{key} ({tokens}) is more than the model's max_position_embeddings ({limit}); "
                "lower it"
            )


def check_size(recipe: schema.Recipe, model: Decoder, mesh: Mesh | None) -> None:
    """Refuses sequences that the model has no positions for, or that no memory can hold.

    What is counted is the least that a step keeps: its batch on the host, and the input of every
    layer on the devices. A run that passes may still need more than there is.

    Raises:
      InputError: naming the keys and what there is.
    """
    length, config = recipe.data.max_length, model.config
    check_positions(recipe, read_json(model.origin.folder / "config.json"))
    width = config.hidden_size * jnp.dtype(recipe.model.dtype).itemsize
    rows, host = recipe.train.batch_size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    at_once = rows // recipe.train.gradient_accumulation_steps
    devices = _device_memory(mesh) or host
    inputs = host if recipe.model.remat == "offload" else devices
    for keys, tokens, each, there in (
        ("train.batch_size", rows * length, _HOST_BYTES, host),
        ("train.batch_size", at_once * length, width * config.num_hidden_layers, inputs),
        ("eval.batch_size", (recipe.eval.batch_size or 0) * length, width + _HOST_BYTES, devices),
    ):
        if tokens * each > there:
            raise InputError(
                f"data.max_length ({length}) and {keys} need at least {tokens * each / 1e9:,.0f} "
                f"GB, there are {there / 1e9:,.0f}; lower one of them"
            )


def _device_memory(mesh: Mesh | None) -> int | None:
    """Bytes of all devices of a run together, None where they share the host's memory."""
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    found = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [amount for amount in found if amount]
    whole = 1 if mesh is None else mesh.size
    return sum(known) * whole // len(devices) if len(known) == len(devices) else None


def optimizer_of(
    recipe: schema.Recipe, total_steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer of a recipe and its learning rate schedule."""
    return make_optimizer(total_steps=total_steps, **dataclasses.asdict(recipe.optim))


def optimizer_shardings(
    optimizer: optax.GradientTransformation, split: SplitModel, mesh: Mesh
) -> tuple[Any, Any]:
    """The shapes of the optimizer's state and their shardings.

    What the optimizer keeps per weight lies where the weight lies.
    """
    placed = split.shardings(mesh, split.trainable)
    replicated = NamedSharding(mesh, PartitionSpec())

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        name = next((k.key for k in reversed(path) if getattr(k, "key", None) in placed), None)
        return placed[name] if name and leaf.shape == split.trainable[name].shape else replicated

    abstract = jax.eval_shape(optimizer.init, split.trainable)
    return abstract, jax.tree_util.tree_map_with_path(sharding_of, abstract)


def init_optimizer(
    optimizer: optax.GradientTransformation, split: SplitModel, mesh: Mesh | None
) -> tuple[Any, Any]:
    """The optimizer's first state, and its shardings (None on one device)."""
    if mesh is None:
        return jax.jit(optimizer.init)(split.trainable), None
    _, shardings = optimizer_shardings(optimizer, split, mesh)
    return jax.jit(optimizer.init, out_shardings=shardings)(split.trainable), shardings


def jit_step(
    recipe: schema.Recipe,
    split: SplitModel,
    optimizer: optax.GradientTransformation,
    opt_shardings: Any,
    mesh: Mesh | None,
) -> Any:
    """The jitted training step of a recipe: what `run` calls and what `plan` compiles.

    Trained weights and optimizer state are donated, and leave as they came in.
    """
    dropout = recipe.lora is not None and recipe.lora.lora_dropout > 0
    names = recipe.data.source_names()
    step = make_step(split, optimizer, mesh=mesh, dropout=dropout, sources=names)
    if mesh is None:
        return jax.jit(step, donate_argnums=(0, 1))
    out = (split.shardings(mesh, split.trainable), opt_shardings, None)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Where the arrays `[accumulation, rows, T]` of a batch lie."""
    return NamedSharding(mesh, sharding.batch_spec(None))


def local_rows(recipe: schema.Recipe, mesh: Mesh | None) -> np.ndarray | None:
    """The rows of a batch that this process needs, as `lora_tune.distributed.local_rows`."""
    if mesh is None:
        return None
    parts = recipe.train.gradient_accumulation_steps
    shape = (parts, recipe.train.batch_size // parts, recipe.data.max_length)
    return distributed.local_rows(rows_sharding(mesh), shape)


def make_place(mesh: Mesh | None, accumulation: int) -> Callable[[Batch], Any]:
    """Puts a batch `[rows, T]` on the devices as `[accumulation, rows / accumulation, T]`."""
    rows = None if mesh is None else rows_sharding(mesh)

    def place(batch: Batch) -> dict[str, jax.Array]:
        parts = {
            name: array.reshape(accumulation, -1, array.shape[-1]) for name, array in batch.items()
        }
        return distributed.put(parts, rows)

    return place


def fingerprint(recipe: schema.Recipe, source: Source) -> dict[str, Any]:
    """What a continued run must share with its checkpoints, by recipe key, as plain JSON values."""
    parts = {
        "model.path": source.base_name,
        "model commit": source.commit,
        "model.dtype": recipe.model.dtype,
        "model.init": recipe.model.init,
        "lora": "null" if recipe.lora is None else "adapters",
        "train.seed": recipe.train.seed,
        "train.batch_size": recipe.train.batch_size,
        "train.gradient_accumulation_steps": recipe.train.gradient_accumulation_steps,
    }
    for name, section in (("lora", recipe.lora), ("optim", recipe.optim)):
        values = {} if section is None else dataclasses.asdict(section)
        parts |= {f"{name}.{key}": value for key, value in values.items()}
    return json.loads(json.dumps(parts))
