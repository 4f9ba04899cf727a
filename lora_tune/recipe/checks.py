# SPDX-License-Identifier: Apache-2.0
"""Values outside their range, and values that cannot stand together."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from lora_tune.errors import InputError
from lora_tune.hf.shards import shard_bytes
from lora_tune.recipe.figures import EXACT_MATCH, figures
from lora_tune.recipe.schema import Data, Log, Mesh, Recipe
from lora_tune.secrets import held_in

REPORTERS = ("none", "wandb", "tensorboard")
"""What `log.report_to` may name."""

_MEANT_AS_SWITCH = ("auto", "default", "false", "no", "none", "null", "off", "on", "true", "yes")
_LIMITS: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (
            "lora.r",
            "lora.rank_pattern",
            "data.max_samples",
            "data.num_proc",
            "mesh.data",
            "mesh.fsdp",
            "mesh.tensor",
            "mesh.expert",
            "mesh.sequence",
            "train.batch_size",
            "train.early_stopping_patience",
            "train.gradient_accumulation_steps",
            "train.loss_chunk_size",
            "save.keep",
            "log.every",
            "eval.batch_size",
            "eval.max_new_tokens",
        ),
    ),
    ("at least 2", lambda value: value >= 2, ("data.max_length",)),
    (
        "at least 0",
        lambda value: value >= 0,
        (
            "lora.layers_to_transform",
            "optim.warmup_steps",
            "optim.weight_decay",
            "save.every",
            "train.early_stopping_threshold",
            "eval.every",
            "eval.num_exact_match",
            "eval.num_samples",
            "eval.samples_every",
        ),
    ),
    (
        "at least 0 and below 2**32",  # what a key of random numbers is made of
        lambda value: 0 <= value < 2**32,
        ("lora.seed", "train.seed"),
    ),
    (
        "from 0 to 3",  # the largest weights of one layer, routed experts, have three axes
        lambda value: 0 <= value <= 3,
        ("model.param_scan_axis",),
    ),
    (
        "above 0",
        lambda value: value > 0,
        (
            "lora.lora_alpha",
            "lora.alpha_pattern",
            "optim.learning_rate",
            "optim.adam_epsilon",
            "optim.max_grad_norm",
        ),
    ),
    ("above 0 and at most 10000", lambda value: 0 < value <= 10_000, ("train.num_train_epochs",)),
    (
        "at least 1 and below 2**31",  # steps are counted in 32 bits
        lambda value: 1 <= value < 2**31,
        ("train.max_steps",),
    ),
    (
        "at least 0 and below 1",
        lambda value: 0 <= value < 1,
        ("lora.lora_dropout", "optim.warmup_ratio", "optim.adam_beta1", "optim.adam_beta2"),
    ),
)


def problems_of(recipe: Recipe) -> list[str]:
    """Return one sentence for every range and every combination that `recipe` breaks."""
    # Other problems might repeat the text that holds a secret.
    first = list(_secrets(recipe)) or list(_ranges(recipe))
    if first:
        return first
    return [
        *_model_and_lora(recipe),
        *_data(recipe.data),
        *_schedule(recipe),
        *_batches(recipe),
        *_reports(recipe),
        *_best_model(recipe),
        *_files(recipe),
    ]


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (place, number) for a number, or for every number in a list or mapping."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}[{key}]", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}[{index}]", item)
    elif isinstance(value, int | float):
        yield name, value


def _ranges(recipe: Recipe) -> Iterator[str]:
    sections = asdict(recipe)
    for words, holds, keys in _LIMITS:
        for key in keys:
            section, name = key.split(".")
            for place, number in _numbers(key, (sections[section] or {}).get(name)):
                if not (math.isfinite(number) and holds(number)):
                    yield f"{place} must be {words}, got {number}"


def _files(recipe: Recipe) -> Iterator[str]:
    size = recipe.save.max_shard_size
    if size is None:
        return
    try:
        shard_bytes(size)
    except InputError as error:
        yield f"save.{error}"
    if not recipe.save.merged:
        yield "save.max_shard_size is of merged/, which is not written; set save.merged: true"


def _model_and_lora(recipe: Recipe) -> Iterator[str]:
    if recipe.model.param_scan_axis and not recipe.model.scan_layers:
        yield "model.param_scan_axis has no effect with model.scan_layers: false; set it to 0"
    if recipe.lora is None:
        if recipe.save.adapter:
            yield "save.adapter: true needs adapters, and lora: null has none; set it to false"
        if not recipe.save.merged:
            yield "save.merged: false leaves nothing of a run with lora: null; set it to true"
        return
    if recipe.save.merged and recipe.model.init == "random":
        yield "save.merged needs a checkpoint to merge into; model.init: random has none"
    try:
        recipe.lora.config()
    except InputError as error:
        yield str(error)


def _eval_sets(data: Data) -> Iterator[str]:
    if data.eval_sets and data.eval_path is not None:
        yield (
            "data.eval_path and data.eval_sets are both set; set data.eval_path to null and make "
            "it one of the sets"
        )
    yield from _twice("data.eval_sets", [each.name for each in data.eval_sets])
    for i, each in enumerate(data.eval_sets):
        place = f"data.eval_sets[{i}]"
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", each.name, re.ASCII):
            yield (
                f"{place}.name must be letters, digits, _, . and -, for eval_NAME_loss, got "
                f"{each.name!r}"
            )
        elif each.name.endswith("token"):
            yield (
                f"{place}.name must not end in token, since eval_token_accuracy is a figure of all "
                f"sets, got {each.name!r}"
            )
        if each.max_samples is not None and each.max_samples < 1:
            yield f"{place}.max_samples must be at least 1, got {each.max_samples}"
        yield from _paths(f"{place}.path", each.path)
    if data.eval_path is not None:
        yield from _paths("data.eval_path", data.eval_path)


def _paths(place: str, path: str | list[str]) -> Iterator[str]:
    """Say what is wrong with a list of held-out paths, each of which has figures of its own."""
    if not path:
        yield f"{place} is an empty list; name a file, or remove it"
    twice = {each for each in path if path.count(each) > 1} if isinstance(path, list) else ()
    for each in sorted(twice):
        yield f"{place} names {each!r} twice; name it once"


def _twice(place: str, names: list[str]) -> Iterator[str]:
    """Say which items of a list have the name of an earlier one."""
    for i, name in enumerate(names):
        if name in names[:i]:
            yield (
                f"{place}[{i}] is called {name!r} as {place}[{names.index(name)}] is; give it "
                "another name, since figures in the log go by name"
            )


def _data(data: Data) -> Iterator[str]:
    yield from _eval_sets(data)
    if isinstance(data.cache, str) and data.cache.lower() in _MEANT_AS_SWITCH:
        yield f"data.cache is {data.cache!r}, a folder by that name; write true or false"
    if not data.assistant_only_loss:
        for key in ("mask_history", "reasoning"):
            if getattr(data, key):
                yield f"data.{key} has no effect with data.assistant_only_loss: false; remove one"
    if not data.sources:
        if not data.path:
            yield "data.path and data.sources are both empty; set one of them"
        return
    if data.path:
        yield (
            "data.path and data.sources are both set; set data.path to [] and make it one of the "
            "sources"
        )
    for key, usual in (("split", "train"), ("subset", None), ("max_samples", None)):
        if getattr(data, key) != usual:
            yield f"data.{key} has no effect with data.sources; set it in the items of the list"
    for i, source in enumerate(data.sources):
        weight, rows = source.weight, source.max_samples
        if weight is not None and not (math.isfinite(weight) and weight > 0):
            yield f"data.sources[{i}].weight must be above 0, got {weight}"
        if rows is not None and rows < 1:
            yield f"data.sources[{i}].max_samples must be at least 1, got {rows}"
    if len({source.weight is None for source in data.sources}) > 1:
        yield "data.sources: some have a weight and some have none; give all of them one, or none"
    yield from _twice("data.sources", data.source_names())


def _schedule(recipe: Recipe) -> Iterator[str]:
    optim, train = recipe.optim, recipe.train
    if train.max_steps is None and train.num_train_epochs is None:
        yield "train.max_steps and train.num_train_epochs are both null; set one of them"
    if train.max_steps is not None and train.num_train_epochs is not None:
        yield "train.max_steps and train.num_train_epochs are both set; set one of them to null"
    if optim.warmup_ratio and optim.warmup_steps:
        yield "optim.warmup_ratio and optim.warmup_steps are both set; set one of them to 0"
    if train.max_steps is not None and optim.warmup_steps >= train.max_steps:
        yield (
            f"optim.warmup_steps ({optim.warmup_steps}) must be below "
            f"train.max_steps ({train.max_steps})"
        )
    if optim.lr_scheduler_type == "constant" and (optim.warmup_ratio or optim.warmup_steps):
        yield "optim.lr_scheduler_type constant has no warm-up; use constant_with_warmup"


def _batch_ways(mesh: Mesh) -> int:
    """Return the number of parts that the mesh splits a batch into."""
    return mesh.data * mesh.fsdp * mesh.expert


def _batches(recipe: Recipe) -> Iterator[str]:
    train, ways = recipe.train, _batch_ways(recipe.mesh)
    parts = train.gradient_accumulation_steps * ways
    if train.batch_size % parts:
        yield (
            f"train.batch_size ({train.batch_size}) must be a multiple of "
            f"train.gradient_accumulation_steps x mesh.data x mesh.fsdp x mesh.expert ({parts})"
        )
    rows = recipe.eval.batch_size
    if rows is not None and rows % ways:
        yield (
            f"eval.batch_size ({rows}) must be a multiple of "
            f"mesh.data x mesh.fsdp x mesh.expert ({ways})"
        )
    if recipe.data.max_length % recipe.mesh.sequence:
        yield (
            f"data.max_length ({recipe.data.max_length}) must be a multiple of mesh.sequence "
            f"({recipe.mesh.sequence})"
        )


def _reports(recipe: Recipe) -> Iterator[str]:
    held_out = recipe.data.all_eval_sets()
    if not held_out:
        off = {"every": "0", "batch_size": "null", "num_exact_match": "0", "num_samples": "0"}
        for key, value in off.items():
            if getattr(recipe.eval, key):
                yield (
                    f"eval.{key} needs held-out rows; set data.eval_path or data.eval_sets, or "
                    f"eval.{key}={value}"
                )
    if recipe.eval.samples_every and not recipe.eval.num_samples:
        keys = "eval.num_samples"
        if not held_out:
            keys += " and data.eval_path"
        yield f"eval.samples_every has no effect with eval.num_samples: 0; set {keys}"
    yield from _reporters(recipe.log)


def _best_model(recipe: Recipe) -> Iterator[str]:
    train, known = recipe.train, figures(recipe)
    if train.metric_for_best_model not in known:
        close = get_close_matches(train.metric_for_best_model, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        if train.metric_for_best_model.endswith(EXACT_MATCH) and not recipe.eval.num_exact_match:
            hint = "; set eval.num_exact_match for it"
        yield (
            f"train.metric_for_best_model must be a figure of evaluations ({', '.join(known)}), "
            f"got {train.metric_for_best_model!r}{hint}"
        )
    if train.early_stopping_threshold and train.early_stopping_patience is None:
        yield (
            "train.early_stopping_threshold has no effect without train.early_stopping_patience; "
            "set both"
        )
    if train.load_best_model_at_end and not (recipe.save.adapter or recipe.save.merged):
        yield (
            "train.load_best_model_at_end chooses what is exported, and nothing is: save.adapter "
            "and save.merged are both false; set one of them"
        )
    for key in ("early_stopping_patience", "load_best_model_at_end"):
        if not getattr(train, key):
            continue
        if not recipe.data.all_eval_sets():
            yield (
                f"train.{key} needs held-out rows; set data.eval_path or data.eval_sets, and "
                "eval.every"
            )
        elif not recipe.eval.every:
            yield f"train.{key} needs evaluations during training; set eval.every"


def _reporters(log: Log) -> Iterator[str]:
    named = [log.report_to] if isinstance(log.report_to, str) else log.report_to
    for name in named:
        if name not in REPORTERS:
            close = get_close_matches(name, REPORTERS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield (
                f"log.report_to must be {' or '.join(REPORTERS)}, or a list of these, "
                f"got {name!r}{hint}"
            )
    if len(named) > 1 and "none" in named:
        yield "log.report_to has none beside others; remove it"
    if len(set(named)) < len(named):
        yield "log.report_to names the same place twice; remove one"
    if "wandb" not in named and log.wandb_mode == "online":
        yield "log.wandb_mode has no effect without log.report_to: wandb"


def _secrets(recipe: Recipe) -> Iterator[str]:
    for place in held_in(asdict(recipe)):
        yield (
            f"{place or 'the recipe'} holds an access token or a password, and what a recipe holds "
            "is written to the run folder; take it out: tokens come from HF_TOKEN and "
            "WANDB_API_KEY, or the logins of hf and wandb"
        )
