# SPDX-License-Identifier: Apache-2.0
"""Runs that compile the same step share the result, here and in the processes started from here."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

_OPTIONS = {
    "jax_enable_compilation_cache": True,
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


@pytest.fixture(scope="module")
def compile_fast() -> Iterator[None]:
    """For tests of what a run does with files, not of how its numbers are computed."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    options = {**_OPTIONS, "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
