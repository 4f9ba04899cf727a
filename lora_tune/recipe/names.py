# SPDX-License-Identifier: Apache-2.0
"""What the user most likely meant by a key that the schema does not have."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from lora_tune.recipe.schema import Recipe

# Names of the same thing in PEFT, TRL, transformers, Axolotl, LLaMA-Factory, Unsloth, ms-swift,
# torchtune, MaxText and mlx-lm -> our key.
_FOREIGN: Mapping[str, str] = {
    "base_model": "model.path",
    "model_id": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "weight_dtype": "model.dtype",
    "gradient_checkpointing": "model.remat",
    "enable_activation_checkpointing": "model.remat",
    "remat_policy": "model.remat",
    "chat_template_jinja": "model.chat_template",
    "chat_template_path": "model.chat_template",
    "alpha": "lora.lora_alpha",
    "adapter_name_or_path": "lora.adapter_path",
    "lora_model_dir": "lora.adapter_path",
    "dropout": "lora.lora_dropout",
    "lora_module_path": "lora.target_modules",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "rank": "lora.r",
    "lora_target": "lora.target_modules",
    "lora_target_linear": "lora.target_modules",
    "lora_target_modules": "lora.target_modules",
    "match_all_linear": "lora.target_modules",
    "target_regex": "lora.target_modules",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "dataset_path": "data.path",
    "datasets": "data.sources",
    "dataset_mixer": "data.sources",
    "dataset_mixture": "data.sources",
    "data_files": "data.path",
    "interleave_probs": "data.sources",
    "mixture": "data.sources",
    "mix_strategy": "data.sources",
    "train_file": "data.path",
    "eval_dataset": "data.eval_path",
    "eval_datasets": "data.eval_sets",
    "test_datasets": "data.eval_sets",
    "test_size": "data.eval_path",
    "val_dataset": "data.eval_path",
    "val_set_size": "data.eval_path",
    "val_size": "data.eval_path",
    "validation_file": "data.eval_path",
    "cutoff_len": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_target_length": "data.max_length",
    "model_max_length": "data.max_length",
    "seq_len": "data.max_length",
    "seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "sequence_length": "data.max_length",
    "multipack": "data.packing",
    "neat_packing": "data.packing",
    "packed": "data.packing",
    "sample_packing": "data.packing",
    "excess_length_strategy": "data.truncation_strategy",
    "truncation_mode": "data.truncation_strategy",
    "masking_strategy": "data.assistant_only_loss",
    "roles_to_train": "data.assistant_only_loss",
    "train_on_inputs": "data.assistant_only_loss",
    "train_on_last_turn": "data.mask_history",
    "enable_thinking": "data.reasoning",
    "split_thinking": "data.reasoning",
    "dataset_text_field": "data.columns",
    "field_messages": "data.columns",
    "column_mapping": "data.columns",
    "dataset_type": "data.format",
    "train_on_prompt": "data.assistant_only_loss",
    "train_on_responses_only": "data.assistant_only_loss",
    "max_train_samples": "data.max_samples",
    "dataset_num_proc": "data.num_proc",
    "dataset_processes": "data.num_proc",
    "preprocessing_num_workers": "data.num_proc",
    "dataset_prepared_path": "data.cache",
    "overwrite_cache": "data.cache",
    "expert_parallel_size": "mesh.expert",
    "context_parallel_size": "mesh.sequence",
    "ici_context_parallelism": "mesh.sequence",
    "ici_data_parallelism": "mesh.data",
    "ici_expert_parallelism": "mesh.expert",
    "ici_fsdp_parallelism": "mesh.fsdp",
    "ici_sequence_parallelism": "mesh.sequence",
    "ici_tensor_parallelism": "mesh.tensor",
    "sequence_parallel_degree": "mesh.sequence",
    "tensor_parallel_size": "mesh.tensor",
    "lr": "optim.learning_rate",
    "lr_scheduler": "optim.lr_scheduler_type",
    "lr_schedule": "optim.lr_scheduler_type",
    "num_warmup_steps": "optim.warmup_steps",
    "adam_eps": "optim.adam_epsilon",
    "clip_grad_norm": "optim.max_grad_norm",
    "gradient_clip_val": "optim.max_grad_norm",
    "gradient_clipping_threshold": "optim.max_grad_norm",
    "iters": "train.max_steps",
    "max_steps_per_epoch": "train.max_steps",
    "num_steps": "train.max_steps",
    "num_train_steps": "train.max_steps",
    "steps": "train.max_steps",
    "epochs": "train.num_train_epochs",
    "max_epochs": "train.num_train_epochs",
    "num_epochs": "train.num_train_epochs",
    "seed": "train.seed",
    "global_batch_size": "train.batch_size",
    "micro_batch_size": "train.batch_size",
    "per_device_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "early_stop_patience": "train.early_stopping_patience",
    "early_stopping": "train.early_stopping_patience",
    "early_stopping_steps": "train.early_stopping_patience",
    "patience": "train.early_stopping_patience",
    "min_delta": "train.early_stopping_threshold",
    "greater_is_better": "train.metric_for_best_model",
    "best_metric": "train.metric_for_best_model",
    "save_best": "train.load_best_model_at_end",
    "accumulation_steps": "train.gradient_accumulation_steps",
    "grad_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    "auto_resume_from_checkpoints": "train.resume",
    "resume_from_checkpoint": "train.resume",
    "checkpoint_period": "save.every",
    "save_every": "save.every",
    "save_steps": "save.every",
    "save_total_limit": "save.keep",
    "log_every_n_steps": "log.every",
    "log_period": "log.every",
    "logging_steps": "log.every",
    "logging_strategy": "log.every",
    "steps_per_report": "log.every",
    "enable_tensorboard": "log.report_to",
    "metric_logger": "log.report_to",
    "report_to_wandb": "log.report_to",
    "use_tensorboard": "log.report_to",
    "use_wandb": "log.report_to",
    "wandb": "log.report_to",
    "logging_dir": "output_dir",
    "run_name": "output_dir",
    "tensorboard_dir": "output_dir",
    "wandb_name": "log.wandb_project",
    "eval_interval": "eval.every",
    "eval_steps": "eval.every",
    "steps_per_eval": "eval.every",
    "predict_with_generate": "eval.num_exact_match",
    "eval_sample_generation": "eval.num_samples",
    "per_device_eval_batch_size": "eval.batch_size",
}

# The same for the keys of an item of `data.sources` or `data.eval_sets`.
_FOREIGN_IN_SOURCES: Mapping[str, str] = {
    "config": "subset",
    "data_files": "path",
    "dataset": "path",
    "fraction": "weight",
    "limit": "max_samples",
    "num_samples": "max_samples",
    "prob": "weight",
    "probability": "weight",
    "proportion": "weight",
    "type": "format",
}

# What differs besides the name, said once where people lose time over it.
MEANINGS: Mapping[str, str] = {
    "data.sources": "a list of {path: …, weight: …}; data.path names a single one",
    "data.eval_path": "a file of held-out rows of its own",
    "data.eval_sets": "a list of {name: …, path: …}; data.eval_path names a single one",
    "data.reasoning": "keep, drop or last",
    "data.columns": "our column name to the file's, as in {messages: talk}",
    "data.assistant_only_loss": "true learns only what the assistant says",
    "lora.target_modules": "a list of module names, a regular expression or `all-linear`",
    "eval.num_exact_match": "how many held-out prompts of every set to answer",
    "log.report_to": "none, wandb, tensorboard or a list of these",
    "model.remat": "full, dots, save_attention, none or offload",
    "train.batch_size": "sequences an optimizer step, over all devices and accumulation steps",
    "train.early_stopping_patience": "evaluations in a row without a better one",
    "train.metric_for_best_model": "as eval_loss; a loss is better if lower, any other if higher",
    "train.resume": "auto, never, or the folder of a run or of a checkpoint",
}


def item_of(hint: Any) -> type | None:
    """Return the section class of a list of sections (`list[Source]` -> `Source`), or None."""
    item = get_args(hint)[0] if get_origin(hint) is list else None
    return item if isinstance(item, type) and is_dataclass(item) else None


def section_of(hint: Any) -> type | None:
    """Return the section class in a field's type (`Lora | None` -> `Lora`), or None for a value."""
    if item_of(hint) is not None:
        return None
    parts = (hint, *get_args(hint))
    return next((part for part in parts if isinstance(part, type) and is_dataclass(part)), None)


