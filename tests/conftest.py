# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before jax, transformers or wandb is first imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # that of the user is not for tests
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
# Tests in several processes compile for TPUs that are not here.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import jax
from hypothesis import settings

# `pytest --hypothesis-profile=many tests/unit/test_malformed.py tests/unit/test_hostile.py
# tests/e2e/test_spoilt.py`: more than 10,000 malformed rows, recipes and files.
settings.register_profile("many", max_examples=1100)

jax.config.update("jax_numpy_rank_promotion", "raise")
