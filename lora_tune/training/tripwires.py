# SPDX-License-Identifier: Apache-2.0
"""Checks that stop a run which would end in success and be wrong.

Each check is pure: it looks at numbers that are on the host already and raises `TripwireError` with
one sentence that says what is wrong, the likely cause and the remedy.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping

from lora_tune.errors import listed

# B starts at zero and a warm-up makes the first step one of learning rate zero.
ADAPTERS_MOVE_BY_STEP = 2


class TripwireError(RuntimeError):
    """Training was stopped because it had gone wrong; its text is one sentence for the user."""

    agreed = True
    """Every process of a run looks at the same numbers; see `lora_tune.distributed`."""


def check_trainable(count: int) -> None:
    """Raises if there is nothing to train; `count` is the number of trainable values."""
    if count < 1:
        raise TripwireError(
            "nothing is trainable: every parameter is frozen and no adapter was made; "
            "set lora.target_modules to modules of this model, or lora: null to train all of it"
        )


@contextlib.contextmanager
def never_compiled_again(step: int) -> Iterator[None]:
    """Around a call of the compiled step: arguments that it was not compiled for stop the run.

    Compiling anew for every batch would go on in silence, and many times slower.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise TripwireError(
            f"step {step} has arrays of other shapes, types or places than the step was compiled "
            f"for ({str(error).splitlines()[0][:200]}), and would be compiled again; give every "
            "batch the same shape (data.max_length, train.batch_size)"
        ) from error


def check_step(step: int, metrics: Mapping[str, float], planned: Mapping[str, int]) -> None:
    """Raises if the numbers of one optimizer step cannot be those of healthy training.

    Args:
      step: the step, counted from 1.
      metrics: `loss`, `grad_norm`, `tokens` and `trained_tokens` of that step, as the devices
        counted them.
      planned: `tokens` and `trained_tokens`, as the data has them.
    """
    loss, norm = metrics["loss"], metrics["grad_norm"]
    if metrics["trained_tokens"] < 1:
        raise TripwireError(
            f"step {step} has no trained token, so it can teach nothing: every target of the batch "
            "is masked; check that the conversations have assistant turns and that data.max_length "
            "does not cut them off"
        )
    for name in ("tokens", "trained_tokens"):
        if round(metrics[name]) != planned[name]:
            raise TripwireError(
                f"step {step} counted {metrics[name]:,.0f} {name.replace('_', ' ')}, the data has "
                f"{planned[name]:,} for it: rows were lost or doubled on the way to the devices; "
                "check that mesh.* is the same for every process, and report this if it is"
            )
    if not math.isfinite(loss):
        raise TripwireError(
            f"the loss of step {step} is {loss}: the model overflowed or its weights are damaged; "
            "lower optim.learning_rate, set optim.max_grad_norm, or use model.dtype=float32"
        )
    if not math.isfinite(norm):
        raise TripwireError(
            f"the gradient norm of step {step} is {norm} while the loss is {loss}: the backward "
            "pass overflowed; lower optim.learning_rate or use model.dtype=float32"
        )
    if loss == 0:
        raise TripwireError(
            f"the loss of step {step} is exactly 0: the targets are masked, are the inputs "
            "themselves, or are already known by heart; check the masks with a few examples, or "
            "lower train.max_steps if it is the last of these"
        )
    if norm == 0:
        raise TripwireError(
            f"the gradient norm of step {step} is exactly 0 while the loss is {loss}: no trainable "
            "parameter has a part in the loss; check that lora.target_modules names modules that "
            "the forward pass uses"
        )


def check_adapters(step: int, norms: Mapping[str, float]) -> None:
    """Raises if an adapter is not finite or, once it must have moved, still has B = 0.

    Args:
      step: finished optimizer steps.
      norms: the norm of every adapter's B, by its name.
    """
    broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if broken:
        raise TripwireError(
            f"after step {step} the B of {listed(broken)} is not finite: the update overflowed; "
            "lower optim.learning_rate or set optim.max_grad_norm"
        )
    inert = [name for name, norm in norms.items() if norm == 0]
    if inert and step >= ADAPTERS_MOVE_BY_STEP:
        raise TripwireError(
            f"after {step} steps the B of {listed(inert)} is still exactly 0: no gradient reaches "
            "these adapters; take those modules out of lora.target_modules, or raise "
            "optim.learning_rate if it is 0"
        )


def check_evaluation(step: int, metrics: Mapping[str, float]) -> None:
    """Raises if the held-out loss (`eval_loss`) after `step` is not a finite number."""
    if not math.isfinite(metrics["eval_loss"]):
        raise TripwireError(
            f"the evaluation loss after step {step} is {metrics['eval_loss']}: the model "
            "overflowed or the evaluation data has no trained token; check the held-out rows and "
            "lower optim.learning_rate"
        )
