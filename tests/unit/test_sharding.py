# SPDX-License-Identifier: Apache-2.0
"""The table of logical axes, the mesh and its errors, and gathering inside a manual region."""

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from lora_tune import build, sharding
from lora_tune.errors import InputError
from lora_tune.lora.inject import add_lora
from lora_tune.models.decoder import DecoderOptions

ALL = ("fsdp", "expert", "sequence")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("axes", "expected", "manual"),
    [
        (("embed", "heads"), P(ALL, "tensor"), P(ALL, None)),
        (("mlp", "embed"), P("tensor", ALL), P(None, ALL)),
        (("vocab", "embed"), P("tensor", ALL), P(None, ALL)),
        # Adapters: A of a projection out of heads, B of one into them, and of experts.
        (("heads", None), P((*ALL, "tensor"), None), P(ALL, None)),
        ((None, "mlp"), P(None, (*ALL, "tensor")), P(None, ALL)),
        (
            ("expert", None, "mlp"),
            P("expert", None, ("fsdp", "sequence", "tensor")),
            P("expert", None, ("fsdp", "sequence")),
        ),
        (
            ("block", "layer", "expert", "embed", "mlp"),
            P(None, None, "expert", ("fsdp", "sequence"), "tensor"),
            P(None, None, "expert", ("fsdp", "sequence"), None),
        ),
        (("embed", None), P(ALL, None), P(ALL, None)),
        ((), P(), P()),
    ],
)
def test_specs(axes, expected, manual):
    assert sharding.spec(axes) == expected
    assert sharding.spec(axes, only=sharding.MANUAL_AXES) == manual


def parameters(scan_axis):
    model = add_lora(cases.abstract(DecoderOptions(param_scan_axis=scan_axis)), cases.ALL)
    return {
        "/".join(map(str, path)): (variable.get_value().shape, variable.get_metadata("axes"))
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


@pytest.mark.parametrize("scan_axis", [0, 1])
def test_no_array_uses_a_mesh_axis_twice(scan_axis):
    """Adapters too: a colliding spec is an error only when someone first runs that mesh."""
    found = parameters(scan_axis)
    assert any("experts" in name and name.endswith("lora_b") for name in found)
    for name, (shape, axes) in found.items():
        used = [axis for dim in sharding.mesh_axes(axes) for axis in dim]
        assert len(used) == len(set(used)), name
        assert len(axes) == len(shape), name


def test_large_weights_are_all_sharded():
    for name, (shape, axes) in parameters(0).items():
        if "lora" not in name and np.prod(shape) > 300 and "conv1d" not in name:
            assert any(sharding.mesh_axes(axes)), name


def test_every_rule_names_a_mesh_axis():
    assert {axis for rule in sharding.RULES.values() for axis in rule} <= set(sharding.MESH_AXES)
    assert set(sharding.MANUAL_AXES) == set(sharding.MESH_AXES) - {"tensor"}


@pytest.mark.smoke
def test_mesh_shape_and_order():
    mesh = sharding.make_mesh(fsdp=2, tensor=2, expert=2)
    assert dict(mesh.shape) == {
        "data": 1,
        "fsdp": 2,
        "expert": 2,
        "sequence": 1,
        "tensor": 2,
    }
    # Neighbouring devices share a tensor group.
    assert [d.id for d in mesh.devices[0, 0, 0, 0]] == [0, 1]
    assert (
        sharding.make_mesh(data=2, devices=jax.devices()[4:]).devices.ravel().tolist()
        == (jax.devices()[4:6])
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 16}, "data 16 needs 16 devices, but 8 are available.*at most 8"),
        ({"fsdp": 4, "tensor": 4}, "fsdp 4 x tensor 4 needs 16 devices"),
        ({"data": 0}, r"mesh\.data=0: a mesh axis is a number of devices, at least 1"),
        ({"fsdp": -1, "tensor": 0}, r"mesh\.fsdp=-1, mesh\.tensor=0"),
    ],
)
def test_mesh_that_does_not_fit(sizes, message):
    with pytest.raises(InputError, match=message):
        sharding.make_mesh(**sizes)


def test_one_device_is_spelled_in_the_singular():
    with pytest.raises(InputError, match="but 1 is available"):
        sharding.make_mesh(data=2, devices=jax.devices()[:1])


def test_sizes_that_do_not_divide_are_named_together():
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    arrays = {
        "first": ((6, 8), ("embed", "heads")),
        "second": ((10, 7), ("embed", "mlp")),
        "third": ((16, 8), ("embed", "mlp")),
    }
    with pytest.raises(InputError) as caught:
        sharding.check_divides(arrays, mesh)
    text = str(caught.value)
    assert "mesh.fsdp=4 does not divide first (size 6)" in text
    assert "mesh.tensor=2 does not divide second (size 7)" in text
    assert "third" not in text
    sharding.check_divides({"third": arrays["third"]}, mesh)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 5}, r"mesh\.fsdp=5 does not divide .* \(size 16\)"),
        ({"expert": 3}, r"mesh\.expert=3 does not divide blocks\.runs\.0\..* \(size 16\)"),
        ({"expert": 8}, r"mesh\.expert=8 does not divide blocks\..*\.mlp\.experts\..*size 4"),
        ({"fsdp": 2, "expert": 3}, r"mesh\.fsdp x mesh\.expert=6 does not divide .*size 16"),
        ({"tensor": 4}, r"mesh\.tensor=4 does not divide embed_tokens\.embedding \(size 46\)"),
    ],
)
def test_model_that_does_not_divide_fails_before_its_weights(sizes, message):
    with pytest.raises(InputError, match=message):
        build.load_weights(cases.abstract(), mesh=sharding.make_mesh(**sizes), random_seed=0)


def test_gather_in_a_manual_region_leaves_experts_and_tensor_alone():
    mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
    axes = ("expert", "embed", "mlp")
    value = jnp.arange(4 * 6 * 4.0).reshape(4, 6, 4)
    seen = []

    def run(value):
        with sharding.manual(mesh):
            whole = sharding.gather(value, sharding.manual_axes(axes))
            named = [sharding.manual_axis(name) for name in sharding.MESH_AXES]
        seen.append((value.shape, whole.shape, named))
        return whole

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=sharding.spec(axes, only=sharding.MANUAL_AXES),
        out_specs=P("expert", None, None),
        axis_names=set(sharding.MANUAL_AXES),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(mapped)(value), value)
    assert seen[-1] == ((2, 3, 4), (2, 6, 4), [None, "fsdp", "expert", None, None])
    # Outside a region:
    assert sharding.gather(value, sharding.manual_axes(axes)) is value
    assert sharding.manual_axis("fsdp") is None
