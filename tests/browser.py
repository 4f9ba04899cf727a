# SPDX-License-Identifier: Apache-2.0
"""A real browser without a screen, and what it makes of a page."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome") or ""
)
_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
in_browser = pytest.mark.skipif(
    not _CHROMIUM, reason="NOT CHECKED IN A BROWSER: no chromium is installed"
)


def browse(page: Path, folder: Path) -> tuple[str, list[str], set[str]]:
    """What a browser makes of a page: document, console messages, and addresses it asked for."""
    log = folder / "net.json"
    log.unlink(missing_ok=True)
    own = (f"--user-data-dir={folder / 'user'}", f"--log-net-log={log}")
    done = subprocess.run(
        [_CHROMIUM, *_QUIET, *own, "--dump-dom", page.absolute().as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    events = (event.get("params", {}) for event in json.loads(log.read_text())["events"])
    # What the browser asks for on its own account is "not an origin".
    asked = {p["url"] for p in events if p.get("initiator", "not an origin") != "not an origin"}
    return done.stdout, said, asked
