# SPDX-License-Identifier: Apache-2.0
"""What a lock holds, and what it takes for a change."""

import dataclasses
import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from lora_tune import lockfile, recipe
from lora_tune.errors import InputError
from lora_tune.hf.hub import Source


class Data:
    held_out = None

    def position(self, step):
        return {"step": step, "epoch": 0, "row": 0, "fingerprint": "f00d", "seed": 0}


def inputs(folder: Path, **changes):
    """What `lockfile.current` reads of a run, without a model or data."""
    words = {"a": 0, "b": 1}
    tokenizer = SimpleNamespace(
        split_special_tokens=False,
        backend_tokenizer=Tokenizer(models.WordLevel(words, unk_token="a")),
        chat_template="{{ x }}",
    )
    given = {
        "recipe": recipe.Recipe(output_dir=str(folder / "run")),
        "source": Source(folder / "model", "me/base", "abc"),
        "tokenizer": tokenizer,
        "data": Data(),
    }
    return SimpleNamespace(**{**given, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    save_file({"w": np.arange(2_000_000, dtype=np.float32)}, tmp_path / "model" / "a.safetensors")
    return tmp_path


def test_it_holds_what_decides_a_run_and_survives_json(folder):
    lock = lockfile.current(inputs(folder))
    lockfile.write(folder / "run", lock)
    assert lockfile.read(folder / "run" / "lock.json") == lock
    assert (lock["model"]["base"], lock["model"]["commit"]) == ("me/base", "abc")
    assert set(lock["model"]["weights"]) == {"a.safetensors"}
    assert lock["data"] == {"train": {"fingerprint": "f00d", "seed": 0}, "eval": None}
    for name in ("jax", "jaxlib", "flax", "qwix", "optax", "transformers", "tokenizers"):
        assert lock["packages"][name] == metadata.version(name)
    assert lock["recipe"]["train"]["batch_size"] == 8
    assert not {"output_dir", "locked", "log"} & set(lock["recipe"])
    lockfile.check(folder / "run" / "lock.json", lockfile.current(inputs(folder)))


def test_every_change_is_told(folder):
    path = folder / "run" / "lock.json"
    lockfile.write(folder / "run", lockfile.current(inputs(folder)))

    def told(**changes):
        with pytest.raises(InputError) as error:
            lockfile.check(path, lockfile.current(inputs(folder, **changes)))
        assert "\n" not in str(error.value)
        assert "set locked=false" in str(error.value)
        return str(error.value)

    assert 'model.commit was "abc", is "abd"' in told(
        source=Source(folder / "model", "me/base", "abd")
    )
    other = recipe.Recipe(output_dir="x", train=recipe.Train(seed=1, resume="never"), lora=None)
    said = told(recipe=other)
    assert "recipe.train.seed was 0, is 1" not in said, "after the first five"
    assert "recipe.lora was not there, is null" in said
    assert "more" in said
    template = inputs(folder).tokenizer
    template.chat_template = "{{ y }}"
    assert "tokenizer.chat_template was " in told(tokenizer=template)
    (folder / "model" / "config.json").write_text('{"a": 1}')
    assert "model.config.json was " in told()


def test_a_start_is_held_by_its_content(folder):
    path, adapter = folder / "run" / "lock.json", folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"a": np.zeros(8, np.float32)}, adapter / "adapter_model.safetensors")
    started = recipe.Recipe(output_dir="x", lora=recipe.Lora(adapter_path=str(adapter)))
    lockfile.write(folder / "run", lockfile.current(inputs(folder, recipe=started)))
    lockfile.check(path, lockfile.current(inputs(folder, recipe=started)))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        before = (adapter / name).read_bytes()
        (adapter / name).write_bytes(before + b" ")
        with pytest.raises(InputError, match=rf"the run is not that of .*: adapter\.{name} was "):
            lockfile.check(path, lockfile.current(inputs(folder, recipe=started)))
        (adapter / name).write_bytes(before)
    resumed = dataclasses.replace(started, train=recipe.Train(resume="other/run"))
    with pytest.raises(InputError, match=r'train\.resume was not there, is "other/run"'):
        lockfile.check(path, lockfile.current(inputs(folder, recipe=resumed)))


def test_what_decides_no_number_is_no_change(folder):
    lockfile.write(folder / "run", lockfile.current(inputs(folder)))
    log = recipe.Log(every=3, report_to="tensorboard")
    other = recipe.Recipe(output_dir="y", locked=True, log=log, train=recipe.Train(resume="never"))
    tokenizer = inputs(folder).tokenizer
    tokenizer.backend_tokenizer.enable_truncation(4)
    now = lockfile.current(inputs(folder, recipe=other, tokenizer=tokenizer))
    lockfile.check(folder / "run" / "lock.json", now)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw + b"\0",
        lambda raw: raw.replace(b'"w"', b'"v"', 1),
        lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        lambda raw: raw[: len(raw) // 2] + bytes(200_000) + raw[len(raw) // 2 + 200_000 :],
    ],
)
def test_weights_that_change_have_another_hash(folder, change):
    path = folder / "model" / "a.safetensors"
    before, raw = lockfile.weights_hash(path), path.read_bytes()
    assert lockfile.weights_hash(path) == before
    path.write_bytes(change(raw))
    assert lockfile.weights_hash(path) != before


def test_a_small_file_is_hashed_whole(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": np.zeros(250_000, np.float32)}, path)
    raw, before = path.read_bytes(), lockfile.weights_hash(path)
    for place in range(200, len(raw), 9973):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert lockfile.weights_hash(path) != before, place


def test_the_lock_of_the_folder_counts_before_that_of_the_recipe(folder):
    file = folder / "mine.yaml"
    file.write_text("x: 1")
    with pytest.raises(
        InputError, match=r"neither .*run/lock\.json nor .*mine\.lock\.json; run on"
    ):
        lockfile.find(file, folder / "run")
    (folder / "mine.lock.json").write_text("{}")
    assert lockfile.find(file, folder / "run") == folder / "mine.lock.json"
    (folder / "run" / "lock.json").write_text("{}")
    assert lockfile.find(file, folder / "run") == folder / "run" / "lock.json"
    with pytest.raises(InputError, match="is no lock file of format 1"):
        lockfile.read(folder / "run" / "lock.json")
    (folder / "run" / "lock.json").write_text("{")
    with pytest.raises(InputError, match="it is not JSON"):
        lockfile.read(folder / "run" / "lock.json")


def test_other_packages_are_told_when_a_run_goes_on(folder):
    assert lockfile.changed_packages(folder / "run") is None
    lock = lockfile.current(inputs(folder))
    lockfile.write(folder / "run", lock)
    assert lockfile.changed_packages(folder / "run") is None
    lock["packages"] |= {"jax": "0.1"}
    (folder / "run" / "lock.json").write_text(json.dumps(lock))
    said = lockfile.changed_packages(folder / "run")
    assert (
        said == f'note: other versions than before: jax was "0.1", is "{metadata.version("jax")}"'
    )


@pytest.mark.parametrize("content", ["{", '{"format": 2}', '{"format": 1, "packages": 3}'])
def test_a_lock_that_cannot_be_read_ends_no_run_that_goes_on(folder, content):
    (folder / "run" / "lock.json").write_text(content)
    said = lockfile.changed_packages(folder / "run")
    assert said is not None
    assert "lock.json cannot be read, so versions are not compared" in said
