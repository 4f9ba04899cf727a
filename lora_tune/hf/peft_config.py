# SPDX-License-Identifier: Apache-2.0
"""`adapter_config.json`: written so that PEFT computes exactly our ranks and scales, and read.

PEFT 0.19 and later adapts some sparse models in a fused form (`FUSED_TYPES`): transformers 5 holds
the routed experts as two parameters, `experts.gate_up_proj` and `experts.down_proj`, and PEFT
turns the per-expert tensors of a file into adapters of those. Three of its rules shape this file:

* every list target whose last name is `gate`, `gate_proj`, `up_proj` or `down_proj` is taken as a
  request for routed experts (or the router), so a shared expert or a dense MLP that is listed
  there is lost (peft#3711). Those are written as `target_parameters` instead;
* gate and up become one adapter of twice the rank, with alpha doubled too, which keeps alpha / r
  but not alpha / sqrt(r): with rsLoRA the alpha has to be written out;
* parameters are matched by name alone, `layers_to_transform` does not apply to them, and they
  allow no dropout.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from lora_tune.errors import short
from lora_tune.hf.files import raise_listed, read_json
from lora_tune.lora.config import LoraConfig, scaling
from lora_tune.lora.targets import Target, list_matches, pattern_value

CONFIG_FILE = "adapter_config.json"
FUSED_TYPES = frozenset({"qwen2_moe", "qwen3_moe", "qwen3_next"})
"""Model types whose routed experts PEFT fuses when it loads an adapter."""
PARAMETER_TYPES = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})
"""Model types whose routed experts PEFT adapts as parameters alone: it does not convert files."""
TEXT_PART: Mapping[str, str] = dict.fromkeys(("gemma3", "gemma4"), "language_model")
"""Model types with projections of the same names elsewhere -> what names of the text model have.

PEFT would put adapters on those of the vision tower too, and find no weights for them.
"""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_STRAIGHT_SINCE = (0, 19)
"""The first PEFT that does not transpose the update of fused experts."""
_TAKEN = ("gate", *PROJECTIONS)
_EXPERT = re.compile(r"(?P<home>.+\.experts)\.(?P<e>\d+)\.(?P<name>[^.]+)")
# Fields with any value that we either read or that changes nothing; the others must be unset.
_KNOWN = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    }
)


def split_expert(module: str) -> tuple[str, int, str] | None:
    """(`….experts`, number, projection) of a routed expert's module, None for other modules."""
    match = _EXPERT.fullmatch(module)
    return (match["home"], int(match["e"]), match["name"]) if match else None


def is_taken(module: str, model_type: str) -> bool:
    """Whether PEFT would mistake this list target for routed experts (see the module's text)."""
    last = module.rpartition(".")[2]
    return model_type in FUSED_TYPES and last in _TAKEN and split_expert(module) is None


def cover(
    selected: Iterable[str], universe: Iterable[str], *, least: int = 1, part: str | None = None
) -> list[str]:
    """The shortest name endings that match all of `selected` and nothing else of `universe`.

    Endings have at least `least` parts, that called `part` among them if there is one, and do not
    begin with a number. Matching is PEFT's for list items, so a whole name always works.
    """
    chosen = set(selected)
    exact: dict[str, bool] = {}
    for name in {*universe, *chosen}:
        for ending in _endings(name):
            exact[ending] = exact.get(ending, True) and name in chosen
    found = set()
    for name in chosen:
        endings = [e for e in _endings(name) if exact[e]]
        usable = [e for e in endings if not e[0].isdigit() and e.count(".") + 1 >= least]
        usable = [e for e in usable if part is None or part in e.split(".")]
        found.add(usable[0] if usable else name)
    return sorted(found)


@dataclasses.dataclass(frozen=True)
class Written:
    """An adapter as it lies in the file: module -> (rank, scale), experts of equal kind alike.

    With `fused` the routed experts lie in the fused layout.
    """

    modules: Mapping[str, tuple[int, float]]
    universe: Sequence[str]
    model_type: str
    fused: bool = False


