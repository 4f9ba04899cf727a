# SPDX-License-Identifier: Apache-2.0
"""The command `prove`: a run that passes, and each fault that must be found by name."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from hf_cases import EVERYWHERE
from safetensors.torch import load_file, save_file
from torch_models import write_checkpoint

import lora_tune
from lora_tune import cli
from lora_tune.proof import reference

pytest.importorskip("peft")
pytestmark = [pytest.mark.parity, pytest.mark.slow]

QUERIES = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
EXPERT = "model.layers.0.mlp.experts.3."


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a base with every kind of projection, with adapter and merged folder."""
    folder = tmp_path_factory.mktemp("prove")
    base = write_checkpoint(
        folder / "base",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[1],
    )
    rows = [{"prompt": f"w{i} w{i + 1} ", "completion": f"w{i + 2} w{i}"} for i in range(6, 30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "output_dir": str(folder / "run"),
        "model": {"path": str(base), "dtype": "float32", "remat": "none"},
        "lora": {"r": 4, "lora_alpha": 10, "target_modules": list(EVERYWHERE)},
        "data": {"path": str(folder / "rows.jsonl"), "max_length": 16},
        "optim": {"learning_rate": 0.02, "lr_scheduler_type": "constant"},
        "train": {"max_steps": 3, "batch_size": 4},
        "save": {"merged": True},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lora_tune.train(str(folder / "recipe.yaml"))
    return folder / "run"


def prove(run: Path, capsys, *words: str, status: int = 1) -> str:
    """Proves a run; returns the error."""
    assert cli.main(["prove", f"run={run}", *words]) == status
    out, err = capsys.readouterr()
    if status == 1:
        found = json.loads((run / "certificate.json").read_text())
        assert not found["passed"]
        adapter = (run / "adapter").is_dir()
        assert [each["loads"] for each in found["loads"].values()] == [False] * 3 * adapter
        assert found["vllm_serve"] is None
        assert out.startswith("# Failed")
    *progress, said = err.splitlines() or [""]
    assert all(line.startswith("window ") for line in progress)
    if status:
        assert said.startswith("lora-tune: error: ")
    return err if status else ""


def test_a_run_is_proved(run, capsys):
    assert prove(run, capsys, status=0) == ""
    found = json.loads((run / "certificate.json").read_text())
    assert found["passed"]
    assert (found["step"], found["rows"]) == (3, {"fixed": 2, "data": 2, "length": 80})
    adapter, merge = found["adapter"], found["merge"]
    assert 0 < adapter["max_logit_error"] < 1e-4 < 0.1 < adapter["effect"]
    # Queries and gates of 4 heads of 16; gate and up, 12 each, of 6 experts.
    kinds = adapter["parameters_changed"]
    assert kinds["model.layers.*.self_attn.q_proj.weight"] == 2 * 64 * 32
    assert kinds["model.layers.*.mlp.experts.gate_up_proj"] == 6 * 24 * 32
    adapted = len(load_file(run / "adapter" / "adapter_model.safetensors")) // 2
    tensors = len(load_file(run / "merged" / "model.safetensors"))
    assert (merge["changed"], merge["unchanged"]) == (adapted, tensors - adapted)
    assert merge["max_logit_error"] < 1e-4
    assert found["loads"]["vllm"]["loads"]
    assert "--max-lora-rank 8" in found["vllm_serve"]
    assert str(run / "adapter") in found["vllm_serve"]
    summary = (run / "certificate.md").read_text()
    assert summary.startswith("# Passed")
    assert found["vllm_serve"] in summary


def without_merged(run: Path, folder: Path) -> Path:
    return shutil.copytree(run, folder, ignore=lambda *_: ["merged"])


def edit(run: Path, change) -> None:
    path = run / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, path, {"format": "pt"})


def rename(tensors) -> None:
    tensors[QUERIES.format("A").replace("q_proj", "query")] = tensors.pop(QUERIES.format("A"))


def transpose(tensors) -> None:
    tensors[QUERIES.format("B")] = tensors[QUERIES.format("B")].T


def drop_expert(tensors) -> None:
    for key in [key for key in tensors if EXPERT in key]:
        del tensors[key]


def move_a_value(tensors) -> None:
    tensors[QUERIES.format("A")][0, 0] += 1e-3


@pytest.mark.parametrize("checkpoints", ["kept", "removed"])
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (rename, "model.layers.1.self_attn.q"),
        (transpose, "model.layers.1.self_attn.q_proj"),
        (drop_expert, EXPERT),
    ],
)
def test_a_damaged_adapter_fails_by_name(run, tmp_path, capsys, fault, named, checkpoints):
    copy = without_merged(run, tmp_path / "run")
    if checkpoints == "removed":
        shutil.rmtree(copy / "checkpoints")
    edit(copy, fault)
    assert named in prove(copy, capsys)


