# SPDX-License-Identifier: Apache-2.0
"""The optimizer: AdamW in float32, clipped by global norm, with the schedules of transformers.

The names and the meaning of every argument are those of `transformers.TrainingArguments`, so a
learning rate that worked there works here. Defaults live in the recipe schema, not here.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lora_tune.errors import InputError

SCHEDULES = ("constant", "constant_with_warmup", "cosine", "linear")

# The names that `transformers.Trainer.get_decay_parameter_names` spares; `A_log`, which is the
# logarithm of a decay rate, which a pull towards zero would only distort; and Gemma 4's
# `layer_scalar`, which transformers holds as a buffer: with no gradient either, it stays as it is.
_NO_DECAY = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)(?:A_log|layer_scalar)$"
)

Schedule = Callable[[Any], jax.Array]


def make_optimizer(
    *,
    learning_rate: float,
    total_steps: int,
    lr_scheduler_type: str,
    warmup_steps: int,
    warmup_ratio: float,
    weight_decay: float,
    adam_beta1: float,
    adam_beta2: float,
    adam_epsilon: float,
    max_grad_norm: float | None,
) -> tuple[optax.GradientTransformation, Schedule]:
    """Builds AdamW and its schedule.

    Clipping sees the norm over the whole gradient tree it is given; call `update` on global arrays
    (under jit, outside any shard_map), or pass `max_grad_norm=None` and clip beforehand.

    Returns:
      The transformation, and `schedule(count)`: the learning rate after `count` finished optimizer
      steps, so that step n (counted from 1) uses `schedule(n - 1)`, as in transformers.

    Raises:
      InputError: naming every argument that is out of range.
    """
    _check(
        learning_rate=learning_rate,
        total_steps=total_steps,
        lr_scheduler_type=lr_scheduler_type,
        warmup_steps=warmup_steps,
        warmup_ratio=warmup_ratio,
        weight_decay=weight_decay,
        betas=(adam_beta1, adam_beta2),
        adam_epsilon=adam_epsilon,
        max_grad_norm=max_grad_norm,
    )
    schedule = make_schedule(
        lr_scheduler_type,
        learning_rate=learning_rate,
        total_steps=total_steps,
        warmup_steps=warmup_steps or math.ceil(total_steps * warmup_ratio),
    )
    adamw = optax.adamw(
        schedule,
        b1=adam_beta1,
        b2=adam_beta2,
        eps=adam_epsilon,
        weight_decay=weight_decay,
        mask=decay_mask,
    )
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return in_float32(optax.chain(clip, adamw)), schedule


def make_schedule(
    kind: str, *, learning_rate: float, total_steps: int, warmup_steps: int
) -> Schedule:
    """The learning rate as a function of the number of finished optimizer steps.

    The formulas are those of `transformers.get_scheduler` for the four types in `SCHEDULES`.
    """

    def schedule(count: Any) -> jax.Array:
        done = jnp.asarray(count, jnp.float32)
        rising = done / max(1, warmup_steps)
        progress = (done - warmup_steps) / max(1, total_steps - warmup_steps)
        falling = {
            "constant": jnp.ones_like(done),
            "constant_with_warmup": jnp.ones_like(done),
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(progress, 1.0))),
        }[kind]
        return learning_rate * jnp.where(done < warmup_steps, rising, jnp.maximum(falling, 0.0))

    return schedule


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `inner` on float32 copies of gradients and parameters.

    State and updates are then float32 whatever the parameters are, and `optax.apply_updates` rounds
    once, after the sum.
    """

    def init(params: Any) -> Any:
        return inner.init(_float32(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(_float32(updates), state, _float32(params))

    return optax.GradientTransformation(init, update)


def decay_mask(params: Any) -> Any:
    """True for each parameter that weight decay pulls on: kernels, embeddings, adapters A and B."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not _NO_DECAY.search(_dotted(path)), params
    )


def _dotted(path: Any) -> str:
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # A state of Variables adds one level for the array inside each of them; the weights of a split
    # model are one flat dictionary, whose keys have strokes between the parts of a name.
    return ".".join(keys[:-1] if keys and keys[-1] == "value" else keys).replace("/", ".")


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _check(
    *,
    learning_rate: float,
    total_steps: int,
    lr_scheduler_type: str,
    warmup_steps: int,
    warmup_ratio: float,
    weight_decay: float,
    betas: tuple[float, float],
    adam_epsilon: float,
    max_grad_norm: float | None,
) -> None:
    rules = [
        (_positive(learning_rate), f"learning_rate is {learning_rate}, expected more than 0"),
        (total_steps > 0, f"the run has {total_steps} steps, expected at least 1"),
        (
            lr_scheduler_type in SCHEDULES,
            f"lr_scheduler_type is {lr_scheduler_type!r}, expected one of {', '.join(SCHEDULES)}",
        ),
        (
            0 <= warmup_steps <= total_steps,
            f"warmup_steps is {warmup_steps}, expected 0 to the {total_steps} steps of the run",
        ),
        (0 <= warmup_ratio <= 1, f"warmup_ratio is {warmup_ratio}, expected 0 to 1"),
        (
            not (warmup_steps and warmup_ratio),
            f"warmup_steps ({warmup_steps}) and warmup_ratio ({warmup_ratio}) are both set, "
            "set one of them to 0",
        ),
        (
            lr_scheduler_type != "constant" or not (warmup_steps or warmup_ratio),
            "lr_scheduler_type 'constant' has no warm-up, use 'constant_with_warmup'",
        ),
        (
            weight_decay >= 0 and math.isfinite(weight_decay),
            f"weight_decay is {weight_decay}, expected 0 or more",
        ),
        (all(0 <= b < 1 for b in betas), f"the Adam betas are {betas}, expected 0 <= beta < 1"),
        (_positive(adam_epsilon), f"adam_epsilon is {adam_epsilon}, expected more than 0"),
        (
            max_grad_norm is None or _positive(max_grad_norm),
            f"max_grad_norm is {max_grad_norm}, expected more than 0, or null for no clipping",
        ),
    ]
    problems = [text for holds, text in rules if not holds]
    if problems:
        raise InputError(f"the optimizer cannot be built from section optim: {'; '.join(problems)}")


def _positive(number: float) -> bool:
    return number > 0 and math.isfinite(number)
