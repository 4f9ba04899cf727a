# SPDX-License-Identifier: Apache-2.0
"""What a compiled program executes: programs whose operations and bytes are worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lora_tune.plan import abstract, cost, hlo, measure, roofline
from lora_tune.plan.environment import no_cache
from lora_tune.plan.topologies import parse

FLOAT = 4


@functools.cache
def devices(name):
    if name != "cpu":
        pytest.importorskip("libtpu")
        return tuple(abstract.devices_of(parse(name)[0]))
    return tuple(jax.devices()[:4])


def compile_for(where, f, *shapes, mesh=None, specs=None):
    """The compiled program of a function of float32 arrays, whole on one device or over a mesh."""
    mesh = mesh or Mesh(np.array(devices(where)[:1]), ("x",))
    places = [NamedSharding(mesh, spec) for spec in specs or [P()] * len(shapes)]
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        for shape, place in zip(shapes, places, strict=True)
    ]
    # On a TPU more precise products are several.
    with no_cache(), jax.default_matmul_precision("bfloat16"):
        return jax.jit(f).lower(*args).compile()


def count(where, f, *shapes, **options):
    compiled = compile_for(where, f, *shapes, **options)
    size = 1 if options.get("mesh") is None else options["mesh"].size
    return cost.count(hlo.parse(compiled.as_text()), devices=size)


def repeat(body, length):
    return lambda h: jax.lax.scan(lambda h, _: (body(h), None), h, None, length=length)[0]


both = pytest.mark.parametrize("where", ["cpu", "v5p-8"])


@both
def test_products_in_nested_loops_count_as_often_as_they_run(where):
    def f(h, w):
        inner = repeat(lambda h: jnp.tanh(h @ w), 3)
        return repeat(lambda h: inner(h) @ w + 1, 5)(h)

    found = count(where, f, (64, 128), (128, 128))
    assert found.flops == (5 * 3 + 5) * 2 * 64 * 128 * 128
    assert found.dynamic == []


@both
def test_the_backward_pass_of_a_loop_counts_too(where):
    def loss(w, h):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)
        return jnp.sum(h)

    # Forward one product a turn, backward two; the first gives no gradient of h.
    found = count(where, jax.grad(loss), (6, 128, 128), (64, 128))
    product = 2 * 64 * 128 * 128
    assert 6 * 3 * product - product <= found.flops <= 6 * 3 * product


@both
def test_a_product_of_batches(where):
    found = count(
        where, lambda a, b: jnp.tanh(jnp.einsum("bij,bjk->bik", a, b)), (8, 64, 32), (8, 32, 16)
    )
    assert found.flops == 2 * 8 * 64 * 32 * 16


def test_a_product_by_groups_on_a_tpu():
    def f(rows, experts):
        return jax.lax.ragged_dot(rows, experts, jnp.full(4, 32, jnp.int32))

    assert count("v5p-8", f, (128, 256), (4, 256, 128)).flops == 2 * 128 * 256 * 128


def test_a_kernels_operations_are_those_of_its_body_times_its_grid():
    def kernel(a, b, out):
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def f(a, b):
        call = pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[
                pl.BlockSpec((128, 256), lambda i: (i, 0)),
                pl.BlockSpec((256, 128), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((128, 128), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((512, 128), jnp.float32),
        )
        return repeat(lambda a: jnp.tile(jnp.sin(call(a, b)), (1, 2)), 3)(a) @ b

    mesh = Mesh(np.array(devices("v5p-8")[:1]), ("x",))
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P()))
        for shape in ((512, 256), (256, 128))
    ]
    with jax.default_matmul_precision("bfloat16"):
        found = measure.compile_step(jax.jit(f).trace(*args), mesh).cost
    assert found.flops == (3 + 1) * 2 * 512 * 256 * 128
    assert sum(found.kernels.values()) == 3


def test_what_follows_an_instruction_in_lines_of_its_own_belongs_to_it():
    text = (
        "ENTRY %main (a: f32[8]) -> f32[8] {\n"
        "  %a = f32[8]{0} parameter(0)\n"
        '  %k = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", meta={{\n'
        '"words":"{}"\n'
        '}}, metadata={op_name="k"}\n'
        "  ROOT %b = f32[8]{0} copy(%k)\n"
        "}\n"
    )
    main = hlo.parse(text).computations["main"]
    assert list(main.instructions) == ["a", "k", "b"]
    assert "op_name" in main.instructions["k"].rest
    assert main.root == "b"


@both
def test_a_loop_that_data_ends_counts_once_and_is_named(where):
    def f(h, w):
        return jax.lax.while_loop(lambda h: jnp.sum(h) < 100.0, lambda h: jnp.tanh(h @ w), h)

    found = count(where, f, (64, 128), (128, 128))
    assert found.flops == 2 * 64 * 128 * 128
    assert len(found.dynamic) == 1


@both
def test_of_a_conditional_the_branch_with_most_operations_counts(where):
    def f(h, w):
        return jax.lax.cond(jnp.sum(h) > 0, lambda h: h @ w @ w, lambda h: h @ w, h)

    assert count(where, f, (64, 128), (128, 128)).flops == 2 * 2 * 64 * 128 * 128


@both
def test_a_stack_that_a_loop_slices_is_read_once(where):
    def f(h, stack):
        return jax.lax.scan(lambda h, w: (jnp.sin(h + w), None), h, stack)[0]

    layers, layer = 16, (512, 512)
    found = count(where, f, layer, (layers, *layer))
    stack = layers * 512 * 512 * FLOAT
    # Besides the slices the state is read and written; a kernel of its own may cut the slice out.
    assert 3 * stack <= found.bytes <= 5.5 * stack


@both
def test_an_update_in_place_moves_the_update_only(where):
    def f(h, table):
        def body(table, i):
            return jax.lax.dynamic_update_index_in_dim(table, h + i, i, 0), None

        return jax.lax.scan(body, table, jnp.arange(64, dtype=jnp.float32).astype(jnp.int32))[0]

    found = count(where, f, (1024,), (64, 1024))
    table = 64 * 1024 * FLOAT
    assert 2 * table <= found.bytes <= 7 * table  # the whole table in every turn would be 128


def test_collectives_are_counted_by_kind_with_what_they_move():
    mesh = Mesh(np.array(devices("v5p-8")), ("x",))

    def f(h):
        def body(h, _):
            whole = jax.lax.all_gather(h, "x", tiled=True)
            return jnp.sin(jax.lax.psum_scatter(whole * h[0, 0], "x", tiled=True)), None

        h, _ = jax.lax.scan(body, h, None, length=5)
        h = jax.lax.all_to_all(h, "x", 1, 0, tiled=True)
        h = jax.lax.ppermute(jnp.sin(h), "x", [(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.psum(jnp.sum(h, 0), "x")

    sharded = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    found = count("v5p-8", sharded, (4 * 256, 512), mesh=mesh, specs=[P("x")]).traffic
    part = 256 * 512 * FLOAT
    assert found["all-gather"] == cost.Traffic(1, 5, 5 * 4 * part, 5 * 3 * part, 0)
    assert found["reduce-scatter"] == cost.Traffic(1, 5, 5 * part, 5 * 3 * part, 0)
    assert found["all-to-all"] == cost.Traffic(1, 1, part, 3 / 4 * part, 0)
    assert found["collective-permute"] == cost.Traffic(1, 1, part, part, 0)
    total = 128 * FLOAT
    assert found["all-reduce"] == cost.Traffic(1, 1, total, 2 * 3 / 4 * total, 0)


def test_the_same_gather_on_fake_devices():
    mesh = Mesh(np.array(devices("cpu")), ("x",))
    gather = functools.partial(jax.lax.all_gather, axis_name="x", tiled=True)
    sharded = jax.shard_map(
        lambda h: jnp.sin(gather(h)), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False
    )
    found = count("cpu", sharded, (4 * 256, 512), mesh=mesh, specs=[P("x")]).traffic
    assert found["all-gather"].bytes == 4 * 256 * 512 * FLOAT


def test_what_goes_between_slices_is_told_apart():
    mesh = Mesh(np.array(devices("2xv5p-8")).reshape(2, 4), ("data", "x"))
    sharded = jax.shard_map(
        lambda h: jax.lax.psum(jnp.sin(h), ("data", "x")),
        mesh=mesh,
        in_specs=P(("data", "x")),
        out_specs=P(),
        check_vma=False,
    )
    compiled = compile_for("2xv5p-8", sharded, (8 * 256, 512), mesh=mesh, specs=[P(("data", "x"))])
    found = cost.count(hlo.parse(compiled.as_text()), devices=8, slice_devices=4).traffic
    size = 256 * 512 * FLOAT
    # Each of a slice's four chips exchanges its quarter of the sum with one of the other slice.
    assert sum(kind.between for kind in found.values()) == size / 4
    assert sum(kind.wire for kind in found.values()) == 2 * 3 / 4 * size


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_groups_in_every_spelling(text, groups):
    assert cost.groups(text, 4) == groups


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule nothing\n")


def test_the_compilers_refusal_is_read():
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (16.02G) exceeds available HBM (15.75G)."
    )
    assert measure.refusal_of(said) == measure.TooLarge(int(16.02 * 2**30), int(15.75 * 2**30))
    assert measure.refusal_of("RESOURCE_EXHAUSTED: Out of memory") == measure.TooLarge(None, None)
    assert measure.refusal_of("INVALID_ARGUMENT: no such layout") is None


def test_a_program_too_large_for_the_chip_is_a_finding():
    pytest.importorskip("libtpu")
    mesh = Mesh(np.array(devices("v5e-1")), ("x",))
    place = NamedSharding(mesh, P())
    arg = jax.ShapeDtypeStruct((9, 2**30), jnp.bfloat16, sharding=place)
    found = measure.compile_step(jax.jit(lambda a: jnp.flip(a, 1)).trace(arg), mesh)
    assert isinstance(found.memory, measure.TooLarge)
    assert found.memory.needed > found.memory.available > 15 * 2**30
    assert found.cost is None


def test_the_bound_is_that_of_the_slowest_resource():
    # A v5p: 459 TFLOP/s and 2765 GB/s; at the corner of a 2 x 2 slice 2 of 6 links, 200 GB/s.
    rates = roofline.rates_of(parse("v5p-8")[0], "TPU v5")
    work = cost.Cost(flops=459e12 * 2, bytes=2765e9 * 3)
    work.traffic["all-gather"] = cost.Traffic(wire=200e9 * 1.5)
    bound = roofline.bound(work, rates)
    assert (bound.compute, bound.memory) == pytest.approx((2, 3))
    assert bound.links == pytest.approx(1.5)
    assert (bound.seconds, bound.limit) == (pytest.approx(3), "memory")


def test_a_device_of_half_a_chip_has_half_its_rates():
    rates = roofline.rates_of(parse("tpu7x-128")[0], "TPU7x")
    assert rates.flops == 2307e12 / 2
    assert rates.link_rate == pytest.approx(600e9 / 2)


def test_there_is_no_bound_where_no_rates_are_published():
    assert roofline.rates_of(parse("cpu")[0], "cpu") is None
