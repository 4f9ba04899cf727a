# SPDX-License-Identifier: Apache-2.0
"""Output folders replace an earlier result of their own kind, and nothing else."""

from pathlib import Path

import pytest

from lora_tune import InputError
from lora_tune.hf.folder import new_folder


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


def test_a_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(InputError, match="not written by lora-tune"):
        write(tmp_path / "out", "adapter", "new")

    assert (tmp_path / "out" / "mine").read_text() == "kept"
