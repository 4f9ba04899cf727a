# SPDX-License-Identifier: Apache-2.0
"""Checks of `config.json` that every family makes: types, sizes, and what its layers lack.

Each yields one sentence per problem, so that a family can report all of them in one error.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

MOST: Mapping[str, int] = {"num_hidden_layers": 500, "num_experts": 4096}
"""Far above any model there is; planning for what a slip of the pen asks for would take hours."""
_MOST = 2**31 - 1
"""Of every other size."""
_LEAST: Mapping[str, int] = {
    "hidden_size_per_layer_input": 0,
    "linear_conv_kernel_dim": 2,
    "max_window_layers": 0,
    "num_kv_shared_layers": 0,
    "num_experts": 0,
    "num_experts_per_tok": 0,
}
"""What whole numbers must at least be, those that are not here: 1."""


_NEUTRAL = """
model_type architectures dtype torch_dtype transformers_version name_or_path auto_map
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
use_cache cache_implementation initializer_range attn_implementation use_bfloat16 torchscript
return_dict output_attentions output_hidden_states chunk_size_feed_forward tokenizer_class
id2label label2id problem_type finetuning_task task_specific_params prefix suppress_tokens
begin_suppress_tokens forced_bos_token_id forced_eos_token_id bad_words_ids is_decoder
tie_encoder_decoder pruned_heads do_sample early_stopping max_length min_length num_beams
num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
output_scores return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
transformers.js_config is_llama_config unsloth_fixed unsloth_version
"""
NEUTRAL = frozenset(_NEUTRAL.split())
"""Fields of any family that say nothing about what a forward pass computes."""


def has_type_of(value: Any, example: Any) -> bool:
    """Whether a value of a JSON file can stand where the example stands; an int can for a float."""
    if isinstance(example, bool) or isinstance(value, bool):
        return type(value) is type(example)
    return isinstance(value, (int, float) if isinstance(example, float) else int)


def value_problems(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the fields that are one number or one truth value."""
    for name, default in defaults.items():
        value, least = values[name], _LEAST.get(name, 1)
        if not has_type_of(value, default):
            yield f"{name} is {value!r}, expected {type(default).__name__}"
        elif type(default) is int and value < least:
            yield f"{name} is {value}, expected at least {least}"
        elif type(default) is float:
            yield from positive(values, (name,))
        elif value > (most := MOST.get(name, _MOST)):
            yield f"{name} is {value}, expected at most {most}"


def unsupported(hf: Mapping[str, Any], only: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Fields that ask for something the layers do not do: those with another than these values."""
    for name, allowed in only.items():
        if name in hf and hf[name] not in allowed:
            yield f"{name}={hf[name]!r} is not supported (only {' or '.join(map(repr, allowed))})"


def positive(
    values: Mapping[str, Any], names: Sequence[str], place: Callable[[str], str] = str
) -> Iterator[str]:
    """What is wrong with fields that must be numbers above 0; `place` says where one is.

    Both 0 and infinity are those of float32, in which they are used.
    """
    limits = np.finfo(np.float32)
    least, most = float(limits.tiny), float(limits.max)
    for name in names:
        value = values[name]
        if not has_type_of(value, 1.0) or not least <= value <= most:
            yield f"{place(name)} is {value!r}, expected a finite number above 0"


_MULTIMODAL = frozenset(
    {
        *("text_config", "vision_config", "audio_config", "tie_word_embeddings"),
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_index"),
        *("eoa_token_id", "vision_soft_tokens_per_image"),
        *("image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image"),
    }
)
"""Fields beside `text_config` that are read here, or that say nothing about text."""


def text_fields(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The fields of the text model of a multimodal `config.json`, and what is wrong around them.

    A `config.json` without `text_config` is that of a text model alone.
    """
    if "text_config" not in hf:
        return hf, []
    text = hf["text_config"]
    if not isinstance(text, Mapping):
        return {}, [f"text_config is {text!r}, expected an object"]
    shared = {n: hf[n] for n in ("tie_word_embeddings", "quantization_config") if n in hf}
    problems = [
        f"{name} is {value!r}, but text_config.{name} is {text[name]!r}; leave out one of them"
        for name, value in shared.items()
        if name in text and text[name] != value
    ]
    return {**shared, **text}, [*problems, *unknown_fields(hf, {*_MULTIMODAL, *shared})]


def max_positions(hf: Mapping[str, Any]) -> int | None:
    """The longest sequence that a `config.json` speaks of, None where it does not."""
    found = text_fields(hf)[0].get("max_position_embeddings")
    return found if isinstance(found, int) else None


def sparse_layers(values: Mapping[str, Any], dense: Sequence[int] | None) -> tuple[bool, ...]:
    """Which layers have experts: every `decoder_sparse_step`-th but those in `mlp_only_layers`."""
    step, none = values["decoder_sparse_step"], values["num_experts"] == 0
    return tuple(
        not none and (i + 1) % step == 0 and i not in (dense or ())
        for i in range(values["num_hidden_layers"])
    )


def list_problems(hf: Mapping[str, Any], name: str, kind: type) -> Iterator[str]:
    """What is wrong with a field that is null or a list of values of one type."""
    value = hf.get(name)
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if value is not None and not (is_list and all(type(item) is kind for item in value)):
        yield f"{name} is {value!r}, expected a list of {kind.__name__}"


def unknown_fields(hf: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    """Fields that nobody reads, unless they are empty, or bookkeeping as those in `NEUTRAL`.

    They may ask for a model other than the one that would be built. Names that begin with an
    underscore are private to the library that wrote them.
    """
    for name, value in hf.items():
        if name in known or name in NEUTRAL or name.startswith("_"):
            continue
        if value is None or value is False or value in ("", [], {}):
            continue
        yield (
            f"{name}={value!r} is unknown to this family; if the model is the same without it, "
            "remove it from config.json"
        )
