# SPDX-License-Identifier: Apache-2.0
"""Output folders replace an earlier result of their own kind, and nothing else."""

import json
from pathlib import Path

import pytest

from lora_tune import InputError
from lora_tune.hf.folder import MARKER, check_apart, lost_files, new_folder, replace_file


def write(folder: Path, kind: str, text: str) -> None:
    with new_folder(folder, kind=kind) as partial:
        (partial / "content").write_text(text)


def test_an_export_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "adapter", "first")
    write(out, "adapter", "second")
    with pytest.raises(InputError, match="holds the export 'adapter'"):
        write(out, "merged", "third")

    assert (out / "content").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_files_of_others_in_a_result_are_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "adapter", "first")
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("kept")
    with pytest.raises(InputError, match=r"holds notes/mine\.txt, which lora-tune did not write"):
        write(out, "adapter", "second")
    assert (out / "notes" / "mine.txt").read_text() == "kept"
    (out / "notes" / "mine.txt").unlink()
    (out / "large").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(InputError, match="holds large, which"):
        write(out, "adapter", "second")
    (out / "large").unlink()
    assert lost_files(out) == []
    marker = json.loads((out / MARKER).read_text())
    (out / MARKER).write_text(json.dumps({"kind": "adapter"}))
    with pytest.raises(InputError, match="does not say which of its files lora-tune wrote"):
        write(out, "adapter", "second")
    (out / MARKER).write_text(json.dumps(marker))
    (out / "content").unlink()
    assert lost_files(out) == ["content"]
    write(out, "adapter", "second")
    assert (out / "content").read_text() == "second"


@pytest.mark.parametrize("left", [".out.partial", ".out.old"])
def test_what_a_killed_run_left_takes_no_room(tmp_path: Path, monkeypatch, left: str) -> None:
    out = tmp_path / "out"
    write(out, "merged", "first")
    (tmp_path / left).mkdir()
    (tmp_path / left / "weights").write_text("large")

    def check(*_: object) -> None:
        assert not (tmp_path / left).exists()

    monkeypatch.setattr("lora_tune.hf.folder.check_space", check)
    write(out, "merged", "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(InputError, match="not written by lora-tune"):
        write(tmp_path / "out", "adapter", "new")

    assert (tmp_path / "out" / "mine").read_text() == "kept"


@pytest.mark.parametrize("out", ["run/adapter", "run/adapter/..", "run/adapter/new", "link"])
def test_what_a_result_is_made_from_is_not_written_over(tmp_path: Path, out: str) -> None:
    source = tmp_path / "run" / "adapter"
    write(source, "adapter", "trained")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(
        InputError, match="which it is made from; choose an output folder elsewhere"
    ):
        check_apart(tmp_path / out, source)
    check_apart(tmp_path / "run" / "fused", source)


@pytest.mark.parametrize("name", ["in/file", "n" * 250])
def test_a_file_that_cannot_be_written_is_named_itself(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").write_text("no folder")
    path = tmp_path / name
    with pytest.raises(OSError, match=r"Not a directory|too long") as caught:
        replace_file(path, "text")
    assert caught.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