@pytest.mark.parametrize("checkpoints", ["kept", "removed"])
def test_a_wrong_alpha_fails_by_name(run, tmp_path, capsys, checkpoints):
    copy = without_merged(run, tmp_path / "run")
    if checkpoints == "removed":
        shutil.rmtree(copy / "checkpoints")
    path = copy / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 20}))
    error = prove(copy, capsys)
    assert "model.layers.0.linear_attn.in_proj_ba: has scale 5 by adapter_config.json" in error
    assert "was trained with 2.5" in error


def test_a_value_that_is_not_the_checkpoints_fails_by_name(run, tmp_path, capsys):
    copy = without_merged(run, tmp_path / "run")
    edit(copy, move_a_value)
    assert "model.layers.1.self_attn.q_proj: lora_A differs" in prove(copy, capsys)


def test_peft_itself_is_asked(run, tmp_path, capsys):
    """What our reader takes and PEFT does not, such as a name that it does not look for."""
    copy = without_merged(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    path = copy / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].remove("k_proj")
    path.write_text(json.dumps(config))
    error = prove(copy, capsys)
    assert "k_proj" in error
    path.write_text(json.dumps(config | {"target_modules": ["nothing"], "target_parameters": None}))
    assert "PEFT refuses adapter/: " in prove(copy, capsys)


