# SPDX-License-Identifier: Apache-2.0
import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_cases import FAMILY, leaves_of, tiny
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.hf.table import VIEWS, Row, bind, hf_state


@dataclasses.dataclass(frozen=True)
class ToyFamily:
    layer_rows: tuple[Row, ...] = (
        Row("norm.weight", "ln.weight"),
        Row("proj.kernel", "proj.weight", "transpose"),
        Row("conv.kernel", "conv.weight", "conv"),
        Row("experts.kernel", "experts.{e}.weight", "transpose"),
    )
    top_rows: tuple[Row, ...] = (Row("embed.embedding", "embed.weight"),)
    ignored: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    not_adaptable: tuple[str, ...] = ()
    layer_prefix: str = "layers.{i}."


class Leafy(nnx.Module):
    def __init__(self, name, shape, axes):
        count = int(np.prod(shape))
        value = jnp.arange(count, dtype=jnp.float32).reshape(shape)
        setattr(self, name, nnx.Param(value, axes=axes))


class Toy(nnx.Module):
    """Layers 0, 1 and 3, 4 in a nested stack; layer 2 and layer 5 in a second run; 6 as suffix."""

    def __init__(self, kernel_axes=("block", "layer", "embed", "mlp")):
        stack = {"norm": Leafy("weight", (3, 2, 2), ("embed", "block", "layer"))}
        stack["proj"] = Leafy("kernel", (2, 2, 3, 4), kernel_axes)
        second = {
            "experts": Leafy("kernel", (5, 2, 1, 3, 4), ("expert", "block", "layer", None, None))
        }
        self.blocks = nnx.Dict(runs=nnx.List([nnx.Dict(stack), nnx.Dict(second)]))
        self.suffix = nnx.List([nnx.Dict(conv=Leafy("kernel", (1, 4, 3), ("layer", None, None)))])
        self.embed = Leafy("embedding", (7, 3), ("vocab", "embed"))
        self.config = types.SimpleNamespace(num_hidden_layers=7)
        stacks = {
            ("blocks", "runs", 0): np.array([[0, 1], [3, 4]]),
            ("blocks", "runs", 1): np.array([[2], [5]]),
            ("suffix", 0): np.array([6]),
        }
        self.plan = types.SimpleNamespace(stacks=lambda: stacks)


def test_names_follow_the_stacks():
    leaves = {leaf.dotted: leaf for leaf in bind(ToyFamily(), Toy())}
    assert leaves["blocks.runs.0.proj.kernel"].names.tolist() == [
        ["layers.0.proj.weight", "layers.1.proj.weight"],
        ["layers.3.proj.weight", "layers.4.proj.weight"],
    ]
    experts = leaves["blocks.runs.1.experts.kernel"]
    assert experts.stack_axes == (1, 2, 0)
    assert experts.names[1, 0, 3] == "layers.5.experts.3.weight"
    assert experts.hf_shape == (4, 3)
    assert leaves["suffix.0.conv.kernel"].hf_shape == (3, 1, 4)
    assert leaves["embed.embedding"].names[()] == "embed.weight"