def make_config(
    written: Written, lora: LoraConfig, *, base: str | None, revision: str | None
) -> dict[str, Any]:
    """The content of `adapter_config.json` for an adapter.

    `target_modules` lists endings that match exactly what was adapted; ranks and scales that
    differ from the most common pair are patterns on exact names, so their order does not matter.
    """
    r, alpha = _most_common(written, lora.use_rslora)
    modules, parameters = _targets(written)
    ranks, alphas = _exceptions(written, r, alpha, lora.use_rslora, parameters)
    wraps = bool(parameters) or any(split_expert(name) for name in written.modules)
    return {
        "alpha_pattern": alphas,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _plain_number(alpha),
        # PEFT refuses dropout on parameters, and inference has none.
        "lora_dropout": 0.0 if wraps else lora.lora_dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": r,
        "rank_pattern": ranks,
        "revision": revision,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an `adapter_config.json` says about ranks, scales and the base.

    With `transposes_fused` it was written by a PEFT that transposed the update of fused experts.
    `modules` is a list in `target_modules`, None for an expression or none.
    """

    r: int
    alpha: float
    dropout: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    parameters: tuple[str, ...]
    transposes_fused: bool = False
    base: str | None = None
    revision: str | None = None
    modules: tuple[str, ...] | None = None

    def target(self, name: str) -> Target:
        """Rank, alpha and scale that PEFT gives to a module, or to a parameter it targets."""
        return self._look_up(name, 1)

    def fused_target(self, parameter: str) -> Target | None:
        """The same for experts that PEFT fuses, None where the file says nothing of its own."""
        listed = self.lists(parameter)
        patterns = [*self.rank_pattern, *self.alpha_pattern]
        if not listed and not any(pattern_value({p: 1}, parameter, 0) for p in patterns):
            return None
        doubled = parameter.endswith(".gate_up_proj") and not listed
        return self._look_up(parameter, 2 if doubled else 1)

    def lists(self, parameter: str) -> bool:
        """Whether `target_parameters` names this parameter."""
        return any(list_matches(item, parameter) for item in self.parameters)

    def names(self, module: str) -> bool:
        """Whether a target has this module's last name; others PEFT would leave without adapter."""
        if self.modules is None:
            return True
        last = {name.removesuffix(".weight").rpartition(".")[2] for name in self.parameters}
        last |= {name.rpartition(".")[2] for name in self.modules}
        if "gate_up_proj" in last:
            last |= {"gate_proj", "up_proj"}
        return module.rpartition(".")[2] in last

    def _look_up(self, name: str, factor: int) -> Target:
        r = int(pattern_value(self.rank_pattern, name, factor * self.r))
        alpha = float(pattern_value(self.alpha_pattern, name, factor * self.alpha))
        return Target(r, alpha, scaling(r, alpha, self.use_rslora))


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_alpha(value: Any) -> bool:
    return _is_number(value) and 0 < value < _ALPHAS_END


def _is_pattern(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(of, value.values())) and all(map(_compiles, value))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


_ALPHAS_END = 1e30
_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a whole number >= 1"),
    "lora_alpha": (_is_alpha, f"a number > 0 and below {_ALPHAS_END:g}"),
    "lora_dropout": (lambda value: _is_number(value) and 0 <= value < 1, "a number in [0, 1)"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "rank_pattern": (
        lambda value: _is_pattern(value, _is_rank),
        "an object with a whole number >= 1 for each regular expression",
    ),
    "alpha_pattern": (
        lambda value: _is_pattern(value, _is_alpha),
        "an object with a number > 0 for each regular expression",
    ),
    "target_parameters": (_is_names, "a list of names"),
    "target_modules": (
        lambda value: isinstance(value, str) or _is_names(value),
        "a list of names or a regular expression",
    ),
    "base_model_name_or_path": (lambda value: isinstance(value, str), "a text"),
    "revision": (lambda value: isinstance(value, str), "a text"),
}
"""Field -> what it may be, where it is not null, and that in words."""


def read_config(folder: FilePath) -> Settings:
    """Reads `adapter_config.json` as data.

    Raises:
      InputError: not a plain LoRA adapter, naming every field that asks for more.
    """
    path = folder / CONFIG_FILE
    raw = read_json(path)
    problems = [] if raw.get("peft_type") == "LORA" else ["peft_type is not 'LORA'"]
    problems += [f"{k}={v!r} is not supported" for k, v in raw.items() if k not in _KNOWN and v]
    if raw.get("bias", "none") != "none":
        problems.append(f"bias={raw['bias']!r} is not supported")
    init = raw.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in (None, "gaussian", "orthogonal", "eva"):
        problems.append(
            f"init_lora_weights={init!r} changes the base weights; convert it to plain LoRA first"
        )
    for key, (good, expected) in _FORMS.items():
        if (raw.get(key) is not None or key in ("r", "lora_alpha")) and not good(raw.get(key)):
            problems.append(f"{key}={short(raw.get(key))}, expected {expected}")
    raise_listed(f"{path}: cannot be read as a plain LoRA adapter", problems)
    return Settings(
        r=raw["r"],
        alpha=float(raw["lora_alpha"]),
        dropout=float(raw.get("lora_dropout") or 0.0),
        use_rslora=raw.get("use_rslora") or False,
        rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {},
        parameters=tuple(raw.get("target_parameters") or ()),
        transposes_fused=_is_before(raw.get("peft_version"), _STRAIGHT_SINCE),
        base=raw.get("base_model_name_or_path"),
        revision=raw.get("revision"),
        modules=tuple(listed) if isinstance(listed := raw.get("target_modules"), list) else None,
    )


def _is_before(version: Any, since: tuple[int, int]) -> bool:
    """Whether a recorded version of PEFT, if there is one, is older than `(major, minor)`."""
    match = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return match is not None and (int(match[1]), int(match[2])) < since


def describe(
    targets: Mapping[str, Target], universe: Sequence[str], settings: Settings
) -> LoraConfig:
    """A configuration that `resolve` turns back into exactly these targets."""
    counts = Counter((t.r, t.alpha) for t in targets.values())
    r, alpha = counts.most_common(1)[0][0]
    ranks = {t.r for t in targets.values()} - {r}
    alphas = {t.alpha for t in targets.values()} - {alpha}
    adapted = list(targets)
    return LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=settings.dropout,
        target_modules=_expression(adapted, universe),
        use_rslora=settings.use_rslora,
        rank_pattern={
            _expression([m for m in adapted if targets[m].r == v], universe): v for v in ranks
        },
        alpha_pattern={
            _expression([m for m in adapted if targets[m].alpha == v], universe): v for v in alphas
        },
    )