def test_a_merged_tensor_that_is_not_the_sum_fails_by_name(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "merged" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.weight"] += 0.01
    tensors["model.norm.weight"] += 1
    save_file(tensors, path, {"format": "pt"})
    prove(copy, capsys)
    problems = json.loads((copy / "certificate.json").read_text())["problems"]
    named = {problem.split(":")[0] for problem in problems}
    assert {"model.layers.1.self_attn.q_proj.weight", "model.norm.weight"} <= named


def test_a_fully_trained_model(tmp_path, capsys):
    base = write_checkpoint(tmp_path / "base", model_type="llama", num_hidden_layers=1)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w6 w7 ", "completion": "w8 w9"}\n' * 8)
    recipe = {
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(base), "dtype": "float32", "remat": "none"},
        "lora": None,
        "data": {"path": str(tmp_path / "rows.jsonl"), "max_length": 16},
        "train": {"max_steps": 1, "batch_size": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lora_tune.train(str(tmp_path / "recipe.yaml"))
    capsys.readouterr()
    run = tmp_path / "run"
    prove(run, capsys, status=0)
    found = json.loads((run / "certificate.json").read_text())
    assert found["adapter"] is None
    assert found["merge"]["changed"] > 0
    assert found["vllm_serve"] == f"vllm serve {run / 'merged'}"
    path = run / "merged" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, path, {"format": "pt"})
    assert cli.main(["prove", f"run={run}"]) == 1
    assert "model.norm.weight: differs from the checkpoint" in capsys.readouterr().err


# The base takes 127 kB in float32: its layers one by one, and half of the experts at a time.
IN_WINDOWS = "limit_gb=8e-5"


def figures(run: Path) -> dict:
    return json.loads((run / "certificate.json").read_text())


def test_a_large_base_is_proved_in_windows(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    prove(copy, capsys, status=0)
    whole = figures(copy)
    prove(copy, capsys, IN_WINDOWS, status=0)
    found = figures(copy)
    windows = found.pop("windows")
    assert whole.pop("windows") is None
    assert [windows[name] for name in ("count", "layers", "experts")] == [3, 1, 3]
    assert 0.00006 < windows["largest_gb"] < 0.00008
    assert "proved in 3 windows" in (copy / "certificate.md").read_text()
    # Every parameter that PEFT changes is in one of the windows, and counts once.
    changed = [each["adapter"]["parameters_changed"] for each in (whole, found)]
    assert changed[0] == changed[1]
    assert 0 < found["adapter"]["max_logit_error"] < found["adapter"]["allowed"]
    assert 0 < found["merge"]["max_logit_error"] < 1e-4
    assert not list(copy.glob(".prove-*"))


def in_bfloat16(run: Path, folder: Path) -> tuple[Path, Path]:
    """The run and its base as they were with a base in bfloat16."""
    copy, base = shutil.copytree(run, folder / "run"), run.parent / "base"
    base16 = shutil.copytree(base, folder / "base")
    old = load_file(base / "model.safetensors")
    new = {name: tensor.bfloat16() for name, tensor in old.items()}
    save_file(new, base16 / "model.safetensors", {"format": "pt"})
    merged = load_file(run / "merged" / "model.safetensors")
    sums = {name: (new[name] + (merged[name] - old[name])).bfloat16() for name in old}
    save_file(sums, copy / "merged" / "model.safetensors", {"format": "pt"})
    return copy, base16


@pytest.mark.parametrize("words", [[], [IN_WINDOWS]], ids=["whole", "windows"])
def test_logits_of_a_rounded_merge_are_compared(run, tmp_path, capsys, monkeypatch, words):
    copy, base = in_bfloat16(run, tmp_path)
    (copy / ".prove-left").mkdir()  # by a proof that was killed
    words = [f"model.path={base}", *words]
    prove(copy, capsys, *words, status=0)
    assert figures(copy)["merge"]["max_rounding"] > 1e-4
    assert (copy / ".prove-left").exists() == (len(words) == 1)
    read = reference.read_model

    def wrong(folder):
        model, problems = read(folder)
        if folder.name == "merged":
            model.model.norm.weight.data += 0.1
        return model, problems

    monkeypatch.setattr(reference, "read_model", wrong)
    error = prove(copy, capsys, *words)
    assert "transformers, with merged/, computes logits that differ from ours" in error


def drop_last_expert(tensors) -> None:
    for key in [key for key in tensors if "model.layers.0.mlp.experts.5." in key]:
        del tensors[key]


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (rename, "model.layers.1.self_attn.q"),
        (transpose, "model.layers.1.self_attn.q_proj"),
        (drop_last_expert, "model.layers.0.mlp.experts.5."),
    ],
)
def test_a_damaged_adapter_of_a_large_base_fails_by_name(run, tmp_path, capsys, fault, named):
    copy = without_merged(run, tmp_path / "run")
    edit(copy, fault)
    assert named in prove(copy, capsys, IN_WINDOWS)


def test_every_window_asks_peft_and_transformers(run, tmp_path, capsys):
    """Faults that our own reader does not see, in the last layer and in the last experts."""
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    path = copy / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].remove("k_proj")  # only layer 1 has one
    path.write_text(json.dumps(config))
    assert "model.layers.1.self_attn.k_proj" in prove(copy, capsys, IN_WINDOWS)
    without = [
        n for n in config["target_modules"] if n not in ("gate_proj", "up_proj", "down_proj")
    ]
    path.write_text(json.dumps(config | {"target_modules": [*without, "k_proj"]}))
    prove(copy, capsys, IN_WINDOWS)
    problems = figures(copy)["problems"]
    assert [p for p in problems if "model.layers.0.mlp.experts" in p]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_cannot_be_read_fails_by_name(run, tmp_path, capsys, name):
    copy = without_merged(run, tmp_path / "run")
    os.truncate(copy / "adapter" / name, 50)
    error = prove(copy, capsys)
    assert f"{copy}/adapter/{name}: " in error
    assert "write the folder again" in error
    assert (
        f"`lora-tune export run={copy} to=OUT format=peft`" in (copy / "certificate.md").read_text()
    )
    (copy / "adapter" / name).unlink()
    error = prove(copy, capsys)
    assert f"{copy}/adapter/{name}: " in error
    assert "write the folder again" in error


