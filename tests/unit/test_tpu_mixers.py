# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of the mixers of a layer on a TPU slice, compiled ahead of time and not run."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from lora_tune import sharding
from lora_tune.layers.attention import attention
from lora_tune.layers.delta_matrices import Heads
from lora_tune.layers.delta_mixer import gated_delta_mixer
from lora_tune.models.inputs import LayerInputs
from lora_tune.models.qwen3_next import FAMILY, GatedDeltaNet
from lora_tune.plan.environment import no_cache

pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu: pip install '.[test]'")

TIME = 1024
COLLECTIVE = r" = (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\S*\("


def compile_on(mesh, local, *arrays):
    """The compiled program of `local` inside a region like that of the training step."""
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(),) * len(arrays),
        out_specs=PartitionSpec(),
        axis_names=set(sharding.MANUAL_AXES),
        check_vma=False,
    )
    with no_cache():
        return jax.jit(step).lower(*arrays).compile()


@pytest.fixture(scope="module")
def devices():
    return topologies.get_topology_desc(platform="tpu", topology_name="v5:2x2x1").devices


def shapes(mesh, dtype, *sizes):
    whole = NamedSharding(mesh, PartitionSpec())
    return [jax.ShapeDtypeStruct(size, dtype, sharding=whole) for size in sizes]


@pytest.mark.slow
def test_linear_attention_keeps_its_heads_apart(devices):
    """Over four devices of the tensor axis, tokens travel only where projections are summed."""
    mesh = sharding.make_mesh(tensor=4, devices=devices)
    config = FAMILY.read_config(
        {
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        }
    )
    graphdef, state = nnx.split(GatedDeltaNet(config, dtype=jnp.bfloat16))

    def placed(variable):
        value, place = variable.get_value(), sharding.named_sharding(mesh, variable.axes)
        return variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place))

    state = jax.tree.map(placed, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def local(state, x, dy, ids):
        def mix(x):
            return nnx.merge(graphdef, state, copy=True)(x, LayerInputs(ids, ids), None)[0]

        y, pull = jax.vjp(jax.checkpoint(mix, prevent_cse=False), x)
        return y, pull(dy)

    x, dy = shapes(mesh, jnp.bfloat16, *[(1, TIME, 256)] * 2)
    (ids,) = shapes(mesh, jnp.int32, (1, TIME))
    hlo = compile_on(mesh, local, state, x, dy, ids).as_text()
    moved = re.findall(COLLECTIVE, hlo)
    assert {kind for shape, kind in moved if str(TIME) in shape} == {"all-reduce"}
    assert all("[4," in shape for shape, kind in moved if kind != "all-reduce")  # the convolution's
    # Two kernels: the forward pass does not run again.
    assert hlo.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.slow
@pytest.mark.parametrize("heads", [Heads(1, 4, 128, 128), Heads(1, 1, 256, 256)])
def test_the_largest_heads_that_fit_a_kernel_compile(devices, heads):
    """In float32, which takes most: an overflow of the vector memory would be an error here."""
    mesh = sharding.make_mesh(data=4, devices=devices)

    def local(packed, g, beta, kernel, norm, dy):
        def mix(*rows):
            return gated_delta_mixer(*rows, kernel=kernel, norm_weight=norm, heads=heads, eps=1e-6)

        y, pull = jax.vjp(mix, packed, g, beta)
        return y, pull(dy)

    lead, outer = (2, 128), heads.outer
    sizes = ((*lead, heads.inner + outer), *[(*lead, heads.groups)] * 2, (4, heads.inner))
    arrays = shapes(mesh, jnp.float32, *sizes, (heads.value_dim,), (*lead, outer))
    hlo = compile_on(mesh, local, *arrays).as_text()
    assert hlo.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "kv_heads"), [(1, 2), (4, 2)])
def test_attention_is_a_kernel(devices, tensor, kv_heads):
    """Forward and two backward kernels, the forward one not run again; no scores in memory."""
    mesh = sharding.make_mesh(fsdp=4 // tensor, tensor=tensor, devices=devices)

    def local(q, k, v, dy, ids):
        def attend(q, k, v):
            return attention(q, k, v, segment_ids=ids, scale=0.1)

        y, pull = jax.vjp(jax.checkpoint(attend, prevent_cse=False), q, k, v)
        return y, pull(dy)

    kv = (1, TIME, kv_heads, 256)
    q, k, v, dy = shapes(mesh, jnp.bfloat16, (1, TIME, 8, 256), kv, kv, (1, TIME, 8, 256))
    (ids,) = shapes(mesh, jnp.int32, (1, TIME))
    hlo = compile_on(mesh, local, q, k, v, dy, ids).as_text()
    assert hlo.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(rf"\[(\d+,)*{TIME},{TIME}\]", hlo)
