# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with what the user gives: one sentence, a status, and nothing half-written."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_run import (
    leftovers,
    rows_of,
    tree_of,
    write_chats,
    write_model,
    write_recipe,
)

import lora_tune
from lora_tune import cli
from lora_tune import recipe as recipes
from lora_tune.checkpoint import files
from lora_tune.hf import merge, peft
from lora_tune.training.metrics import MetricsLog

pytestmark = pytest.mark.usefixtures("compile_fast")
ROOT = Path(__file__).parents[2]


class Place:
    """A folder with a model, conversations and a recipe, all in order."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model, self.chats = folder / "model", folder / "chats.jsonl"
        self.recipe, self.run_dir = folder / "recipe.yaml", folder / "run"
        write_recipe(self.recipe, model=self.model, chats=self.chats)

    def config(self, **changes: Any) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def weights(self, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
        path = self.model / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    def arguments(self, *overrides: str) -> list[str]:
        return [f"recipe={self.recipe}", f"output_dir={self.run_dir}", *overrides]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    write_model(folder / "model")
    write_chats(folder / "chats.jsonl", 30)
    return folder


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Place:
    shutil.copytree(pristine, tmp_path / "place")
    return Place(tmp_path / "place")


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *, status: int = 2) -> str:
    """Runs a command that must fail; returns its one sentence."""
    capsys.readouterr()
    assert cli.main(arguments) == status
    err = capsys.readouterr().err
    assert err.startswith("lora-tune: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err.removeprefix("lora-tune: error: ").rstrip("\n")


def run_process(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it: what libraries print by themselves is seen as well."""
    return subprocess.run(
        [sys.executable, "-m", "lora_tune.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_refused_untouched(
    capsys: pytest.CaptureFixture[str], place: Place, overrides: list[str], said: list[str]
) -> None:
    before = tree_of(place.folder)
    sentence = refused(capsys, place.arguments(*overrides))
    for words in said:
        assert words in sentence, sentence
    assert tree_of(place.folder) == before, "a refused command writes nothing"


def test_the_place_is_in_order(place: Place) -> None:
    """Or else every other test here might find the wrong fault."""
    assert cli.main(place.arguments()) == 0
    assert leftovers(place.run_dir) == []
    assert set(os.listdir(place.run_dir)) == {"adapter", "checkpoints", *START}


MESSAGES = (
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
)
QUESTION = '{"messages": [{"role": "user", "content": "a"}]}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ["chats.jsonl", "does not exist"]),
        ("", ["chats.jsonl", "is empty"]),
        ("\n \n", ["chats.jsonl", "is empty"]),
        (MESSAGES + '{"messages": [\n' + MESSAGES, ["chats.jsonl:2", "broken JSON at column"]),
        (MESSAGES + "[1, 2]\n", ["chats.jsonl:2", "expected a JSON object, got a list"]),
        ('{"question": "a", "answer": "b"}\n', ["chats.jsonl:1", "`answer`, `question`", "`text`"]),
        (MESSAGES + '{"text": "a"}\n', ["chats.jsonl:2", "`messages` is missing", "found `text`"]),
        (MESSAGES + QUESTION, ["chats.jsonl:2", "assistant"]),
        ('{"messages": []}\n', ["chats.jsonl:1"]),
        ('{"messages": "hello"}\n', ["chats.jsonl:1"]),
        ('{"messages": [{"role": "alien", "content": "a"}]}\n', ["chats.jsonl:1", "alien"]),
        ('{"prompt": 1, "completion": "b"}\n', ["chats.jsonl:1", "`prompt` must be a string"]),
        ('{"text": "\\udcff"}\n', ["chats.jsonl:1", "half of a surrogate pair"]),
        (b"\xff\xfe\x00{", ["chats.jsonl:1", "not UTF-8"]),
    ],
)
def test_bad_data(
    place: Place, capsys: pytest.CaptureFixture[str], content: str | bytes | None, said: list[str]
) -> None:
    if content is None:
        place.chats.unlink()
    else:
        place.chats.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused_untouched(capsys, place, [], said)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.eval_path=none.jsonl"], ["data.eval_path", "none.jsonl", "does not exist"]),
        (["data.path=some/where"], ["data.path", "some/where", "hub"]),
        (["data.path={model}"], ["data.path", "is a folder"]),
        (["data.path={model}/config.json"], ["config.json", "unknown columns"]),
        (["data.path={model}/model.safetensors"], ["ends in '.safetensors'", ".parquet"]),
        (["data.path={folder}/*.csv"], ["no file matches", "*.csv"]),
        (["data.path=lora_tune:quickstart/nothing.jsonl"], ["lora_tune:quickstart/train.jsonl"]),
        (["data.format=text"], ["chats.jsonl:1", "`text` is missing"]),
        (["data.columns={{messages: talk}}"], ["names `talk`", "found `messages`"]),
        (["data.max_length=100000000000"], ["data.max_length", "train.batch_size", "GB"]),
        (["data.columns={{tools: functions}}"], ["data.columns names `functions`", "chats.jsonl"]),
        (["data.max_length=2"], ["chats.jsonl", "raise data.max_length"]),
        (["model.path=none"], ["model.path", "none", "folder"]),
        (["model.path=some/where"], ["some/where", "no such folder here", "cache"]),
        (["model.path=lora_tune:none"], ["'lora_tune:none' is not shipped"]),
        (["model.revision=main"], ["is a local folder, which has no revision"]),
        (["model.chat_template=none.jinja"], ["none.jinja", "cannot be read"]),
        (["lora.rankk=4"], ["lora.rankk", "lora.r"]),
        (["lora.r=0"], ["lora.r must be at least 1, got 0"]),
        (["lora.r=many"], ["lora.r must be an integer"]),
        (["lora.target_modules=[q_prj]"], ["q_prj", "q_proj"]),
        (["lora.target_modules=[q_proj,nothing]"], ["nothing", "q_proj"]),
        (["lora.target_modules=.*no"], [".*no", "q_proj"]),
        (["lora.layers_to_transform=[99]"], ["99"]),
        (["lora.adapter_path={folder}/none"], ["lora.adapter_path", "{folder}/none"]),
        (["model.init=random", "save.merged=true"], ["save.merged", "model.init"]),
        (["mesh.data=16", "train.batch_size=16"], ["needs 16 devices, but 8 are available"]),
        (["mesh.expert=8", "train.batch_size=8"], ["mesh.expert=8 does not divide", "size 4"]),
        (["mesh.tensor=3"], ["mesh.tensor=3 does not divide"]),
        (["mesh.fsdp=3", "train.batch_size=3"], ["mesh.fsdp=3 does not divide"]),
        (["mesh.data=3"], ["train.batch_size (4) must be a multiple of"]),
        (["train.gradient_accumulation_steps=3"], ["train.batch_size (4)", "(3)"]),
        (["eval.every=2"], ["eval.every", "data.eval_path"]),
        (["train.max_steps=0"], ["train.max_steps must be at least 1"]),
        (["data.path"], ["expected key=value, got 'data.path'"]),
    ],
)
def test_bad_settings(
    place: Place, capsys: pytest.CaptureFixture[str], overrides: list[str], said: list[str]
) -> None:
    names = {"folder": place.folder, "model": place.model}
    overrides = [text.format(**names) for text in overrides]
    assert_refused_untouched(capsys, place, overrides, [words.format(**names) for words in said])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, ["recipe", "is neither a file nor a shipped recipe", "quickstart.yaml"]),
        ("model: [", ["recipe.yaml", "not valid YAML in line"]),
        ("", ["recipe.yaml", "holds no `key: value` lines"]),
        ("lora: 3", ["lora must be", "got 3", "model.path is required"]),
        (b"\xff", ["recipe.yaml", "not UTF-8"]),
    ],
)
def test_bad_recipe(
    place: Place, capsys: pytest.CaptureFixture[str], text: str | bytes | None, said: list[str]
) -> None:
    place.recipe.unlink()
    if text is not None:
        place.recipe.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused_untouched(capsys, place, [], said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "phi3"}, ["model_type 'phi3' is not supported", "qwen3_next"]),
        ({"model_type": None}, ["model_type None is not supported"]),
        ({"model_type": ["qwen3_next"]}, ["model_type", "is not supported"]),
        ({"attention_bias": True}, ["attention_bias=True is not supported"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "is not supported"]),
        (
            {"rope_scaling": {"type": "longrope"}},
            ["rope_scaling.type='longrope'", "is not supported"],
        ),
        ({"rope_parameters": 5}, ["rope_parameters"]),
        ({"rope_theta": "big"}, ["rope_theta"]),
        ({"hidden_size": "16"}, ["hidden_size is '16', expected int"]),
        ({"hidden_size": 0}, ["hidden_size"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads"]),
        ({"linear_num_key_heads": 0}, ["linear_num_key_heads"]),
        ({"full_attention_interval": 0}, ["full_attention_interval"]),
        ({"full_attention_interval": "often"}, ["full_attention_interval"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok"]),
        ({"mlp_only_layers": 3}, ["mlp_only_layers"]),
        ({"layer_types": ["linear_attention"]}, ["layer_types lists 1 layers"]),
        ({"layer_types": [1] * 6}, ["layer_types"]),
        ({"layer_types": 7}, ["layer_types"]),
        ({"num_hidden_layers": 5_000_000}, ["num_hidden_layers is 5000000, expected at most"]),
        ({"num_experts": 5_000_000}, ["num_experts is 5000000, expected at most"]),
        ({"partial_rotary_factor": 0.4}, ["head_dim (8) times partial_rotary_factor is 3"]),
        ({"partial_rotary_factor": 0.01}, ["is 0, expected an even number above 0"]),
        ({"max_position_embeddings": 40}, ["data.max_length (48)", "max_position_embeddings (40)"]),
        ({"vocab_size": 40}, ["beyond the model's vocabulary of 40"]),
    ],
)
def test_bad_configuration(
    place: Place, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: list[str]
) -> None:
    place.config(**changes)
    assert_refused_untouched(capsys, place, [], said)


def spoil(name: str, content: bytes | None) -> Callable[[Place], Any]:
    def change(place: Place) -> None:
        path = place.model / name
        path.unlink() if content is None else path.write_bytes(content)

    return change


def truncate(place: Place) -> None:
    path = place.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def flip_header(place: Place) -> None:
    path = place.model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[20] ^= 0xFF
    path.write_bytes(raw)


def not_a_number(place: Place) -> None:
    place.weights(lambda tensors: tensors["model.norm.weight"].__setitem__(0, np.nan))


def misshape(place: Place) -> None:
    place.weights(lambda tensors: tensors.update({"model.norm.weight": np.ones(3, np.float32)}))


def lose(place: Place) -> None:
    place.weights(lambda tensors: [tensors.pop("lm_head.weight"), tensors.pop("model.norm.weight")])


def add(place: Place) -> None:
    place.weights(lambda tensors: tensors.update({"model.visual.weight": np.ones(3, np.float32)}))


def no_template(place: Place) -> None:
    (place.model / "chat_template.jinja").unlink()
    path = place.model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))