def _expression(selected: Sequence[str], universe: Sequence[str]) -> str:
    """A regular expression that matches `selected` whole, layers and experts grouped."""
    layers: dict[str, set[str]] = {}
    for name in selected:
        template, layer = _template(name)
        layers.setdefault(template, set()).add(layer)
    existing: dict[str, set[str]] = {}
    for name in universe:
        template, layer = _template(name)
        existing.setdefault(template, set()).add(layer)
    parts = []
    for template, found in sorted(layers.items()):
        some = "|".join(sorted(found, key=lambda n: int(n or 0)))
        numbers = r"\d+" if found == existing[template] else f"(?:{some})"
        parts.append(template.replace("{layer}", numbers))
    return "|".join(parts)


def _template(name: str) -> tuple[str, str]:
    """The name as an expression with its layer cut out (`{layer}`), and that layer."""
    match = re.match(r"(.*?\.layers\.)(\d+)(\..*)", name)
    if match is None:
        return re.escape(name), ""
    tail = re.sub(r"experts\\\.\d+", lambda _: r"experts\.\d+", re.escape(match[3]))
    return re.escape(match[1]) + "{layer}" + tail, match[2]


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]


def _most_common(written: Written, use_rslora: bool) -> tuple[int, float]:
    """The pair of rank and alpha that most modules have."""
    pairs = Counter((r, alpha_for(s, r, use_rslora)) for r, s in written.modules.values())
    return pairs.most_common(1)[0][0]


