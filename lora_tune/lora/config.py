# SPDX-License-Identifier: Apache-2.0
"""What the user asks of LoRA, under PEFT's names."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lora_tune.errors import InputError

ALL_LINEAR = "all-linear"
"""In place of names: every projection but the head and the router."""
# Every projection but the routed experts (97 % of a sparse model), the two router gates and the
# head. Of these defaults, a model takes those that it has.
DEFAULT_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkvz",
    "in_proj_ba",
    "out_proj",
    "shared_expert.gate_proj",
    "shared_expert.up_proj",
    "shared_expert.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Settings of a LoRA adapter; names and meaning are those of `peft.LoraConfig`.

    Attributes:
      r: rank.
      lora_alpha: numerator of the scale (see `scaling`).
      lora_dropout: probability of dropping an input of A, in training only.
      target_modules: list items match a module that equals them or ends with "." + item; a string
        is a regular expression for the whole name, or "all-linear" for every projection except
        the head and the router (the shared-expert gate is one, as in PEFT).
      exclude_modules: modules to leave out, matched in the same two manners.
      use_rslora: scale by alpha / sqrt(r) instead of alpha / r.
      rank_pattern, alpha_pattern: regular expression for the end of a name -> r or alpha of the
        modules it matches; the first that matches wins.
      layers_to_transform: numbers of the layers to adapt, None for all; only with a list.

    Raises:
      InputError: naming every field that is out of range.
    """

    r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str = DEFAULT_TARGETS
    exclude_modules: Sequence[str] | str | None = None
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layers_to_transform: Sequence[int] | int | None = None

    def __post_init__(self) -> None:
        problems = [*_number_problems(self), *_name_problems(self)]
        if problems:
            raise InputError("lora: " + "; ".join(problems))


def scaling(r: int, alpha: float, use_rslora: bool) -> float:
    """The factor on A B: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732).

    The only place where it is computed: forward pass, merge and export all call it.
    """
    return alpha / math.sqrt(r) if use_rslora else alpha / r


def _number_problems(config: LoraConfig) -> list[str]:
    problems = []
    ranks = {"r": config.r} | {f"rank_pattern[{k!r}]": v for k, v in config.rank_pattern.items()}
    for name, rank in ranks.items():
        if not _is_int(rank) or rank < 1:
            problems.append(f"{name} must be a whole number >= 1, got {rank!r}")
    alphas = {"lora_alpha": config.lora_alpha}
    alphas |= {f"alpha_pattern[{k!r}]": v for k, v in config.alpha_pattern.items()}
    for name, alpha in alphas.items():
        if not _is_number(alpha) or not math.isfinite(alpha) or alpha <= 0:
            problems.append(f"{name} must be a number > 0, got {alpha!r}")
    dropout = config.lora_dropout
    if not _is_number(dropout) or not 0 <= dropout < 1:
        problems.append(f"lora_dropout must be at least 0 and below 1, got {dropout!r}")
    return problems


def _name_problems(config: LoraConfig) -> list[str]:
    problems = []
    targets, layers = config.target_modules, config.layers_to_transform
    if not targets:
        problems.append("target_modules is empty; name at least one module, or set lora: null")
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field)
        if isinstance(value, str):
            problems += _text_problems(field, value)
        elif any(not isinstance(item, str) or not item for item in value or ()):
            problems.append(f"{field} must hold names only, got {list(value)!r}")
        elif any(_is_all_linear(item) for item in value or ()):
            problems.append(f"{field}: all-linear is no name for a list; write it alone")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, field):
            problems += _regex_problems(field, pattern)
    if isinstance(targets, str) and layers is not None:
        problems.append("layers_to_transform needs target_modules to be a list, got a string")
    if isinstance(layers, Sequence) and not layers:
        problems.append("layers_to_transform is empty; name layers, or set null for all")
    numbers = [layers] if isinstance(layers, int) else list(layers or ())
    if any(not _is_int(i) or i < 0 for i in numbers):
        problems.append(f"layers_to_transform must hold layer numbers >= 0, got {layers!r}")
    return problems


def _text_problems(field: str, value: str) -> list[str]:
    """What is wrong with a text in place of a list of names."""
    if not _is_all_linear(value):
        return _regex_problems(field, value)
    if field == "exclude_modules":
        return [f"exclude_modules: {value} leaves no module to adapt; name what to leave out"]
    return [] if value.lower() == ALL_LINEAR else [f"{field}: {value!r} is written {ALL_LINEAR}"]


def _is_all_linear(text: str) -> bool:
    return re.sub(r"[-_\s]", "", text.lower()) == "alllinear"


def _regex_problems(field: str, pattern: Any) -> list[str]:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        return [f"{field}: {pattern!r} is no regular expression ({error}){_escaped(pattern)}"]
    return []


def _escaped(pattern: Any) -> str:
    """The expression that was meant by a pattern as shells have it, or nothing."""
    if not isinstance(pattern, str) or not re.fullmatch(r"[\w.*?-]+", pattern):
        return ""
    return f"; in one, anything is .*, as in {re.sub(r'(?<![.])[*]', '.*', pattern)!r}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
