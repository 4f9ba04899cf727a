# SPDX-License-Identifier: Apache-2.0
"""Where there is no TPU, commands never start libtpu."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune import machine


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1), ("x", 8)]
)
def test_a_container_has_its_share_of_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert machine.cores(groups=tmp_path) == cores
    assert machine.cores(groups=tmp_path / "none") == 8


@pytest.fixture
def libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with libtpu, without any other plugin of jax, that was told nothing."""
    for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(machine, "find_spec", lambda name: object() if name == "libtpu" else None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: ())


def test_without_chips_the_cpu_alone_is_used(libtpu: None, tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # is there without any device
    machine.leave_out_libtpu(devices=tmp_path)
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("device", ["accel0", "vfio/3"])
def test_with_chips_jax_decides(libtpu: None, tmp_path: Path, device: str) -> None:
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    machine.leave_out_libtpu(devices=tmp_path)
    assert not os.environ["JAX_PLATFORMS"]


def test_what_the_user_says_counts(
    libtpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    machine.leave_out_libtpu(devices=tmp_path)
    assert os.environ["JAX_PLATFORMS"] == "tpu,cpu"


def test_other_plugins_and_machines_without_libtpu_are_left_alone(
    libtpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: ("cuda",))
    machine.leave_out_libtpu(devices=tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    machine.leave_out_libtpu(devices=tmp_path)
    assert not os.environ["JAX_PLATFORMS"]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.skipif(any(Path("/dev").glob("accel[0-9]*")), reason="there is a TPU")
def test_a_command_that_computes_loads_no_libtpu() -> None:
    code = (
        "from lora_tune import cli\n"
        "import sys\n"
        "def compute(_):\n"
        "    import jax\n"
        "    print(jax.numpy.ones(2).sum(), 'libtpu.so' in open('/proc/self/maps').read())\n"
        "cli._VERBS['list'] = compute\n"
        "sys.exit(cli.main(['list']))\n"
    )
    environment = {name: text for name, text in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert (done.stdout, done.stderr, done.returncode) == ("2.0 False\n", "", 0)