def missing_shard(place: Place) -> None:
    path = place.model / "model.safetensors"
    names = dict.fromkeys(load_file(path), "model-00001-of-00001.safetensors")
    (place.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    path.unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (truncate, ["model.safetensors: not a valid safetensors file", "download it again"]),
        (flip_header, ["model.safetensors: not a valid safetensors file", "download it again"]),
        (spoil("model.safetensors", b""), ["model.safetensors: not a valid safetensors file"]),
        (spoil("model.safetensors", b"x" * 99), ["model.safetensors: not a valid safetensors"]),
        (spoil("model.safetensors", None), ["model.path: ", "lacks weights (model.safetensors or"]),
        (missing_shard, ["names model-00001-of-00001.safetensors, which is not in the folder"]),
        (not_a_number, ["model.safetensors", "'model.norm.weight'", "NaN"]),
        (misshape, ["model.norm.weight", "has shape [3], expected [16]"]),
        (lose, ["lm_head.weight is missing", "model.norm.weight is missing"]),
        (add, ["model.visual.weight", "is unknown to this model"]),
        (spoil("config.json", b"{"), ["config.json: is not valid JSON"]),
        (spoil("config.json", b"\xff"), ["config.json: is not valid JSON"]),
        (spoil("config.json", b"[]"), ["config.json: expected a JSON object, got list"]),
        (spoil("config.json", None), ["model.path: ", "lacks a configuration (config.json)"]),
        (spoil("tokenizer.json", None), ["model.path: ", "lacks a tokenizer (tokenizer.json)"]),
        (spoil("tokenizer.json", b"{"), ["model.path: no tokenizer can be loaded from"]),
        (spoil("tokenizer.json", b'{"version": "1.0"}'), ["no tokenizer can be loaded from"]),
        (no_template, ["has no chat template", "model.chat_template"]),
        (spoil("chat_template.jinja", b"{% if"), ["chat template"]),
        (spoil("chat_template.jinja", b"hello"), ["chat template", "model.chat_template"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bad_model_folder(
    place: Place,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Place], Any],
    said: list[str],
) -> None:
    change(place)
    assert_refused_untouched(capsys, place, [], said)


def test_a_broken_tokenizer_is_the_only_line_of_a_real_process(place: Place) -> None:
    (place.model / "tokenizer.json").write_text("{")
    done = run_process(place.arguments())
    assert done.returncode == 2
    assert done.stderr.startswith("lora-tune: error: model.path: no tokenizer can be loaded")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def file_in_the_way(place: Place) -> None:
    place.run_dir.write_text("mine")


def file_above(place: Place) -> None:
    (place.folder / "file").write_text("mine")
    place.run_dir = place.folder / "file" / "run"


def foreign_adapter(place: Place) -> None:
    (place.run_dir / "adapter").mkdir(parents=True)
    (place.run_dir / "adapter" / "adapter_model.safetensors").write_text("mine")


def adapter_is_a_file(place: Place) -> None:
    place.run_dir.mkdir()
    (place.run_dir / "adapter").write_text("mine")


def checkpoints_are_a_file(place: Place) -> None:
    place.run_dir.mkdir()
    (place.run_dir / "checkpoints").write_text("mine")


def no_such_system(place: Place) -> None:
    place.run_dir = Path("/proc/lora_tune")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (file_in_the_way, ["run", "is a file; set another"]),
        (file_above, ["file/run", "file is a file; set another"]),
        (foreign_adapter, ["run/adapter: is not empty and was not written by lora-tune"]),
        (adapter_is_a_file, ["run/adapter: exists and is not a folder"]),
        (checkpoints_are_a_file, ["run/checkpoints", "set another output_dir"]),
        (no_such_system, ["/proc/lora_tune", "set another output_dir"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_output_folder_that_is_not_ours(
    place: Place,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Place], Any],
    said: list[str],
) -> None:
    change(place)
    assert_refused_untouched(capsys, place, [], said)


def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_read(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser may write everywhere, so the question is answered for it.
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: False if mode & os.W_OK else real(path, mode)
    )
    place.chats.unlink()
    assert_refused_untouched(capsys, place, [], ["run", "may not be written; set another"])


def test_an_adapter_of_another_rank(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = lora_tune.load_model(place.model, dtype="float32")
    lora_tune.add_lora(model, lora_tune.LoraConfig(r=2, target_modules=["q_proj"]))
    lora_tune.save_adapter(model, place.folder / "other", allow_untrained=True)
    overrides = [f"lora.adapter_path={place.folder / 'other'}"]
    assert_refused_untouched(capsys, place, overrides, ["lora.adapter_path", "r=2", "lora.r"])


def test_an_adapter_of_other_modules(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = lora_tune.load_model(place.model, dtype="float32")
    lora_tune.add_lora(model, lora_tune.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    lora_tune.save_adapter(model, place.folder / "other", allow_untrained=True)
    overrides = [f"lora.adapter_path={place.folder / 'other'}"]
    said = ["lora.adapter_path", "other modules", "lora.target_modules=", "q_proj"]
    assert_refused_untouched(capsys, place, overrides, said)


def test_an_adapter_of_another_model(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    wide = write_model(place.folder / "wide", head_dim=16)
    model, _ = lora_tune.load_model(wide, dtype="float32")
    lora_tune.add_lora(model, lora_tune.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    lora_tune.save_adapter(model, place.folder / "other", allow_untrained=True)
    overrides = [f"lora.adapter_path={place.folder / 'other'}"]
    said = ["adapter_model.safetensors: the adapter does not fit the model", "q_proj"]
    assert_refused_untouched(capsys, place, overrides, said)


def test_training_gone_wrong_is_one_sentence_and_leaves_nothing_to_go_on_from(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.weights(lambda tensors: tensors["lm_head.weight"].__imul__(np.float32(1e38)))
    sentence = refused(capsys, place.arguments("save.every=1"), status=1)
    assert "the loss of step 1 is" in sentence
    assert "weights are damaged" in sentence
    assert set(os.listdir(place.run_dir)) == START
    assert (place.run_dir / "metrics.jsonl").read_bytes() == b""
    report = (place.run_dir / "report.html").read_text(encoding="utf-8")
    assert "Stopped because training had gone wrong after step 0 of 4: the loss of step 1" in report


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes: the system itself refuses, whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_disk_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, call: int) -> None:
    """The disk is full during the given call of a function."""
    real, calls = getattr(owner, name), []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) != call:
            return real(*args, **kwargs)
        with full_disk():
            return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


START = {
    "adapters.tsv",
    "lock.json",
    "metrics.jsonl",
    "recipe.yaml",
    "report.html",
    "summary.json",
}
"""What stands in the folder of a run that has begun, however it ended."""


@pytest.fixture(scope="module")
def undisturbed(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that those below would have been."""
    place = Place(shutil.copytree(pristine, tmp_path_factory.mktemp("undisturbed") / "place"))
    assert cli.main(place.arguments("save.every=2", "save.merged=true")) == 0
    return place.run_dir


def test_a_disk_that_is_full_in_one_place_after_another(
    place: Place,
    undisturbed: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command each time: every failure is clean, and the last one is none."""
    arguments = place.arguments("save.every=2", "save.merged=true")
    found = set[str]()
    for owner, name, call, said, adds in (
        (recipes, "save", 1, f"output_dir {place.run_dir} cannot be written", set()),
        (MetricsLog, "write", 2, "metrics.jsonl cannot be written", START),
        (files, "start_writing", 2, "the checkpoint of step 4", {"checkpoints"}),
        (peft, "_write_weights", 1, "run/adapter: could not be written", set()),
        (merge.Merger, "_write", 1, "run/merged: could not be written", {"adapter"}),
    ):
        with monkeypatch.context() as patch:
            fill_disk_in(patch, owner, name, call=call)
            sentence = refused(capsys, arguments)
        assert said in sentence
        assert "File too large" in sentence
        assert "free" in sentence, "it says what to do"
        assert leftovers(place.run_dir) == []
        found |= adds
        assert {path.name for path in place.run_dir.glob("*")} == found
        if "metrics.jsonl" in found:
            rows_of(place.run_dir)  # no torn line
    assert cli.main(arguments) == 0
    assert rows_of(place.run_dir) == rows_of(undisturbed)
    for folder in ("adapter", "merged"):
        assert tree_of(place.run_dir / folder).keys() == tree_of(undisturbed / folder).keys()
    weights = Path("adapter") / "adapter_model.safetensors"
    assert (place.run_dir / weights).read_bytes() == (undisturbed / weights).read_bytes()
    assert set(os.listdir(place.run_dir)) == set(os.listdir(undisturbed))


def test_disks_of_growing_size(
    place: Place, undisturbed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same command on a real file system that ends at one place after another."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting needs the superuser")
    place.run_dir = disk / "run"
    places = set()
    try:
        merged = refused(capsys, place.arguments("save.every=2", "save.merged=true"))
        assert "MB are to be written and the disk has 0.0 MB free" in merged
        for size in ("8k", "400k"):
            remount = ["mount", "-o", f"remount,size={size}", str(disk)]
            subprocess.run(remount, check=True)
            sentence = refused(capsys, place.arguments("save.every=2"))
            assert "No space left on device" in sentence
            assert str(disk) in sentence
            places.add(sentence)
            assert leftovers(disk) == []
        assert len(places) > 1, places
        done = run_process(place.arguments("save.every=2"))
        assert done.returncode == 2
        assert "No space left on device" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert cli.main(place.arguments("save.every=2", "save.merged=true")) == 0
        assert rows_of(place.run_dir) == rows_of(undisturbed)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
