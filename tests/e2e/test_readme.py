# SPDX-License-Identifier: Apache-2.0
"""The README's examples run as they stand; its install commands are run by `.ci/run`."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^<!-- ci: run -->\n```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_readme_has_examples() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python"}
    for name, words in (
        ("main", "pip install"),
        ("test", "pip install"),
        ("prove", "pip install"),
        ("verify", "lora-tune verify-resume"),
    ):
        done = subprocess.run(
            [ROOT / ".ci" / "readme-block", name], capture_output=True, text=True, check=True
        )
        assert words in done.stdout


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[language for language, _ in BLOCKS])
def test_an_example_runs(language: str, code: str, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "lora-tune"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lora_tune.cli "$@"\n')
    command.chmod(0o755)
    shell = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[language]
    environment = {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }

    done = subprocess.run(
        [*shell, code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr
