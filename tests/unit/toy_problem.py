# SPDX-License-Identifier: Apache-2.0
"""A low-rank linear regression with the signatures of the real train step, data and evaluation.

Run as a program it is a whole run with checkpoints, for tests that kill it:
`python toy_problem.py RUN_DIR TOTAL_STEPS SAVE_EVERY SECONDS_PER_STEP`.
"""

import functools
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lora_tune.checkpoint.folder import Checkpoints
from lora_tune.training.best import Best
from lora_tune.training.loop import run
from lora_tune.training.metrics import MetricsLog
from lora_tune.training.optim import make_optimizer

IN, OUT, RANK, ROWS = 6, 4, 2, 8


def optimizer(total_steps, **changes):
    settings = {
        "learning_rate": 0.05,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "warmup_ratio": 0.0,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
    }
    return make_optimizer(total_steps=total_steps, **(settings | changes))


def make_state(opt):
    a = np.random.default_rng(0).normal(size=(IN, RANK)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(IN, OUT)).astype(np.float32)
    trainable = {"q_proj": {"kernel_lora_a": jnp.array(a), "kernel_lora_b": jnp.zeros((RANK, OUT))}}
    return trainable, opt.init(trainable), {"q_proj": {"kernel": jnp.array(kernel)}}


def loss_sum(trainable, frozen, x, y, weights):
    adapter = trainable["q_proj"]
    delta = x @ adapter["kernel_lora_a"] @ adapter["kernel_lora_b"]
    error = jnp.square(x @ frozen["q_proj"]["kernel"] + delta - y).sum(-1)
    return (error * weights).sum()


def make_step(opt):
    def step(trainable, opt_state, frozen, batch, key):
        tokens = batch["weights"].sum()
        x = batch["x"] + 1e-3 * jax.random.normal(key, batch["x"].shape)

        def mean_loss(trainable):
            return loss_sum(trainable, frozen, x, batch["y"], batch["weights"]) / tokens

        loss, grads = jax.value_and_grad(mean_loss)(trainable)
        updates, opt_state = opt.update(grads, opt_state, trainable)
        out = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "tokens": jnp.int32(batch["weights"].size),
            "trained_tokens": tokens.astype(jnp.int32),
        }
        return optax.apply_updates(trainable, updates), opt_state, out

    return jax.jit(step, donate_argnums=(0, 1))


class ToyData:
    def __init__(self, seed=0, *, steps=10**6, wait=0.0):
        self.seed, self.steps, self.wait, self.served = seed, steps, wait, []

    def batches(self, start_step):
        for step in range(start_step + 1, self.steps + 1):
            time.sleep(self.wait)
            self.served.append(step)
            yield self.batch(step)

    def batch(self, step):
        rng = np.random.default_rng((self.seed, step))
        x = rng.normal(size=(1, ROWS, IN)).astype(np.float32)
        target = np.random.default_rng(9).normal(size=(IN, OUT)).astype(np.float32)
        weights = (rng.random((1, ROWS)) < 0.7).astype(np.float32)
        weights[0, 0] = 1.0
        return {"x": x, "y": x @ target, "weights": weights}

    def position(self, step):
        return {"examples": step * ROWS}

    def planned(self, step):
        return {"tokens": ROWS, "trained_tokens": round(ToyData.batch(self, step)["weights"].sum())}


def make_eval(data):
    held_out = jax.device_put(data.batch(0))

    def evaluate(trainable, frozen):
        total = loss_sum(trainable, frozen, held_out["x"], held_out["y"], held_out["weights"])
        return {"eval_loss": float(total / held_out["weights"].sum())}

    return evaluate


def adapter_norms(trainable):
    return {"q_proj": float(jnp.linalg.norm(trainable["q_proj"]["kernel_lora_b"]))}


@functools.cache
def tools(total_steps):
    """Optimizer, schedule and jitted step, so that the runs of one test compile once."""
    opt, schedule = optimizer(total_steps)
    return opt, schedule, make_step(opt)


def train(
    run_dir,
    *,
    total_steps,
    save_every=0,
    stop_after=None,
    keep=2,
    wait=0.0,
    log_every=1,
    eval_every=5,
    writers=(),
    data=None,
    eval_fn=None,
    criterion=None,
):
    """One whole run, resumed from its folder; `stop_after` ends the data early, like a crash."""
    opt, schedule, step_fn = tools(total_steps)
    trainable, opt_state, frozen = make_state(opt)
    checkpoints = Checkpoints(
        Path(run_dir) / "checkpoints",
        keep=keep,
        every=save_every,
        metric=criterion.metric if criterion else "eval_loss",
    )
    found = checkpoints.restore((trainable, opt_state))
    if found:
        trainable, opt_state = found.trainable, found.opt_state
    start = found.meta.step if found else 0
    data = data or ToyData(wait=wait, steps=stop_after or 10**6)
    resume_step = start if found else None
    with MetricsLog(run_dir, resume_step=resume_step, writers=writers) as metrics:
        return run(
            state=(trainable, opt_state, frozen),
            step_fn=step_fn,
            data=data,
            place=jax.device_put,
            checkpoints=checkpoints,
            metrics=metrics,
            schedule=schedule,
            total_steps=total_steps,
            log_every=log_every,
            seed=7,
            start_step=start,
            counts=found.meta.counts if found else None,
            eval_fn=eval_fn or make_eval(data),
            eval_every=eval_every,
            criterion=criterion,
            best=Best.of(found.meta.best) if found and found.meta.best else None,
            adapter_norms=adapter_norms,
        )


if __name__ == "__main__":
    outcome = train(
        sys.argv[1],
        total_steps=int(sys.argv[2]),
        save_every=int(sys.argv[3]),
        wait=float(sys.argv[4]),
    )
    print(outcome.step, outcome.interrupted)
