# SPDX-License-Identifier: Apache-2.0
"""The command `export`: what a run wrote itself, again from its checkpoint, and to the hub."""

import hashlib
import json
import types
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError
from small_run import tree_of, write_chats, write_model, write_recipe

import lora_tune
from lora_tune import cli
from lora_tune.hf.folder import MARKER

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"
pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, compile_fast: None) -> Path:
    """A run with adapter and merged folder."""
    folder = tmp_path_factory.mktemp("export")
    model = write_model(folder / "base", num_hidden_layers=3)
    chats = write_chats(folder / "chats.jsonl", 12)
    recipe = write_recipe(folder / "r.yaml", model=model, chats=chats, save={"merged": True})
    lora_tune.train(recipe, [f"output_dir={folder / 'run'}", "train.max_steps=3"])
    return folder / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A hub that keeps what it is given."""
    kept = types.SimpleNamespace(calls=[], files={}, error=None)

    def create_repo(self, repo_id, *, private, exist_ok):
        kept.calls.append(("create", repo_id, private, exist_ok))

    def upload_folder(self, *, folder_path, repo_id, commit_message, ignore_patterns):
        if kept.error:
            raise kept.error
        files = {p.name: p.read_bytes() for p in Path(folder_path).iterdir() if p.is_file()}
        kept.files = {n: content for n, content in files.items() if n not in ignore_patterns}
        kept.calls.append(("upload", repo_id))
        return types.SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: SECRET)
    return kept


def export(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert cli.main(["export", *words]) == status
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    if status:
        assert err.startswith("lora-tune: error: ")
        assert err.count("\n") == 1
        return err
    return out


def without_card(folder: Path) -> dict[str, str]:
    """Every file but the card, and the marker, which names it."""
    return {k: held for k, held in tree_of(folder).items() if k not in ("README.md", MARKER)}


@pytest.mark.parametrize(("form", "own"), [("peft", "adapter"), ("merged", "merged")])
def test_an_export_is_what_the_run_wrote(run, tmp_path, capsys, form, own) -> None:
    before = tree_of(run)
    out = export(capsys, f"run={run}", f"to={tmp_path / 'out'}", f"format={form}")
    assert out == f"wrote {tmp_path / 'out'}, step 3 of {run}\n"
    assert without_card(tmp_path / "out") == without_card(run / own)
    assert tree_of(run) == before

    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == ("peft" if form == "peft" else "transformers")
    rows = (run / "metrics.jsonl").read_text().splitlines()
    last = [row["loss"] for row in map(json.loads, rows) if "loss" in row][-1]
    assert f"| `loss` | 3 | {last:.4g} |" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert recipe["lora"]["lora_alpha"] == 8
    assert recipe["data"]["path"] == "chats.jsonl"
    training = card.split("## Training")[1].split("## Use")[0]
    assert str(run.parent) not in training


def test_a_fully_trained_model(run, tmp_path, capsys) -> None:
    recipe = run.parent / "r.yaml"
    full = tmp_path / "full"
    lora_tune.train(recipe, [f"output_dir={full}", "train.max_steps=1", "lora=null"])
    capsys.readouterr()
    export(capsys, f"run={full}", f"to={tmp_path / 'out'}", "format=merged")
    assert without_card(tmp_path / "out") == without_card(full / "merged")
    said = export(capsys, f"run={full}", f"to={tmp_path / 'o'}", status=2)
    assert "trained every parameter (lora=null); use format=merged" in said


def test_the_data_have_a_fingerprint(run, tmp_path, capsys) -> None:
    export(capsys, f"run={run}", f"to={tmp_path / 'out'}")
    digest = hashlib.sha256((run.parent / "chats.jsonl").read_bytes()).hexdigest()
    assert f"- data: `chats.jsonl`, SHA-256 `{digest}`" in (tmp_path / "out/README.md").read_text()


def test_a_push(run, tmp_path, capsys, hub) -> None:
    out = export(
        capsys,
        f"run={run}",
        f"to={tmp_path / 'o'}",
        "format=merged",
        "push=me/model",
        "private=true",
    )
    assert out.endswith("pushed to https://hub/me/model/commit/1\n")
    assert hub.calls == [("create", "me/model", True, True), ("upload", "me/model")]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.files)
    assert "lora_tune_export.json" not in hub.files
    assert not any(SECRET.encode() in content for content in hub.files.values())


def test_a_push_that_the_hub_refuses(run, tmp_path, capsys, hub) -> None:
    hub.error = HfHubHTTPError(
        f"403 Forbidden for {SECRET}", response=types.SimpleNamespace(headers={}, request=None)
    )
    to = f"to={tmp_path / 'o'}"
    said = export(capsys, f"run={run}", to, "format=merged", "push=me/model", status=2)
    assert "push=me/model: the hub did not take it (403 Forbidden for hf_…)" in said
    assert (tmp_path / "o" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["token=" + SECRET], "token= would show a secret"),
        (["push=nobody"], "push is 'nobody', expected USER/NAME"),
        (["push=me/model"], "base is a folder of this machine"),
        (["format=gguf"], "format is 'gguf', expected one of peft, merged"),
        (["private=true"], "private= is of the repository that push= names"),
        (["out=x"], "unknown key 'out': did you mean 'to'?"),
    ],
)
def test_words_that_cannot_be(run, tmp_path, capsys, hub, words, said) -> None:
    assert said in export(capsys, f"run={run}", f"to={tmp_path / 'o'}", *words, status=2)
    assert not (tmp_path / "o").exists()
    assert hub.calls == []


def test_what_is_missing(run, tmp_path, capsys, hub, monkeypatch) -> None:
    assert "export lacks to=" in export(capsys, f"run={run}", status=2)
    assert "no run folder" in export(capsys, f"run={tmp_path}", "to=x", status=2)
    words = [f"run={run}", f"to={tmp_path / 'o'}", "push=me/model", "format=merged"]
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "there is no token of the hub; set HF_TOKEN" in export(capsys, *words, status=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    said = export(capsys, f"run={tmp_path / 'empty'}", f"to={tmp_path / 'o'}", status=2)
    assert "holds no checkpoint" in said
