# SPDX-License-Identifier: Apache-2.0
"""Where compiled programs are kept, and what happens where they cannot be."""

from types import SimpleNamespace

import jax
import pytest

from lora_tune import build_data, cli, compiled, machine


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's cache folder, with the cache of jax enabled and named nowhere."""
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)


def kept_in(home):
    compiled.keep()
    [folder] = (home / "lora_tune" / "compiled").iterdir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    return folder


def test_the_users_folder_is_used(home, capsys):
    folder = kept_in(home)
    assert 0 < jax.config.jax_compilation_cache_max_size < 2**40
    jax.config.update("jax_compilation_cache_dir", None)
    assert kept_in(home) == folder, "the same machine"
    assert not capsys.readouterr().err


def test_half_an_entry_is_removed(home):
    folder = kept_in(home)
    for name in ("whole-cache", "whole-atime", "half-cache"):
        (folder / name).write_bytes(b"1")
    jax.config.update("jax_compilation_cache_dir", None)
    kept_in(home)
    assert {path.name for path in folder.glob("*-*")} == {"whole-cache", "whole-atime"}


def test_what_jax_is_told_stays(home, tmp_path, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir is None
    assert not home.exists()


def test_a_folder_that_cannot_be_written_is_a_note(home, capsys):
    home.write_text("a file where the folder should be")
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir is None
    [note] = capsys.readouterr().err.splitlines()
    assert note.startswith("lora-tune: note: compiled programs are not kept")
    assert "JAX_COMPILATION_CACHE_DIR" in note


def test_a_user_without_a_home_keeps_nothing(home, monkeypatch, capsys):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(machine.Path, "home", nowhere)
    compiled.keep()
    assert jax.config.jax_compilation_cache_dir is None
    [note] = capsys.readouterr().err.splitlines()
    assert "no home folder" in note
    assert build_data._store(True) is None


def test_a_relative_cache_home_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.user_cache() == tmp_path / ".cache" / "lora_tune"


@pytest.mark.parametrize("arguments", [["recipe=quickstart"], ["generate", "prompt=a"], ["chat"]])
def test_commands_that_compile_keep_what_they_compile(monkeypatch, arguments):
    order = []
    monkeypatch.setattr(compiled, "keep", lambda: order.append("keep"))
    for command in ("api.train", "commands.generate", "commands.chat"):
        done = SimpleNamespace(interrupted=None)
        monkeypatch.setattr(f"lora_tune.{command}", lambda *_, d=done: order.append("run") or d)
    assert cli.main(arguments) == 0
    assert order == ["keep", "run"]
