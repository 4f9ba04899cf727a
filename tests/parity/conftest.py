# SPDX-License-Identifier: Apache-2.0
"""Parity tests need the reference implementations: `pip install '.[parity]'`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("peft") else ["test_*.py"]
