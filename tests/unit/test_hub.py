# SPDX-License-Identifier: Apache-2.0
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from lora_tune.errors import InputError
from lora_tune.hf.hub import find_model


def test_a_local_folder_is_itself(tmp_path):
    source = find_model(str(tmp_path))
    assert (source.folder, source.hub_id, source.commit) == (tmp_path, None, None)
    assert source.base_name == str(tmp_path)
    with pytest.raises(InputError, match="no revision"):
        find_model(str(tmp_path), revision="main")


def test_a_folder_in_the_hub_cache_knows_its_origin(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3-Next-80B" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    source = find_model(str(folder))
    assert (source.hub_id, source.commit) == ("Qwen/Qwen3-Next-80B", "0123abcd")
    assert source.base_name == "Qwen/Qwen3-Next-80B"


@pytest.mark.parametrize("path", ["./absent/model", "/absent", "a/b/c", "name", "~/absent"])
def test_what_is_neither_folder_nor_hub_id(path):
    with pytest.raises(InputError, match="neither a model folder nor a hub id"):
        find_model(path)


def test_a_hub_id_is_downloaded_and_its_commit_kept(tmp_path, monkeypatch):
    asked = {}

    def download(repo_id, *, revision, allow_patterns):
        asked.update(repo_id=repo_id, revision=revision, patterns=allow_patterns)
        return str(tmp_path / "snapshots" / "deadbeef")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = find_model("Qwen/Qwen3-Next", revision="main")
    assert (source.hub_id, source.commit) == ("Qwen/Qwen3-Next", "deadbeef")
    assert asked["revision"] == "main"
    assert "*.safetensors" in asked["patterns"]
    find_model("Qwen/Qwen3-Next", weights=False)
    assert "*.safetensors" not in asked["patterns"]


def test_offline_is_one_clear_sentence(monkeypatch):
    def fail(*_, **__):
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(InputError, match=r"owner/absent: .*could not be reached") as caught:
        find_model("owner/absent")
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_read_from_the_cache_without_a_network(tmp_path, monkeypatch):
    """The real `snapshot_download` on a cache of two commits: the revision decides."""
    repository = tmp_path / "models--owner--model"
    for commit, ref in (("a" * 40, "main"), ("b" * 40, "v2")):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    download = huggingface_hub.snapshot_download

    def cached(hub_id, **options):
        return download(hub_id, cache_dir=tmp_path, local_files_only=True, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    for revision, commit in ((None, "a"), ("main", "a"), ("v2", "b"), ("b" * 40, "b")):
        source = find_model("owner/model", revision=revision)
        assert source.commit == commit * 40
        assert source.folder == repository / "snapshots" / (commit * 40)
        assert source.base_name == "owner/model"
    with pytest.raises(InputError, match="owner/model at v3: "):
        find_model("owner/model", revision="v3")