def test_slices_are_the_right_ones_in_the_right_layout():
    toy = Toy()
    leaves = {leaf.dotted: leaf for leaf in bind(ToyFamily(), toy)}
    kernel = np.asarray(toy.blocks.runs[1].experts.kernel[...])
    out = dict(hf_state(leaves["blocks.runs.1.experts.kernel"], kernel))
    np.testing.assert_array_equal(out["layers.5.experts.3.weight"], kernel[3, 1, 0].T)
    norm = np.asarray(toy.blocks.runs[0].norm.weight[...])
    out = dict(hf_state(leaves["blocks.runs.0.norm.weight"], norm))
    np.testing.assert_array_equal(out["layers.4.ln.weight"], norm[:, 1, 1])
    conv = np.asarray(toy.suffix[0].conv.kernel[...])
    out = dict(hf_state(leaves["suffix.0.conv.kernel"], conv))
    np.testing.assert_array_equal(out["layers.6.conv.weight"][:, 0, :], conv[0].T)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (ToyFamily(top_rows=()), "parameter embed.embedding has no row"),
        (ToyFamily(layer_rows=ToyFamily.layer_rows[1:]), "blocks.runs.0.norm.weight has no row"),
        (
            ToyFamily(layer_rows=(*ToyFamily.layer_rows, Row("other", "ln.weight"))),
            "two layer rows have theirs='ln.weight'",
        ),
        (
            ToyFamily(layer_rows=(*ToyFamily.layer_rows, Row("norm.weight", "other"))),
            "two layer rows have ours='norm.weight'",
        ),
        (
            ToyFamily(top_rows=(Row("embed.embedding", "layers.4.ln.weight"),)),
            "layers.4.ln.weight is claimed by",
        ),
        (
            ToyFamily(layer_rows=(*ToyFamily.layer_rows[1:], Row("norm.weight", "n", "conv"))),
            "view 'conv' needs 2",
        ),
        (
            ToyFamily(
                layer_rows=(*ToyFamily.layer_rows[:3], Row("experts.kernel", "e.w", "transpose"))
            ),
            "expected the stacked axes",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(family, message):
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        bind(family, Toy())
    assert message in str(caught.value)


def test_one_row_cannot_feed_two_parameters():
    toy = Toy()
    stacks = {**toy.plan.stacks(), ("twin",): np.array([6])}
    toy.plan.stacks = lambda: stacks
    toy.twin = nnx.Dict(conv=Leafy("kernel", (1, 4, 3), ("layer", None, None)))
    with pytest.raises(ValueError, match=r"layers\.6\.conv\.weight is claimed by .*twin") as caught:
        bind(ToyFamily(), toy)
    assert "the plan holds layers" in str(caught.value)


@pytest.mark.parametrize(
    "axes",
    [("embed", "mlp", "block", "layer"), ("block", "embed", "mlp", "layer"), ("block", "layer")],
)
def test_wrong_axis_order_is_refused(axes):
    with pytest.raises(ValueError, match=r"blocks\.runs\.0\.proj\.kernel"):
        bind(ToyFamily(), Toy(kernel_axes=axes))


def test_layers_must_partition():
    toy = Toy()
    toy.config.num_hidden_layers = 8
    with pytest.raises(ValueError, match=r"expected each of range\(8\) once"):
        bind(ToyFamily(), toy)


@given(st.sampled_from(sorted(VIEWS)), st.tuples(st.integers(1, 4), st.integers(1, 4)), st.data())
def test_views_are_inverted_and_slice_alike(name, shape, data):
    view = VIEWS[name]
    array = np.arange(shape[0] * shape[1]).reshape(shape)
    tensor = view.to_hf(array)
    assert tensor.shape == view.hf_shape(shape)
    np.testing.assert_array_equal(view.from_hf(tensor), array)
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    index = tuple(slice(lo, hi) for lo, hi in bounds)
    np.testing.assert_array_equal(view.from_hf(tensor[view.hf_index(index)]), array[index])


@pytest.mark.parametrize(("psa", "scan"), [(0, True), (1, True), (0, False)])
def test_every_layout_of_qwen3_next_has_the_same_names(psa, scan):
    leaves = leaves_of(tiny(psa=psa, scan=scan))
    names = [name for leaf in leaves for name in leaf.names.ravel()]
    assert len(names) == len(set(names))
    shapes = {name: leaf.hf_shape for leaf in leaves for name in leaf.names.ravel()}
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (32, 16)
    assert shapes["model.layers.0.linear_attn.in_proj_qkvz.weight"] == (48, 16)
    assert shapes["model.layers.6.mlp.experts.3.down_proj.weight"] == (16, 12)
    assert shapes["model.layers.4.linear_attn.conv1d.weight"] == (32, 1, 4)
    assert shapes["model.layers.8.mlp.gate_proj.weight"] == (20, 16)
    assert shapes["lm_head.weight"] == (40, 16)
    # per sparse layer: 2 norms, router, 12 expert and 3 shared tensors, shared gate; mixers 7 or 6
    assert len(names) == 3 + 8 * 19 + 6 * 7 + 2 * 6 + (2 + 7 + 3)


def test_the_router_and_the_convolution_take_no_adapter():
    kinds = {leaf.path[-2] for leaf in bind(FAMILY, tiny()) if leaf.adaptable}
    assert kinds >= {"q_proj", "in_proj_ba", "down_proj", "shared_expert_gate", "lm_head"}
    assert not kinds & {"gate", "conv1d"}
