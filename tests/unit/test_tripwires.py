# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from lora_tune.training.tripwires import (
    TripwireError,
    check_adapters,
    check_evaluation,
    check_step,
    check_trainable,
)

PLANNED = {"tokens": 9, "trained_tokens": 7}
GOOD = {"loss": 1.5, "grad_norm": 0.3, **PLANNED}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": math.nan}, "loss of step 3 is nan.*learning_rate"),
        ({"loss": math.inf}, "loss of step 3 is inf"),
        ({"loss": 0.0}, "loss of step 3 is exactly 0.*masks"),
        ({"grad_norm": math.nan}, "gradient norm of step 3 is nan.*1.5"),
        ({"grad_norm": math.inf}, "gradient norm of step 3 is inf"),
        ({"grad_norm": 0.0}, "gradient norm of step 3 is exactly 0.*target_modules"),
        ({"trained_tokens": 0, "loss": math.nan}, "no trained token.*max_length"),
        ({"trained_tokens": 6.0}, "counted 6 trained tokens, the data has 7 for it.*mesh"),
        ({"tokens": 18}, "counted 18 tokens, the data has 9 for it.*mesh"),
    ],
)
def test_each_fault_has_its_cause_and_remedy(changes, words):
    with pytest.raises(TripwireError, match=words) as caught:
        check_step(3, GOOD | changes, PLANNED)
    assert "\n" not in str(caught.value)


def test_healthy_numbers_pass():
    check_step(1, GOOD, PLANNED)
    least = {"loss": 1e-30, "grad_norm": 1e-30, "trained_tokens": 1}
    check_step(1, GOOD | least, PLANNED | {"trained_tokens": 1})
    check_trainable(1)
    check_evaluation(0, {"eval_loss": 0.0})
    check_adapters(2, {"a": 1e-20})


def test_adapters_that_never_move_are_named():
    norms = {"model.layers.0.mlp.experts": 0.0, "model.layers.0.self_attn.q_proj": 0.1}
    check_adapters(1, norms)
    with pytest.raises(TripwireError, match=r"after 2 steps.*experts is still exactly 0") as caught:
        check_adapters(2, norms)
    assert "q_proj" not in str(caught.value)


def test_a_long_list_of_adapters_is_cut():
    with pytest.raises(TripwireError, match=r"n0, n1, n2, n3, n4 and 95 more"):
        check_adapters(2, {f"n{i}": 0.0 for i in range(100)})


def test_an_adapter_that_is_not_finite_stops_at_any_step():
    with pytest.raises(TripwireError, match="q_proj is not finite"):
        check_adapters(1, {"q_proj": math.nan})


def test_nothing_to_train_is_an_error():
    with pytest.raises(TripwireError, match="nothing is trainable"):
        check_trainable(0)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_evaluation_must_be_finite(loss):
    with pytest.raises(TripwireError, match="evaluation loss after step 9"):
        check_evaluation(9, {"eval_loss": loss})