def alpha_for(scale: float, r: int, use_rslora: bool) -> float:
    """The alpha that gives this scale at this rank, without the noise of the last digits."""
    return float(f"{scale * (math.sqrt(r) if use_rslora else r):.12g}")


def _targets(written: Written) -> tuple[list[str], list[str]]:
    """`target_modules` and `target_parameters` that match exactly the written modules."""
    model_type = written.model_type
    taken = [name for name in written.modules if is_taken(name, model_type)]
    routed = [name for name in written.modules if split_expert(name)]
    plain = [n for n in written.modules if not is_taken(n, model_type) and not split_expert(n)]
    modules = cover(plain, written.universe, part=TEXT_PART.get(model_type))
    others = [name for name in written.universe if is_taken(name, model_type)]
    parameters = [f"{ending}.weight" for ending in cover(taken, others, least=2)]
    if routed and written.fused:
        parameters += _parameters(routed, written.universe)
    elif routed and _all_routed(written):
        modules += PROJECTIONS
    elif routed:
        homes = sorted({expert[0] for name in routed if (expert := split_expert(name))})
        for home in homes:
            parameters += [f"{home}.gate_up_proj", f"{home}.down_proj"]
    return sorted(modules), sorted(parameters)


def _parameters(routed: Iterable[str], universe: Iterable[str]) -> list[str]:
    """Both fused parameters of the layers in which experts are adapted, as list items."""
    found = []
    for last in ("gate_up_proj", "down_proj"):
        named, there = (
            [f"{expert[0]}.{last}" for n in names if (expert := split_expert(n))]
            for names in (routed, universe)
        )
        found += cover(named, there, least=3)
    return found


def _all_routed(written: Written) -> bool:
    return all(name in written.modules for name in written.universe if split_expert(name))


def _peft_keys(written: Written) -> dict[str, tuple[int, float]]:
    """What PEFT looks ranks and alphas up by -> (rank, scale) that it must find."""
    keys = {}
    for name, (r, scale) in written.modules.items():
        expert = split_expert(name)
        if expert is None:
            key = f"{name}.weight" if is_taken(name, written.model_type) else name
            keys[key] = (r, scale)
        elif expert[2] == "down_proj":
            keys[f"{expert[0]}.down_proj"] = (r, scale)
        else:
            keys[f"{expert[0]}.gate_up_proj"] = (2 * r, scale)
    return keys


def _exceptions(
    written: Written, r: int, alpha: float, use_rslora: bool, parameters: Sequence[str]
) -> tuple[dict[str, int], dict[str, float]]:
    """`rank_pattern` and `alpha_pattern` for what the defaults would get wrong."""
    keys = _peft_keys(written)
    ranks: dict[int, list[str]] = {}
    alphas: dict[float, list[str]] = {}
    for key, (needed, scale) in keys.items():
        # PEFT doubles both for gate_up by itself, but only when it fused list targets.
        listed = any(list_matches(item, key) for item in parameters)
        doubles = key.endswith(".gate_up_proj") and not listed
        default_r, default_alpha = (2 * r, 2 * alpha) if doubles else (r, alpha)
        if needed != default_r:
            ranks.setdefault(needed, []).append(key)
        if not math.isclose(scaling(needed, default_alpha, use_rslora), scale, rel_tol=1e-9):
            alphas.setdefault(alpha_for(scale, needed, use_rslora), []).append(key)
    return _patterns(ranks, keys), {k: _plain_number(v) for k, v in _patterns(alphas, keys).items()}


def _patterns(groups: Mapping[Any, list[str]], keys: Iterable[str]) -> dict[str, Any]:
    return {
        re.escape(ending): value
        for value, names in groups.items()
        for ending in cover(names, keys, least=2)
    }


def _plain_number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value
