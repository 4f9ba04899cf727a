# SPDX-License-Identifier: Apache-2.0
"""Which modules get an adapter, and of what rank and scale: PEFT's matching rules on names.

Matching runs on Hugging Face module names (`model.layers.3.self_attn.q_proj`, one name per routed
expert), so that a recipe means here what it means in PEFT. Rules: `check_target_module_exists` and
`get_pattern_key` of peft 0.21. The difference: an entry that matches nothing is an error here.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lora_tune.errors import InputError, listed
from lora_tune.hf.table import Leaf, Path, module_name
from lora_tune.lora.config import ALL_LINEAR, DEFAULT_TARGETS, LoraConfig, scaling

HEAD = "lm_head"


@dataclasses.dataclass(frozen=True)
class Target:
    """Rank, alpha and scale of the adapter of one module."""

    r: int
    alpha: float
    scale: float


@dataclasses.dataclass(frozen=True, eq=False)
class StackTarget:
    """The adapters of one stacked parameter.

    Attributes:
      r: rank of the arrays, the largest in the stack.
      ranks: int32, shape = stacked layer axes (block, layer); 0 where a layer is not adapted.
      alphas, scales: float32 of the same shape; 0 where a layer is not adapted.
    """

    r: int
    ranks: np.ndarray
    alphas: np.ndarray
    scales: np.ndarray


def adaptable_modules(leaves: Iterable[Leaf]) -> tuple[str, ...]:
    """Hugging Face names of every module that can take an adapter, one per routed expert."""
    kernels = (leaf for leaf in leaves if leaf.adaptable)
    return tuple(module_name(name) for leaf in kernels for name in leaf.names.ravel())


def resolve(config: LoraConfig, module_names: Sequence[str]) -> dict[str, Target]:
    """The modules that `config` adapts, in the order of `module_names`.

    Raises:
      InputError: naming every entry (target, exclusion, layer, pattern) that matches nothing, with
        the nearest name and what exists.
    """
    problems: list[str] = []
    excluded = _excluded(config, module_names, problems)
    allowed = [name for name in module_names if name not in excluded]
    pool = _in_layers(config, module_names, allowed, problems)
    # What follows from a problem is no second one: from here on, everything counts as there.
    chosen = _chosen(config, module_names, module_names if problems else pool, problems)
    adapted = module_names if problems else chosen
    ranks = _patterns("rank_pattern", config.rank_pattern, adapted, problems)
    alphas = _patterns("alpha_pattern", config.alpha_pattern, adapted, problems)
    if problems:
        unknown = any("matches no" in problem for problem in problems)
        listed = f"; the model has {_listing(module_names)}" if unknown else ""
        raise InputError(f"lora: {'; '.join(problems)}{listed}")
    targets = {}
    for name in chosen:
        r, alpha = int(ranks.get(name, config.r)), alphas.get(name, config.lora_alpha)
        targets[name] = Target(r, alpha, scaling(r, alpha, config.use_rslora))
    return targets


def stack_targets(leaves: Iterable[Leaf], targets: Mapping[str, Target]) -> dict[Path, StackTarget]:
    """Groups the targets of `resolve` by stacked parameter; parameters without any are left out.

    Raises:
      InputError: the experts of one layer differ in being targeted, in rank or in alpha: they
        share one array and one scale.
    """
    stacks, problems = {}, []
    for leaf in (leaf for leaf in leaves if leaf.adaptable):
        cells = _layer_cells(leaf)
        found = {cell: {targets.get(module_name(n)) for n in names} for cell, names in cells}
        mixed = [cell for cell, kinds in found.items() if len(kinds) > 1]
        problems += [f"the experts of {leaf.names[cell][0]} differ" for cell in mixed]
        stack = {cell: kinds.pop() for cell, kinds in found.items() if len(kinds) == 1}
        if any(stack.values()):
            stacks[leaf.path] = _stack(leaf, stack)
    if problems:
        raise InputError(
            "lora: all routed experts of a layer take the same adapter, but with these targets "
            + listed(problems, between="; ")
            + "; match experts with '.*' instead of single numbers"
        )
    return stacks


def pattern_value(patterns: Mapping[str, float], name: str, default: float) -> float:
    """The value of the first pattern that matches the end of `name`, as PEFT looks it up."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def layer_number(name: str) -> int | None:
    """The layer that a module belongs to: the first number that follows two names, as in PEFT."""
    match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def list_matches(item: str, name: str) -> bool:
    """PEFT's rule for list items: the whole name, or its end after a dot."""
    return name == item or name.endswith("." + item)


def _layer_cells(leaf: Leaf) -> list[tuple[tuple[int, ...], list[str]]]:
    experts = "expert" in leaf.axes
    rank = leaf.names.ndim - experts
    cells = np.ndindex(leaf.names.shape[:rank])
    return [(cell, np.atleast_1d(leaf.names[cell]).tolist()) for cell in cells]


