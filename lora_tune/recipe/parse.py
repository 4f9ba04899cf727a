# SPDX-License-Identifier: Apache-2.0
"""From YAML text and `key=value` overrides to a `Recipe`, with every problem said at once."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lora_tune.errors import InputError
from lora_tune.recipe.checks import problems_of
from lora_tune.recipe.files import find
from lora_tune.recipe.names import leaves, meant, sections, unknown
from lora_tune.recipe.schema import Recipe
from lora_tune.recipe.values import ONLY_REFERENCES, bad_value, described, known, shown
from lora_tune.recipe.yaml_faults import fault
from lora_tune.secrets import masked


def load(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides, later ones winning.

    Args:
        path_or_name: a file, or the name of a shipped recipe with or without `.yaml`.
        overrides: full dotted keys; values are YAML and may contain `=`. An override replaces
            what the recipe says under that key.

    Raises:
        InputError: the file is missing, cannot be read or is not YAML, or keys, types, required
            values or combinations are wrong; one error names them all.
    """
    listed = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not listed or not all(isinstance(text, str) for text in overrides):
        raise InputError(
            f"overrides is {shown(overrides)}, expected a list of texts, as in ['lora.r=4']"
        )
    where = f"recipe {path_or_name}"
    path = find(path_or_name)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{where} cannot be read ({error.strerror or error})") from error
    values = _read_yaml(raw, where)
    problems: list[str] = []
    doubted: set[str] = set()  # keys that a problem is about: what follows from them is not said
    for text in overrides:
        try:
            _override(values, text)
        except InputError as error:
            problems.append(str(error))
            doubted.add(text.partition("=")[0].lstrip("-"))
    settings: dict[str, Any] = {}
    for key, value in _flatten(values):
        said = bad_value(key, value) if key in known() else unknown(key)
        if said is None:
            settings[key] = value
        else:
            problems.append(said)
            doubted.add(key if key in known() else meant(key) or key)
    _follow_lora(settings)
    if settings.get("data.sources") and settings.get("data.path", MISSING) == MISSING:
        settings["data.path"] = []
    absent = _required(settings)
    required = "is required; set it in the recipe or as {}=… on the command line"
    follows = [f"{key} {required.format(key)}" for key in absent]
    recipe = None if absent else _build(settings, problems)
    if recipe is not None:
        follows += problems_of(recipe)
    problems += [said for said in follows if not any(_names(said, key) for key in doubted)]
    if len(problems) == 1:
        raise InputError(masked(f"{where}: {problems[0]}"))
    if recipe is None or problems:
        listed = "; ".join(f"({i}) {said}" for i, said in enumerate(problems, start=1))
        raise InputError(masked(f"{where} has {len(problems)} problems: {listed}"))
    return recipe


def _read_yaml(raw: bytes, where: str) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(io.StringIO(raw.decode("utf-8")))
        values = OmegaConf.to_container(loaded, resolve=False)
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text (byte {error.start})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where} {fault(raw.decode('utf-8'), error)}") from None
    except OmegaConfBaseException as error:
        raise InputError(f"{where}: {error.full_key} {ONLY_REFERENCES}") from None
    except OSError:
        # What omegaconf raises for a document that is one bare scalar.
        values = None
    if not isinstance(values, dict) or not values:
        raise InputError(f"{where} holds no `key: value` lines, for example `output_dir: runs/a`")
    return {str(key): value for key, value in values.items()}


def _override(values: dict[str, Any], text: str) -> None:
    """Apply one `key=value` to nested `values` in place, or raise InputError."""
    key, equals, value_text = text.partition("=")
    if not equals or not re.fullmatch(r"\w[^\s=]*", key):
        dashes = text.startswith("-") and equals
        example = f"without dashes: {text.lstrip('-')}" if dashes else "as in train.max_steps=100"
        raise InputError(f"override {text!r} must be key=value, {example}")
    value = _one_value(key, value_text)
    *parents, last = key.split(".")
    here = values
    for depth, name in enumerate(parents, start=1):
        section = ".".join(parents[:depth])
        hint = leaves().get(section)
        if hint is not None and get_origin(hint) is not dict:
            raise InputError(
                f"override {text!r} has no place because {section} is no section but "
                f"{described(hint)}; write {section}=…"
            )
        below = here.setdefault(name, {})
        if not isinstance(below, dict):
            raise InputError(
                f"override {text!r} has no place because {section} is {shown(below)}; "
                f"put {section}={{}} before it to start from the defaults of {section}"
            )
        here = below
    here[last] = value


def _one_value(key: str, text: str) -> Any:
    """Return the value of an override, which is one YAML value and nothing else."""
    quoted = f"quote it twice, for YAML and for the shell: {key}=\"'{text}'\""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except OmegaConfBaseException:
        raise InputError(f"{key} {ONLY_REFERENCES}, got {text!r}") from None
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or "it cannot be read"
        advice = "" if text[:1] in ("[", "{") else f"; {quoted}"
        if text.startswith("*") and list[str] in get_args(leaves().get(key)):
            advice = f"; for names with any beginning write the regular expression {key}=.{text}"
        raise InputError(f"{key}={text} is not valid YAML ({reason}){advice}") from None
    if "#" in (text if node is None else text[node.end_mark.index :]):
        raise InputError(f"{key}={text}: YAML takes what follows # for a comment; {quoted}")
    assert isinstance(parsed, dict)
    return parsed["value"]


def _follow_lora(settings: dict[str, Any]) -> None:
    """Set what is written at the end by what is trained, where the recipe leaves it open."""
    if settings.get("lora", "") is None:
        settings.setdefault("save.adapter", False)
        settings.setdefault("save.merged", True)


def _names(sentence: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", sentence) is not None


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full dotted key, value) for every value, also below unknown keys."""
    for key, value in values.items():
        full = f"{prefix}{key}"
        inside = isinstance(value, dict) and full not in leaves()
        if inside and (value or full in sections()):
            yield from _flatten(value, f"{full}.")
        else:
            yield full, value


def _required(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys that are still without a value."""
    without = {key for key, value in settings.items() if value == MISSING}
    for key in leaves():
        *section, name = key.split(".")
        owner = sections()[section[0]] if section else Recipe
        if owner.__dataclass_fields__[name].default == MISSING and key not in settings:
            without.add(key)
    return sorted(without)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        here = tree
        for name in parents:
            here = here.setdefault(name, {})
        here[last] = value
    return tree


def _build(settings: Mapping[str, Any], problems: list[str]) -> Recipe | None:
    """Return the recipe, or None after adding to `problems` why there is none."""
    try:
        config = OmegaConf.merge(OmegaConf.structured(Recipe), _nested(settings))
        recipe = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        text = " ".join(str(error).split("full_key:")[0].split())
        problems.append(f"{error.full_key} cannot be resolved: {text}")
        return None
    assert isinstance(recipe, Recipe)
    return recipe
