# SPDX-License-Identifier: Apache-2.0
"""Operations of Pallas kernels against counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from lora_tune.layers import grouped
from lora_tune.plan.kernels import kernel_flops


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1024, 512, 256), (2048, 1024, 512)])
def test_a_grid_that_groups_decide_counts_every_row_once(rows, inner, outer):
    shapes = [
        jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16),
        jax.ShapeDtypeStruct((4,), jnp.int32),
        jax.ShapeDtypeStruct((rows, outer), jnp.bfloat16),
    ]
    traced = jax.make_jaxpr(grouped._tiled_dw)(*shapes)
    assert kernel_flops(traced.jaxpr) == 2 * rows * inner * outer
