# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the gated delta rule against the straightforward chunked form.

The other form is what one writes first: repeated key heads, a triangular solve, and autograd
through a scan that keeps everything. First both are compiled for one TPU v5p chip, in bfloat16:
temp is the compiler's figure, bytes are what the optimised program reads and writes, loops counted
as often as they run. Then both run on this machine, alternating, on the same float32 arrays; their
outputs and gradients are compared before anything is timed. CPU time is that of the whole process,
whatever else the machine does.

    python benchmarks/delta_rule.py                        # B=1, T=1024, Qwen3-Next heads
    taskset -c 0 python benchmarks/delta_rule.py --time 4096 --repeats 3

On some machines jaxlib 0.10.2 never returns from the triangular solve with more than one core to
run on; `taskset` leaves it one.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from lora_tune.layers.delta_net import gated_delta_rule
from lora_tune.plan import cost, hlo
from lora_tune.plan.environment import prepare

HIGHEST = jax.lax.Precision.HIGHEST


def straightforward(q, k, v, g, beta, *, chunk_size=64):
    """Chunked gated delta rule, one document a row, T a multiple of the chunk."""
    groups = v.shape[2] // q.shape[2]

    def chunks(x):
        x = jnp.moveaxis(x, 1, 2)  # [B, H, T, ...]
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, chunk_size, *x.shape[3:]), 2, 0)

    def normalised(x):
        x = jnp.repeat(x, groups, axis=2)
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    q, k, v, g, beta = map(chunks, (normalised(q) * q.shape[-1] ** -0.5, normalised(k), v, g, beta))
    total = jnp.cumsum(g, axis=-1)
    tril = jnp.tril(jnp.ones((chunk_size, chunk_size), bool))
    exponent = total[..., :, None] - total[..., None, :]
    decay = jnp.exp(jnp.where(jnp.broadcast_to(tril, exponent.shape), exponent, -jnp.inf))
    k_beta, v_beta = k * beta[..., None], v * beta[..., None]
    system = jnp.einsum("...id,...jd->...ij", k_beta, k, precision=HIGHEST) * decay
    sides = jnp.concatenate([v_beta, k_beta * jnp.exp(total)[..., None]], axis=-1)
    solved = jax.lax.linalg.triangular_solve(
        system, sides, left_side=True, lower=True, unit_diagonal=True
    )
    scores = jnp.einsum("...id,...jd->...ij", q, k, precision=HIGHEST) * decay

    def step(state, chunk):
        q, k, total, u, w, scores = chunk
        new = u - jnp.matmul(w, state, precision=HIGHEST)
        out = jnp.matmul(q * jnp.exp(total)[..., None], state, precision=HIGHEST)
        out = out + jnp.matmul(scores, new, precision=HIGHEST)
        last = total[..., -1:]
        k = k * jnp.exp(last - total)[..., None]
        state = state * jnp.exp(last)[..., None]
        return state + jnp.einsum("...cd,...cv->...dv", k, new, precision=HIGHEST), out

    u, w = jnp.split(solved, [v.shape[-1]], axis=-1)
    state = jnp.zeros((*v.shape[1:3], k.shape[-1], v.shape[-1]))
    state, out = jax.lax.scan(step, state, (q, k, total, u, w, scores))
    out = jnp.moveaxis(out, 0, 2)  # [B, H, n, C, Dv]
    return jnp.moveaxis(out.reshape(*out.shape[:2], -1, v.shape[-1]), 1, 2), state


def step_of(rule, weights):
    def loss(arrays, weights):
        out, state = rule(*arrays)
        return jnp.sum(out * weights) + jnp.sum(state), out

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return lambda arrays: jax.block_until_ready(step(arrays, weights))


def make(batch, length, key_heads, value_heads, dim):
    rng = np.random.default_rng(0)
    shape = (batch, length, value_heads)
    q, k = (rng.normal(size=(batch, length, key_heads, dim)) for _ in range(2))
    v = rng.normal(size=(*shape, dim))
    arrays = (q, k, v, -0.1 * rng.uniform(size=shape), rng.uniform(size=shape))
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def compiled_for_tpu(rule, arrays) -> dict[str, float]:
    """Megabytes of temp and gigabytes of traffic of a step that is compiled and not run."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5:2x2x1").devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    kinds = [jnp.bfloat16] * 3 + [jnp.float32] * 2
    shapes = [
        jax.ShapeDtypeStruct(x.shape, kind, sharding=place)
        for x, kind in zip(arrays, kinds, strict=True)
    ]

    def step(*arrays):
        out, pull = jax.vjp(lambda *x: rule(*x)[0].astype(jnp.bfloat16), *arrays)
        return out, pull(jnp.ones_like(out))

    compiled = jax.jit(step).lower(*shapes).compile()
    traffic = cost.count(hlo.parse(compiled.as_text()), devices=1).bytes
    return {"temp": compiled.memory_analysis().temp_size_in_bytes / 1e6, "bytes": traffic / 1e9}


def seconds(step, arrays):
    start = time.process_time()
    step(arrays)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"batch": 1, "time": 1024, "key-heads": 16, "value-heads": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    prepare(attached=False)
    arrays = make(args.batch, args.time, args.key_heads, args.value_heads, args.dim)
    weights = jnp.ones_like(arrays[2])
    rules = {"ours": gated_delta_rule, "straightforward": straightforward}
    print(f"{vars(args)}; TPU v5p, compiled, bfloat16:")
    for name, rule in rules.items():
        figures = compiled_for_tpu(rule, arrays)
        print(f"{name:16s} temp {figures['temp']:.0f} MB, {figures['bytes']:.1f} GB of traffic")
    steps = {name: step_of(rule, weights) for name, rule in rules.items()}
    results = [jax.tree.leaves(step(arrays)) for step in steps.values()]
    gap = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(*results, strict=True))
    times = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, step in steps.items():
            times[name].append(seconds(step, arrays))
    print(f"{jax.devices()[0].device_kind}, float32, CPU time:")
    print(f"largest relative difference of outputs and gradients: {gap:.1e}")
    for name, values in times.items():
        print(f"{name:16s} median {statistics.median(values):.3f} s, best {min(values):.3f} s")
    ratio = statistics.median(times["straightforward"]) / statistics.median(times["ours"])
    print(f"straightforward / ours: {ratio:.2f}")


if __name__ == "__main__":
    main()
