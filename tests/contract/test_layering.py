# SPDX-License-Identifier: Apache-2.0
"""Imports point down only, and importing costs little and starts nothing."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lora_tune"

# Higher numbers stand on lower ones. The longest matching name counts.
LEVELS = {
    "lora_tune.cli": 11,
    "lora_tune.commands": 10,
    "lora_tune.api": 9,
    "lora_tune.run": 8,
    "lora_tune.verify": 8,
    "lora_tune.plan": 8,
    "lora_tune.plan.model_flops": 5.5,
    "lora_tune.plan.roofline": 5.5,
    "lora_tune.plan.cost": 5,
    "lora_tune.plan.hlo": 5,
    "lora_tune.plan.topologies": 5,
    "lora_tune.proof": 8,
    "lora_tune.export": 7.7,
    "lora_tune.trained": 7.5,
    "lora_tune.review": 8,
    "lora_tune.lockfile": 7.6,
    "lora_tune.report": 7.6,
    "lora_tune.prepare": 7.5,
    "lora_tune.build_evaluation": 7.2,
    "lora_tune.build_answers": 7.1,
    "lora_tune.build": 7,
    "lora_tune.build_data": 6.5,
    "lora_tune.recipe": 6,
    "lora_tune.generation": 5.5,
    "lora_tune.training": 5,
    "lora_tune.checkpoint": 5,
    "lora_tune.hf": 4,
    "lora_tune.data": 4,
    "lora_tune.models": 3,
    "lora_tune.lora": 3,
    "lora_tune.layers": 2,
    "lora_tune.cache": 1.5,
    "lora_tune.scan": 1,
    "lora_tune.sharding": 1,
    "lora_tune.hf.table": 1,
    "lora_tune.assets": 0,
    "lora_tune.compiled": 0,
    "lora_tune.console": 0,
    "lora_tune.run_lock": 0.5,
    "lora_tune.distributed": 0.5,
    "lora_tune.words": 0.5,
    "lora_tune.errors": 0,
    "lora_tune.progress": 0,
    "lora_tune.machine": 0,
    "lora_tune.usage": 0,
    "lora_tune.secrets": 0,
    "lora_tune": 0,
}
# Besides the levels: a model knows nothing of adapters, and neither does the training step.
FORBIDDEN = {("lora_tune.models", "lora_tune.lora"), ("lora_tune.training", "lora_tune.lora")}
HEAVY = ("datasets", "orbax", "tensorboardX", "torch", "transformers", "wandb")


def component(module: str) -> str:
    found = [name for name in LEVELS if module == name or module.startswith(f"{name}.")]
    return max(found, key=len)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def edges() -> set[tuple[str, str]]:
    """(component, component it imports), within the package."""
    return {
        (component(name), component(target))
        for name, path in MODULES.items()
        if name != "lora_tune"
        for target in imports(path)
        if target.split(".")[0] == "lora_tune"
    }


def test_every_module_has_its_place() -> None:
    assert {name for name in MODULES if component(name) == "lora_tune"} == {"lora_tune"}


def test_imports_point_down() -> None:
    # The package itself holds the version only; its lazy names are not imported from inside.
    upward = {(a, b) for a, b in edges() if a != b and LEVELS[a] < LEVELS[b]}
    assert upward == set()


def test_components_of_one_level_do_not_import_each_other_in_circles() -> None:
    found = {(a, b) for a, b in edges() if a != b}
    assert {(a, b) for a, b in found if (b, a) in found} == set()


def test_models_and_training_know_no_adapters() -> None:
    assert edges() & FORBIDDEN == set()


def test_torch_is_imported_by_the_proof_alone() -> None:
    users = [
        name
        for name, path in MODULES.items()
        if any(target.split(".")[0] in ("torch", "peft") for target in imports(path))
    ]
    assert users == ["lora_tune.proof.reference"]


def test_every_file_names_its_licence_and_stays_small() -> None:
    for name, path in MODULES.items():
        lines = path.read_text().splitlines()
        assert lines[0] == "# SPDX-License-Identifier: Apache-2.0", name
        assert len(lines) <= 500, name


def run(code: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.smoke
def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = (*HEAVY, "jax", "flax", "numpy")
    run(f"import sys, lora_tune; assert not set({heavy}) & set(sys.modules), 'heavy'")


@pytest.mark.smoke
def test_importing_every_module_starts_no_backend_and_nothing_heavy() -> None:
    # With a platform that does not exist, starting a backend is an error.
    names = [name for name in MODULES if not name.endswith("__main__")]
    run(
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        f"heavy = set({[name for name in HEAVY if name != 'orbax']}) & set(sys.modules)\n"
        "assert not heavy, heavy",
        JAX_PLATFORMS="none_such",
    )


@pytest.mark.smoke
def test_public_names_are_there() -> None:
    run(
        "import lora_tune\n"
        "missing = [name for name in lora_tune.__all__ if not callable(getattr(lora_tune, name))]\n"
        "assert not missing, missing\n"
        "assert set(lora_tune.__all__) <= set(dir(lora_tune))",
        JAX_PLATFORMS="none_such",
    )