@pytest.mark.parametrize("change", [{}, {"r": "x"}, {"lora_alpha": None}])
def test_a_configuration_of_an_adapter_that_says_nothing_fails(run, tmp_path, capsys, change):
    copy = without_merged(run, tmp_path / "run")
    path = copy / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change} if change else {}))
    assert f"{path}: cannot be read as a plain LoRA adapter" in prove(copy, capsys)


def test_what_a_configuration_may_leave_out_is_as_peft_has_it(run, tmp_path, capsys):
    copy = without_merged(run, tmp_path / "run")
    path = copy / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    absent = ("use_rslora", "rank_pattern", "alpha_pattern", "revision")
    assert not any(config.pop(key, None) for key in absent)
    path.write_text(json.dumps(config | {"base_model_name_or_path": None}))
    prove(copy, capsys, status=0)
    assert figures(copy)["loads"]["vllm"]["loads"]
    assert f"vllm serve {run.parent / 'base'} " in figures(copy)["vllm_serve"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("adapter", [True, False])
def test_a_merged_folder_that_cannot_be_read_fails_by_name(run, tmp_path, capsys, name, adapter):
    copy = shutil.copytree(run, tmp_path / "run")
    if not adapter:
        shutil.rmtree(copy / "adapter")
    os.truncate(copy / "merged" / name, 50)
    error = prove(copy, capsys)
    assert f"{copy}/merged/{name}: " in error
    assert "write the folder again" in error


@pytest.mark.parametrize("content", ["{}", '{"model_type": "nothing"}'])
def test_a_configuration_of_a_merged_folder_that_says_nothing_fails(run, tmp_path, capsys, content):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "merged" / "config.json").write_text(content)
    assert "merged/config.json: is not that of the base" in prove(copy, capsys)


@pytest.mark.parametrize("words", [[], [IN_WINDOWS]], ids=["whole", "windows"])
def test_a_merged_folder_alone_is_compared_with_the_checkpoint(run, tmp_path, capsys, words):
    copy = shutil.copytree(run, tmp_path / "run", ignore=lambda *_: ["adapter"])
    prove(copy, capsys, *words, status=0)
    found = figures(copy)
    assert found["adapter"] is None
    assert 0 < found["merge"]["max_logit_error"] < 1e-4
    assert found["vllm_serve"] == f"vllm serve {copy / 'merged'}"
    name = "model.layers.1.self_attn.q_proj.weight"
    path = copy / "merged" / "model.safetensors"
    tensors = load_file(path)
    tensors[name][0, 0] += 0.01
    save_file(tensors, path, {"format": "pt"})
    assert f"{name}: is off the base with its update" in prove(copy, capsys, *words)
    shutil.rmtree(copy / "checkpoints")
    error = prove(copy, capsys, *words, status=2)
    assert "neither adapter/ nor a checkpoint, so nothing says what merged/ should be" in error


def test_a_merged_folder_without_its_tokenizer_fails(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "merged" / "tokenizer.json").unlink()
    assert "merged/tokenizer.json: was written, and is not there" in prove(copy, capsys)


def test_a_window_that_cannot_be_is_refused(run, capsys):
    error = prove(run, capsys, "limit_gb=1e-5", status=2)
    assert "over limit_gb=1e-05" in error
    assert "raise limit_gb" in error


def test_what_is_missing_is_named(run, tmp_path, capsys, monkeypatch):
    assert "no run folder" in prove(tmp_path, capsys, status=2)
    assert "did you mean 'run'" in prove(run, capsys, "output_dir=x", status=2)
    monkeypatch.setattr(reference, "find_spec", lambda name: None if name == "peft" else name)
    assert "peft cannot be imported; pip install peft" in prove(run, capsys, status=2)
