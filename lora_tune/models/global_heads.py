# SPDX-License-Identifier: Apache-2.0
"""Heads of layers without a window, where they differ from those of the others, as in Gemma 4."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_tune.models.fields import value_problems
from lora_tune.models.kinds import FULL, SLIDING

_GLOBAL: Mapping[str, str] = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}
"""Sizes of heads -> what they are called in layers without a window."""


def global_heads(
    hf: Mapping[str, Any], values: Mapping[str, Any], types: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Heads of layers without a window, and what is wrong with them.

    transformers 5 turns `global_head_dim` and, with `attention_k_eq_v`,
    `num_global_key_value_heads` into `per_layer_config`: what single layers have in place of
    `head_dim` and `num_key_value_heads`, unless it is the same. Where that is, only that counts.
    """
    own = {name: values[name] for name in _GLOBAL}
    if "per_layer_config" not in hf:
        shared = () if values["attention_k_eq_v"] else ("num_key_value_heads",)
        found = {n: None if n in shared else values[other] for n, other in _GLOBAL.items()}
        return {other: found[n] or own[n] for n, other in _GLOBAL.items()}, []
    layers = hf["per_layer_config"] or {}
    if wrong := list(_layer_problems(layers, len(types))):
        return {}, wrong
    given = {int(i): fields for i, fields in layers.items()}
    heads = [{**own, **given.get(i, {})} for i in range(len(types))]
    by_type = {
        kind: [h for h, t in zip(heads, types, strict=True) if t == kind]
        for kind in (SLIDING, FULL)
    }
    full = by_type[FULL][0]
    if any(h != own for h in by_type[SLIDING]) or any(h != full for h in by_type[FULL]):
        alike = f"only all layers of type {FULL!r} alike"
        return {}, [f"per_layer_config={layers!r} is not supported ({alike})"]
    return {other: full[name] for name, other in _GLOBAL.items()}, []


def _layer_problems(layers: Any, count: int) -> Iterator[str]:
    """What is wrong with the form of `per_layer_config`."""
    if not isinstance(layers, Mapping):
        yield f"per_layer_config is {layers!r}, expected an object"
        return
    for layer, fields in layers.items():
        where = f"per_layer_config.{layer}"
        if not (str(layer).isdecimal() and int(layer) < count):
            yield f"{where} is no layer, expected a number below {count}"
        elif not isinstance(fields, Mapping):
            yield f"{where} is {fields!r}, expected an object"
        elif odd := sorted({*fields} - {*_GLOBAL}):
            yield f"{where} has {', '.join(odd)}, which is unknown to this family"
        else:
            sizes = value_problems(fields, dict.fromkeys(fields, 1))
            yield from (f"{where}.{problem}" for problem in sizes)
