# SPDX-License-Identifier: Apache-2.0
"""Every recipe, wherever it lies, loads, teaches and survives being saved."""

from pathlib import Path

import pytest

from lora_tune import recipe

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.rglob("*.yaml"))
# What a recipe leaves to the user, on purpose.
OVERRIDES = {"qwen3next_sft.yaml": ["data.path=chats.jsonl"]}


def load(path: Path) -> recipe.Recipe:
    return recipe.load(str(path), OVERRIDES.get(path.name, []))


def test_all_recipes_are_shipped_and_the_known_ones_are_there() -> None:
    # The package may be installed elsewhere, with recipes of its own.
    shipped = {name: path.read_text() for name, path in recipe.shipped().items()}
    assert shipped == {path.name: path.read_text() for path in RECIPES}
    assert {"pretrain_tiny.yaml", "quickstart.yaml", "qwen3next_sft.yaml"} <= set(recipe.shipped())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_resolved_recipe_runs_again_as_it_is(path: Path, tmp_path: Path) -> None:
    first = load(path)
    recipe.save(first, tmp_path / "recipe.yaml")

    assert recipe.load(str(tmp_path / "recipe.yaml")) == first


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_teaches(path: Path) -> None:
    lines = path.read_text().splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    knobs = [line for line in lines if ": " in line and not line.startswith("#")]

    assert len(lines) <= 60
    assert len(header) >= 4
    assert f"lora-tune recipe={path.name}" in "\n".join(header)
    assert sum("#" in line for line in knobs) >= len(knobs) // 2
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_commands_in_a_header_are_valid(path: Path) -> None:
    commands = [
        line.lstrip("# ").split(" #")[0].split()
        for line in path.read_text().splitlines()
        if line.startswith("#   lora-tune ")
    ]
    for _, *arguments in commands:
        settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        name = settings.pop("recipe", None)
        if name is not None:
            given = [f"{key}={value}" for key, value in settings.items()]
            recipe.load(name, [*OVERRIDES.get(name, []), *given])