@cache
def sections() -> Mapping[str, type]:
    """Return name -> class of every section of the schema."""
    hints = get_type_hints(Recipe)
    found = {entry.name: section_of(hints[entry.name]) for entry in fields(Recipe)}
    return {name: section for name, section in found.items() if section is not None}


@cache
def leaves() -> Mapping[str, Any]:
    """Return full dotted key -> type of every value of the schema, in its order."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(Recipe).items():
        section = sections().get(name)
        if section is None:
            found[name] = hint
        else:
            found |= {f"{name}.{key}": inner for key, inner in get_type_hints(section).items()}
    return found


def meant(key: str) -> str | None:
    """Return our full key that `key` most likely stands for, or None.

    In this order: a name from another toolkit, one of our names in the wrong section, a typo.
    """
    key = key.lower()
    name = key.rsplit(".", 1)[-1]
    if name in _FOREIGN:
        return _FOREIGN[name]
    section = key.split(".")[0]
    same = [full for full in leaves() if full.rsplit(".", 1)[-1] == name]
    same.sort(key=lambda full: -SequenceMatcher(None, full.split(".")[0], section).ratio())
    if same:
        return same[0]
    close = get_close_matches(key, leaves(), n=1, cutoff=0.75)
    if close:
        return close[0]
    by_name = {full.rsplit(".", 1)[-1]: full for full in leaves()}
    close = get_close_matches(name, by_name, n=1, cutoff=0.75)
    return by_name[close[0]] if close else None


def unknown(key: str) -> str:
    """Return one sentence about an unknown full dotted key, with a suggestion."""
    ours = meant(key)
    if ours is not None:
        meaning = f" ({MEANINGS[ours]})" if ours in MEANINGS else ""
        return f"unknown key {key!r}: did you mean {ours!r}?{meaning}"
    section = key.split(".")[0] + "."
    known = [full for full in leaves() if full.startswith(section)]
    known = known or list(get_type_hints(Recipe))
    return f"unknown key {key!r}: expected one of {', '.join(known)}"


def unknown_in(place: str, name: str, keys: Mapping[str, Any]) -> str:
    """Return one sentence about an unknown key of an item of a list, with a suggestion."""
    close = get_close_matches(name.lower(), keys, n=1)
    foreign = _FOREIGN_IN_SOURCES.get(name.lower())
    ours = foreign if foreign in keys else next(iter(close), None)
    hint = f"did you mean {ours!r}?" if ours else f"expected one of {', '.join(keys)}"
    return f"unknown key '{place}.{name}': {hint}"
