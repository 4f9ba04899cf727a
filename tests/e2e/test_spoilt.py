# SPDX-License-Identifier: Apache-2.0
"""Commands on recipes, models, adapters and run folders that were spoilt at random.

Whatever a file holds, a command does its work or ends with one sentence and its status. Each test
takes a part of the examples that the profile of hypothesis says.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import VALUES, share, spoilt_bytes, spoilt_text, spoilt_tree
from small_run import write_chats, write_model, write_recipe

from lora_tune import cli, recipe
from lora_tune.errors import InputError
from lora_tune.models import FAMILIES
from lora_tune.prepare import Inputs
from lora_tune.recipe import shipped
from lora_tune.recipe.names import leaves

SHIPPED = [path.read_text() for path in shipped().values()]
KEYS = sorted(leaves())


def examples(part: float) -> settings:
    return settings(
        max_examples=share(part),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def command(*arguments: str) -> int:
    """The status of a command, which has said one sentence unless that is 0."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = cli.main(list(arguments))
    assert status in (0, 1, 2)
    errors = [line for line in complained.getvalue().splitlines() if "lora-tune: error: " in line]
    assert len(errors) == (status != 0), complained.getvalue()
    if status:
        assert complained.getvalue().endswith(errors[0] + "\n")
        assert errors[0].isprintable()
    return status


def loaded(path: Path, overrides: Sequence[str] = ()) -> recipe.Recipe | None:
    """A recipe, or None if it was refused, in one line."""
    with contextlib.suppress(InputError):
        return recipe.load(path, overrides)
    return None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, conversations, a recipe and a run of them."""
    folder = tmp_path_factory.mktemp("place")
    write_model(folder / "model")
    write_chats(folder / "chats.jsonl", 12)
    write_recipe(folder / "recipe.yaml", model=folder / "model", chats=folder / "chats.jsonl")
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj", "out_proj"]
    run = ["train.max_steps=2", f"lora.target_modules={targets}", f"output_dir={folder / 'run'}"]
    assert command(f"recipe={folder / 'recipe.yaml'}", *run) == 0
    return folder


def spoil(path: Path, data: st.DataObject) -> None:
    """Changes a file: values of a JSON tree, or the text."""
    if path.suffix == ".json" and data.draw(st.booleans()):
        tree = json.loads(path.read_text())
        path.write_text(json.dumps(data.draw(spoilt_tree(st.just(tree)))))
    else:
        path.write_bytes(data.draw(spoilt_text(st.just(path.read_text()))))


@examples(1.0)
@given(text=spoilt_text(st.sampled_from(SHIPPED)))
def test_recipes_as_text(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text)
    loaded(path)


@examples(0.7)
@given(
    overrides=st.lists(
        st.builds(
            lambda key, value: f"{key}={value if isinstance(value, str) else json.dumps(value)}",
            st.sampled_from(KEYS) | st.text(max_size=9),
            VALUES,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_overrides_of_any_values(place: Path, overrides: list[str]) -> None:
    """Of any values; what a recipe takes is followed up to the weights."""
    found = loaded(place / "recipe.yaml", [f"output_dir={place / 'new'}", *overrides])
    if found is not None and found.model.path == str(place / "model"):
        with contextlib.suppress(InputError):
            Inputs.read(found)


@pytest.fixture(scope="module")
def configs() -> list[dict[str, Any]]:
    """Configurations of every family, as transformers writes its defaults."""
    from transformers import AutoConfig

    found = [AutoConfig.for_model(family).to_dict() for family in FAMILIES]
    return [json.loads(json.dumps(config, default=str)) for config in found]


@examples(1.0)
@given(data=st.data())
def test_configurations(tmp_path: Path, configs: list[dict[str, Any]], data: st.DataObject) -> None:
    config = data.draw(spoilt_tree(st.sampled_from(configs)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    command("list", "targets", f"model.path={tmp_path}")


@examples(0.3)
@given(data=st.data())
def test_tokenizers_and_templates(place: Path, tmp_path: Path, data: st.DataObject) -> None:
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
    model = tmp_path / "model"
    shutil.copytree(place / "model", model, dirs_exist_ok=True)
    path = model / data.draw(st.sampled_from(files))
    spoil(path, data)
    command(
        "data",
        f"recipe={place / 'recipe.yaml'}",
        f"output_dir={place / 'new'}",
        f"model.path={model}",
    )


@examples(0.3)
@given(data=st.data())
def test_adapters(place: Path, tmp_path: Path, data: st.DataObject) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(place / "run" / "adapter", adapter, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    path = adapter / "adapter_config.json"
    if data.draw(st.booleans()):
        tree = json.loads(path.read_text())
        path.write_text(json.dumps(data.draw(spoilt_tree(st.just(tree)))))
    else:
        path = adapter / "adapter_model.safetensors"
        path.write_bytes(data.draw(spoilt_bytes(path.read_bytes())))
    layout = data.draw(st.sampled_from(["fused", "per-expert"]))
    words = [f"from={adapter}", f"to={tmp_path / 'new'}", f"layout={layout}"]
    status = command("convert-adapter", *words, f"model.path={place / 'model'}")
    assert (tmp_path / "new").exists() == (status == 0)


RUN_FILES = ("recipe.yaml", "metrics.jsonl", "summary.json", "lock.json", "adapters.tsv")


@examples(0.3)
@given(data=st.data())
def test_run_folders(place: Path, tmp_path: Path, data: st.DataObject) -> None:
    for name in RUN_FILES:
        shutil.copyfile(place / "run" / name, tmp_path / name)
    path = tmp_path / data.draw(st.sampled_from(RUN_FILES))
    spoil(path, data)
    command("report", f"run={tmp_path}")


# What a read that failed has left to say goes to an event loop of Orbax that is closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@examples(0.1)
@given(data=st.data())
def test_checkpoints(place: Path, tmp_path: Path, data: st.DataObject) -> None:
    """What a spoilt checkpoint holds is what was trained, or it is refused."""
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(place / "run", run)
    files = sorted(path for path in (run / "checkpoints").rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    before = path.read_bytes()
    path.write_bytes(data.draw(spoilt_bytes(before)) if before else b"x")
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    status = command("export", f"run={run}", f"to={tmp_path / 'new'}", "format=peft")
    new = tmp_path / "new" / "adapter_model.safetensors"
    assert new.exists() == (status == 0)
    if status == 0:
        assert new.read_bytes() == (place / "run" / "adapter" / new.name).read_bytes()
