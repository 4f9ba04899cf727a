# SPDX-License-Identifier: Apache-2.0
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy_problem import optimizer

from lora_tune.errors import InputError
from lora_tune.training.optim import SCHEDULES, decay_mask, make_schedule


@pytest.mark.parity
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_equal_those_of_transformers(kind, warmup):
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    total, rate = 23, 3e-4
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    reference = get_scheduler(kind, sgd, num_warmup_steps=warmup, num_training_steps=total)
    # transformers' `constant` takes no warm-up; ours is told so by `make_optimizer`.
    ours = make_schedule(
        kind,
        learning_rate=rate,
        total_steps=total,
        warmup_steps=0 if kind == "constant" else warmup,
    )
    for count in range(total):
        want = reference.get_last_lr()[0]
        assert float(ours(count)) == pytest.approx(want, rel=2e-6, abs=1e-12), count
        sgd.step()
        reference.step()


def test_warmup_ratio_is_rounded_up_as_in_transformers():
    _, schedule = optimizer(
        25, warmup_steps=0, warmup_ratio=0.1, lr_scheduler_type="linear", learning_rate=1.0
    )
    assert float(schedule(1)) == pytest.approx(1 / math.ceil(2.5))
    assert float(schedule(3)) == pytest.approx(1.0)


@pytest.mark.parity
def test_steps_equal_those_of_torch_adamw():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 5)).astype(np.float32)
    grads = [rng.normal(size=(3, 5)).astype(np.float32) * 10**k for k in (0, -3, 1, -1)]
    opt, _ = optimizer(
        4, learning_rate=0.1, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.1
    )
    ours, state = {"kernel": jnp.array(start)}, opt.init({"kernel": jnp.array(start)})
    theirs = torch.nn.Parameter(torch.tensor(start))
    adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for grad in grads:
        updates, state = opt.update({"kernel": jnp.array(grad)}, state, ours)
        ours = optax.apply_updates(ours, updates)
        theirs.grad = torch.tensor(grad)
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        adamw.step()
        # optax computes 1 - 0.999^t in float32, torch in float64: 6e-5 relative, 3e-6 of a step.
        np.testing.assert_allclose(ours["kernel"], theirs.detach().numpy(), rtol=0, atol=5e-6)


@pytest.mark.parity
def test_decay_spares_what_the_transformers_trainer_spares():
    pytest.importorskip("torch")
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, Trainer

    config = Qwen3NextConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    model = Qwen3NextForCausalLM(config)
    names = [name for name, _ in model.named_parameters()]
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    tree: dict = {}
    for name in names:
        node = tree
        *folders, leaf = name.split(".")
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = jnp.zeros(())
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(tree))
    ours = {jax.tree_util.keystr(path, simple=True, separator=".") for path, on in mask if on}
    # The documented exception: the logarithm of a decay rate is not pulled towards zero.
    assert decayed - ours == {name for name in names if name.endswith("A_log")}
    assert ours < decayed
    assert len(decayed) < len(names)


def test_decay_mask_sees_through_variables():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self):
            self.norm = nnx.Param(jnp.ones(2))
            self.A_log = nnx.Param(jnp.ones(2))
            self.kernel_lora_a = nnx.LoRAParam(jnp.ones((2, 2)))

    mask = decay_mask(nnx.state(Block()))
    assert {path[0].key: on for path, on in jax.tree_util.tree_leaves_with_path(mask)} == {
        "norm": False,
        "A_log": False,
        "kernel_lora_a": True,
    }


def test_state_and_small_updates_are_float32_for_bfloat16_parameters():
    params = {"kernel": jnp.full((2, 2), 1e-3, jnp.bfloat16)}
    opt, _ = optimizer(5)
    state = opt.init(params)
    updates, state = opt.update({"kernel": jnp.ones((2, 2), jnp.bfloat16)}, state, params)
    floating = [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert floating == [jnp.float32, jnp.float32]
    assert updates["kernel"].dtype == jnp.float32
    assert optax.apply_updates(params, updates)["kernel"].dtype == jnp.bfloat16


def test_an_update_of_a_millionth_changes_a_float32_adapter():
    params = {"kernel_lora_b": jnp.full((2, 2), 0.5, jnp.float32)}
    opt, _ = optimizer(5, learning_rate=1e-6, lr_scheduler_type="constant", warmup_steps=0)
    updates, _ = opt.update({"kernel_lora_b": jnp.ones((2, 2))}, opt.init(params), params)
    assert bool((optax.apply_updates(params, updates)["kernel_lora_b"] != 0.5).all())


def test_padded_rank_slots_stay_exactly_zero():
    params = {"kernel_lora_a": jnp.array([[1.0, 0.0], [2.0, 0.0]])}
    opt, _ = optimizer(6, weight_decay=0.5)
    state = opt.init(params)
    for _ in range(6):
        updates, state = opt.update(
            {"kernel_lora_a": jnp.array([[1.0, 0.0], [3.0, 0.0]])}, state, params
        )
        params = optax.apply_updates(params, updates)
    assert params["kernel_lora_a"][:, 1].tolist() == [0.0, 0.0]
    assert float(params["kernel_lora_a"][0, 0]) != 1.0


def test_no_clipping_when_max_grad_norm_is_null():
    # One step of Adam from zero hides the gradient's scale, the second moment does not.
    grads = {"kernel": jnp.full((2, 2), 100.0)}
    moments = []
    for limit in (None, 1.0):
        opt, _ = optimizer(5, max_grad_norm=limit)
        _, state = opt.update(grads, opt.init(grads), grads)
        moments.append(max(float(leaf.max()) for leaf in jax.tree.leaves(state) if leaf.ndim))
    assert moments[0] == pytest.approx(0.1 * 100.0)
    assert moments[1] == pytest.approx(0.1 * 0.5)


def test_every_wrong_argument_is_named_at_once():
    with pytest.raises(InputError) as caught:
        optimizer(
            5, learning_rate=0.0, lr_scheduler_type="cosin", max_grad_norm=-1.0, adam_beta2=1.0
        )
    for words in ("learning_rate is 0.0", "'cosin'", "max_grad_norm is -1.0", "betas", "cosine"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup_steps": 6}, "warmup_steps is 6"),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "both set"),
        ({"lr_scheduler_type": "constant"}, "constant_with_warmup"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
    ],
)
def test_options_that_would_have_no_effect_are_errors(changes, words):
    with pytest.raises(InputError, match=words):
        optimizer(5, **changes)
