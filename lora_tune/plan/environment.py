# SPDX-License-Identifier: Apache-2.0
"""What must be set before jax and libtpu start, for programs that are compiled and never run."""

import contextlib
import os
from collections.abc import Iterator

_VARIABLES = {
    # No TPU is here to ask.
    "TPU_SKIP_MDS_QUERY": "1",
    # Another process may be compiling as well.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_ABSENT = {
    "JAX_PLATFORMS": "cpu",
    # libtpu looks for a TPU and complains of what it does not find, unless it is told something.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def prepare(*, attached: bool) -> None:
    """Sets the environment for ahead-of-time compilation, where the user has not.

    Args:
      attached: whether the devices of this machine are planned for; then jax may start them.
    """
    for name, value in {**_VARIABLES, **({} if attached else _ABSENT)}.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
    """Compiles without the persistent cache of programs.

    One compiled for devices that are not here cannot be read back from it.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