def _stack(leaf: Leaf, stack: Mapping[tuple[int, ...], Target | None]) -> StackTarget:
    shape = leaf.names.shape[: leaf.names.ndim - ("expert" in leaf.axes)]
    ranks = np.zeros(shape, np.int32)
    alphas, scales = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for cell, target in stack.items():
        if target is not None:
            ranks[cell], alphas[cell], scales[cell] = target.r, target.alpha, target.scale
    return StackTarget(int(ranks.max()), ranks, alphas, scales)


def _excluded(config: LoraConfig, names: Sequence[str], problems: list[str]) -> set[str]:
    if not config.exclude_modules:
        return set()
    found = _match("exclude_modules", config.exclude_modules, names, problems)
    if len(found) == len(names):
        problems.append("exclude_modules leaves no module to adapt")
    return found


def _chosen(
    config: LoraConfig, names: Sequence[str], pool: Sequence[str], problems: list[str]
) -> list[str]:
    """The modules of `pool` that are targets; `names` are all modules, for what is said."""
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        chosen = [name for name in pool if name != HEAD]
        problems += [] if chosen else ["no module is left to adapt"]
        return chosen
    if not isinstance(targets, str) and tuple(targets) == DEFAULT_TARGETS:
        targets = [t for t in targets if any(list_matches(t, name) for name in pool)]
        problems += [] if targets else ["no module is left to adapt"]
    found = _match("target_modules", targets, names, problems)
    kept = [name for name in pool if name in found]
    items, matches = _rule(targets)
    gone = [
        repr(item)
        for item in items
        if any(matches(item, n) for n in found) and not any(matches(item, n) for n in kept)
    ]
    if gone:
        left = "matches no module among the layers and modules that are left"
        problems.append(f"target_modules: {', '.join(gone)} {left}")
    return kept


def _in_layers(
    config: LoraConfig, names: Sequence[str], allowed: Sequence[str], problems: list[str]
) -> Sequence[str]:
    layers = config.layers_to_transform
    wanted = {layers} if isinstance(layers, int) else set(layers or ())
    if not wanted:
        return allowed
    numbers = {name: layer_number(name) for name in names}
    there = {number for number in numbers.values() if number is not None}
    missing = sorted(wanted - there)
    if missing:
        listed = f"{missing}, only {min(there)} to {max(there)}" if there else str(missing)
        problems.append(f"layers_to_transform: the model has no layer {listed}")
    return [name for name in allowed if numbers[name] in wanted]


def _rule(wanted: Sequence[str] | str) -> tuple[Sequence[str], Callable[[str, str], Any]]:
    """The items of a list, or a text as the only one, and how an item matches a name."""
    return ([wanted], re.fullmatch) if isinstance(wanted, str) else (wanted, list_matches)


def _match(
    field: str, wanted: Sequence[str] | str, names: Sequence[str], problems: list[str]
) -> set[str]:
    items, matches = _rule(wanted)
    found: set[str] = set()
    for item in items:
        hits = {name for name in names if matches(item, name)}
        if not hits and isinstance(wanted, str):
            none = f"{field}: the expression {item!r} matches no module by its whole name"
            problems.append(none + _as_list(item, names))
        elif not hits:
            problems.append(f"{field}: {item!r} matches no module{_did_you_mean(item, names)}")
        found |= hits
    return found


def _patterns(
    field: str, patterns: Mapping[str, float], names: Sequence[str], problems: list[str]
) -> dict[str, float]:
    values: dict[str, float] = {}
    for pattern, value in patterns.items():
        expression = re.compile(rf"(.*\.)?({pattern})$")
        hits = [name for name in names if expression.match(name)]
        if not hits:
            problems.append(f"{field}: {pattern!r} matches no adapted module")
        values |= {name: value for name in hits if name not in values}
    return values


def _as_list(text: str, names: Sequence[str]) -> str:
    """What to write instead of an expression that looks like names for a list, or nothing."""
    items = [item for item in re.split(r"[\s,;|]+", text.strip("[]()")) if item]
    plain = all(re.fullmatch(r"[\w.]+", item) for item in items)
    if not items or not plain:
        return ""
    if unknown := [i for i in items if not any(list_matches(i, name) for name in names)]:
        return _did_you_mean(unknown[0], names)
    return f"; as a list of name endings, write [{', '.join(items)}]"


def _kinds(names: Iterable[str], of: Callable[[str], str]) -> list[str]:
    return sorted({of(name) for name in names})


def _did_you_mean(item: str, names: Iterable[str]) -> str:
    leaves = _kinds(names, lambda name: name.rpartition(".")[2])
    tails = _kinds(names, lambda name: re.sub(r"^.*\.\d+\.", "", name))
    near = difflib.get_close_matches(item, [*leaves, *tails], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _listing(names: Sequence[str]) -> str:
    kinds = _kinds(names, lambda name: re.sub(r"\.\d+\.", ".*.", name))
    return ", ".join(kinds) if kinds else "no module that can take an adapter"
