# SPDX-License-Identifier: Apache-2.0
"""From YAML text and `key=value` overrides to a `Recipe`, with every problem said at once."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lora_tune.errors import InputError
from lora_tune.recipe.checks import problems_of
from lora_tune.recipe.files import find
from lora_tune.recipe.names import leaves, section_of, sections, unknown
from lora_tune.recipe.schema import Recipe

# The one form of interpolation that recipes have. Others (`${name:argument}`) run code.
_REFERENCE = re.compile(r"(?<!\\)\$\{[\w.]+\}")
_ONLY_REFERENCES = "may use `${…}` only to name a key of this recipe"


def load(path_or_name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides, later ones winning.

    Args:
        path_or_name: a file, or the name of a shipped recipe with or without `.yaml`.
        overrides: full dotted keys; values are YAML and may contain `=`. An override replaces
            what the recipe says under that key.

    Raises:
        InputError: the file is missing or not YAML, or keys, types, required values or
            combinations are wrong; one error names them all.
        OSError: the file cannot be read.
    """
    where = f"recipe {path_or_name}"
    values = _read_yaml(find(path_or_name).read_bytes(), where)
    problems = [said for text in overrides if (said := _override(values, text))]
    settings: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for key, value in _flatten(values):
        said = _bad_value(key, value) if key in _known() else unknown(key)
        if said is None:
            settings[key] = value
        else:
            refused[key] = said
    missing = [said for key in _required(settings) if (said := _absent(key, refused))]
    problems += [*refused.values(), *missing]
    recipe = None if _required(settings) else _build(settings, problems)
    if recipe is not None:
        problems += problems_of(recipe)
    if len(problems) == 1:
        raise InputError(f"{where}: {problems[0]}")
    if recipe is None or problems:
        listed = "; ".join(f"({i}) {said}" for i, said in enumerate(problems, start=1))
        raise InputError(f"{where} has {len(problems)} problems: {listed}")
    return recipe


def _read_yaml(raw: bytes, where: str) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(io.StringIO(raw.decode("utf-8")))
        values = OmegaConf.to_container(loaded, resolve=False)
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text (byte {error.start})") from None
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{where} is not valid YAML{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    except OmegaConfBaseException as error:
        raise InputError(f"{where}: {error.full_key} {_ONLY_REFERENCES}") from None
    except OSError:
        # What omegaconf raises for a document that is one bare scalar.
        values = None
    if not isinstance(values, dict) or not values:
        raise InputError(f"{where} holds no `key: value` lines, for example `output_dir: runs/a`")
    return {str(key): value for key, value in values.items()}


def _override(values: dict[str, Any], text: str) -> str | None:
    """Apply one `key=value` to nested `values` in place; return what is wrong with it, or None."""
    key, equals, value_text = text.partition("=")
    if not equals or not re.fullmatch(r"\w[^\s=]*", key):
        return f"override {text!r} must be key=value, for example train.max_steps=100"
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value_text}"]))
    except OmegaConfBaseException:
        return f"{key} {_ONLY_REFERENCES}, got {value_text!r}"
    except yaml.YAMLError:
        return f"override {text!r} has a value that is not valid YAML; quote it: {key}=\"'…'\""
    *parents, last = key.split(".")
    here = values
    for depth, name in enumerate(parents, start=1):
        below = here.setdefault(name, {})
        if not isinstance(below, dict):
            section = ".".join(parents[:depth])
            return (
                f"override {text!r} has no place because {section} is {_shown(below)}; "
                f"put {section}={{}} before it to start from the defaults of {section}"
            )
        here = below
    here[last] = parsed["value"] if isinstance(parsed, dict) else parsed
    return None


def _known() -> Mapping[str, Any]:
    return {**get_type_hints(Recipe), **leaves()}


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full dotted key, value) for every value, also below unknown keys."""
    for key, value in values.items():
        full = f"{prefix}{key}"
        inside = isinstance(value, dict) and full not in leaves()
        if inside and (value or full in sections()):
            yield from _flatten(value, f"{full}.")
        else:
            yield full, value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from _texts(list(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _bad_value(key: str, value: Any) -> str | None:
    """Return what is wrong with the value of a known key, or None."""
    hint = _known()[key]
    if any("${" in _REFERENCE.sub("", text) for text in _texts(value)):
        return f"{key} {_ONLY_REFERENCES}, got {_shown(value)}"
    if _fits(hint, value):
        return None
    is_text = str in (hint, *get_args(hint)) and isinstance(value, bool | int | float)
    quotes = "; put it in quotes" if is_text else ""
    expected = f"{_described(hint)}, got {_shown(value)}"
    return f"{key} must be {expected}{quotes}{_close(hint, value)}"


def _fits(hint: Any, value: Any) -> bool:
    """Return whether `value` is of the schema type `hint`; references are checked when resolved."""
    if isinstance(value, str) and ("${" in value or value == MISSING):
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(name, str) and _fits(arguments[1], item) for name, item in value.items()
        )
    if arguments:
        return any(_fits(part, value) for part in arguments)
    allowed = (int, float) if hint is float else hint
    return isinstance(value, allowed) and (hint is bool or not isinstance(value, bool))


def _required(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys that are still without a value."""
    without = {key for key, value in settings.items() if value == MISSING}
    for key in leaves():
        *section, name = key.split(".")
        owner = sections()[section[0]] if section else Recipe
        if owner.__dataclass_fields__[name].default == MISSING and key not in settings:
            without.add(key)
    return sorted(without)


def _absent(key: str, refused: Mapping[str, str]) -> str | None:
    """Return the sentence about a required key, or None where its value was refused already."""
    if key in refused or key.split(".")[0] in refused:
        return None
    return f"{key} is required; set it in the recipe or as {key}=… on the command line"


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


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


_NAMES: Mapping[Any, str] = {
    NoneType: "null",
    bool: "true or false",
    float: "a number",
    int: "an integer",
    str: "text",
}


def _described(hint: Any) -> str:
    """Return a type of the schema in words."""
    if hint in _NAMES:
        return _NAMES[hint]
    section = section_of(hint)
    if section is not None:
        return f"a section with the keys {', '.join(section.__dataclass_fields__)}"
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return " or ".join(arguments)
    if get_origin(hint) in (list, dict):
        items = _described(arguments[-1]).split()[-1] + "s"
        return f"a list of {items}" if get_origin(hint) is list else f"a mapping to {items}"
    return " or ".join(_described(part) for part in arguments)


def _close(hint: Any, value: Any) -> str:
    """Return a suggestion for a misspelt choice, or nothing."""
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    close = get_close_matches(str(value), choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""
