# SPDX-License-Identifier: Apache-2.0
"""Every recipe, wherever it lies, loads, teaches and survives being saved."""

import re
from pathlib import Path

import pytest

from lora_tune import recipe, sharding
from lora_tune.plan import abstract, command, planner
from lora_tune.plan.topologies import parse

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.rglob("*.yaml"))
# What a recipe leaves to the user, on purpose.
OPEN = [path.name for path in RECIPES if "path: ???" in path.read_text()]
OVERRIDES = {name: ["data.path=chats.jsonl"] for name in OPEN}


def load(path: Path) -> recipe.Recipe:
    return recipe.load(str(path), OVERRIDES.get(path.name, []))


def test_all_recipes_are_shipped_and_the_known_ones_are_there() -> None:
    # The package may be installed elsewhere, with recipes of its own.
    shipped = {name: path.read_text() for name, path in recipe.shipped().items()}
    assert shipped == {path.name: path.read_text() for path in RECIPES}
    assert {"quickstart.yaml", "qwen3next_sft.yaml", "smollm2_sft.yaml"} <= set(recipe.shipped())


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
        for word in command.WORDS:
            settings.pop(word, None)
        if name is not None:
            given = [f"{key}={value}" for key, value in settings.items()]
            recipe.load(name, [*OVERRIDES.get(name, []), *given])


# What a recipe says it is for.
SLICES = {
    "qwen3next_v5p_8.yaml": "v5p-8",
    "qwen3next_v5p_256.yaml": "v5p-256",
    "qwen3next_v6e_8.yaml": "v6e-8",
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_step_of_a_recipe_can_be_planned(path: Path) -> None:
    """All but the compiler: the mesh divides every weight, the step traces, its inputs fit."""
    asked = planner.load(str(path))
    config, _ = abstract.model_config(asked)
    model = abstract.make_model(asked, config)
    inputs = abstract.inputs_of(asked, model, planner.abstract_mesh(asked.mesh))
    held = sum(inputs.held().values())
    if path.name in SLICES:
        [topology] = parse(SLICES[path.name])
        assert planner.ways(asked.mesh) == topology.devices
        assert held < topology.facts.hbm
        figures = re.search(r"optimizer take ([\d.]+) GB of ([\d.]+)", path.read_text())
        assert figures is not None
        there = topology.facts.hbm / 1e9
        assert [float(n) for n in figures.groups()] == pytest.approx([held / 1e9, there], rel=0.005)
        assert f"topology={topology.name}" in path.read_text()
    alone = planner.with_mesh(asked, recipe.Mesh(), rows=1)
    one = sharding.make_mesh(devices=abstract.devices_of(parse("cpu")[0])[:1])
    assert abstract.trace(alone, model, one).traced.jaxpr.jaxpr.eqns
