# SPDX-License-Identifier: Apache-2.0
"""Where recipes are: shipped ones, files of the user, and the resolved one of a run."""

from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

from omegaconf import OmegaConf

from lora_tune.errors import InputError
from lora_tune.hf.folder import replace_file
from lora_tune.recipe.schema import Recipe

_PACKAGE = Path(__file__).resolve().parent.parent


def _shipped_folder() -> Path:
    """Folder of the shipped recipes: inside an installed package, beside it in a checkout."""
    checkout = _PACKAGE.parent / "recipes"
    if checkout.is_dir() and (_PACKAGE.parent / "pyproject.toml").is_file():
        return checkout
    return _PACKAGE / "recipes"


def shipped() -> dict[str, Path]:
    """Return file name -> path of every shipped recipe, sorted by name."""
    return {path.name: path for path in sorted(_shipped_folder().glob("*.yaml"))}


def find(name: str | Path) -> Path:
    """Return the file that `recipe=name` means: a path if there is one, else a shipped name.

    A shipped name works with or without its ending, from any folder.

    Raises:
        InputError: there is neither; the message lists the shipped names.
    """
    if not isinstance(name, str | Path):
        raise InputError(f"recipe is {name!r}, expected the path of a file or a shipped name")
    name, path, available = str(name), Path(name), shipped()
    if path.is_file():
        return path
    for candidate in (name, f"{name}.yaml"):
        if candidate in available:
            return available[candidate]
    if path.is_dir():
        inside = [str(file) for file in sorted(path.glob("*.y*ml"))]
        there = f", such as {inside[0]}" if inside else ""
        raise InputError(f"recipe {name!r} is a folder; name a recipe file{there}")
    near = [str(file) for file in path.parent.glob("*.y*ml")]
    close = get_close_matches(name, [*near, *available, *(n[:-5] for n in available)], n=1)
    raise InputError(
        f"recipe {name!r} is neither a file nor a shipped recipe"
        f"{f'; did you mean {close[0]!r}?' if close else ''}; "
        f"shipped are {', '.join(available)}"
    )


def of_run(folder: Path) -> Path:
    """Return the recipe of a run folder.

    Raises:
        InputError: there is none in it.
    """
    path = folder / "recipe.yaml"
    if not path.is_file():
        raise InputError(
            f"{folder} is no run folder: there is no recipe.yaml in it; name the output_dir of a "
            "run, to which its training command writes that file anew"
        )
    return path


def save(recipe: Recipe, path: str | Path) -> None:
    """Write `recipe` with every key resolved; loading the file gives an equal recipe.

    The file is complete or absent at every moment.

    Raises:
        OSError: the file cannot be written.
    """
    head = "# The resolved recipe of this run; `lora-tune recipe=` runs it again.\n"
    replace_file(Path(path), head + OmegaConf.to_yaml(OmegaConf.create(asdict(recipe))))
