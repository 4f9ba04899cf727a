# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the gated delta rule against the straightforward chunked form.

The other form is what one writes first: repeated key heads, a triangular solve, and autograd
through a scan that keeps everything. First both are compiled for one TPU v5p chip, in bfloat16:
temp and code are the compiler's figures, bytes are what the optimised program reads and writes,
loops counted as often as they run. Beside them stands the whole mixer, with convolution, norm and
gate, as the kernels that a TPU gets and as the loop over chunks. Then both rules run on this
machine, alternating, on the same float32 arrays; their outputs and gradients are compared before
anything is timed. CPU time is that of the whole process, whatever else the machine does.

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

from lora_tune.layers import delta_mixer
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


def compiled_for_tpu(rule, shapes) -> str:
    """Figures of a forward and backward pass that is compiled for one chip and not run."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5:2x2x1").devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(*made, sharding=place) for made in shapes]

    def step(*arrays):
        out, pull = jax.vjp(lambda *x: rule(*x).astype(jnp.bfloat16), *arrays)
        return out, pull(jnp.ones_like(out))

    start = time.perf_counter()
    compiled = jax.jit(step).lower(*shapes).compile()
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    traffic = cost.count(hlo.parse(compiled.as_text() or ""), devices=1).bytes
    return (
        f"temp {memory.temp_size_in_bytes / 1e6:.0f} MB, {traffic / 1e9:.2f} GB of traffic, "
        f"code {memory.generated_code_size_in_bytes / 1e6:.1f} MB, compiled in {seconds:.0f} s"
    )


def mixer(args, *, kernels):
    """The mixer of a layer, as a function of what its projections put out and of its weights."""
    groups = args.value_heads // args.key_heads
    heads = delta_mixer.Heads(args.key_heads, groups, args.dim, args.dim)

    def mix(*given):
        *rows, kernel, norm = given
        fits = delta_mixer.kernel_fits
        delta_mixer.kernel_fits = fits if kernels else lambda *_: False
        try:
            return delta_mixer.gated_delta_mixer(
                *rows, kernel=kernel, norm_weight=norm, heads=heads, eps=1e-6
            )
        finally:
            delta_mixer.kernel_fits = fits

    lead = (args.batch, args.time)
    packed = (*lead, args.key_heads * (heads.inner + heads.outer))
    gates = ((*lead, args.value_heads), jnp.float32)
    params = [(4, args.key_heads * heads.inner), (args.dim,)]
    return mix, [(packed, jnp.bfloat16), gates, gates, *((s, jnp.bfloat16) for s in params)]


def print_compiled(args, arrays) -> None:
    kinds = [jnp.bfloat16] * 3 + [jnp.float32] * 2
    shapes = [(x.shape, kind) for x, kind in zip(arrays, kinds, strict=True)]
    for name, rule in {"ours": gated_delta_rule, "straightforward": straightforward}.items():
        figures = compiled_for_tpu(lambda *x, rule=rule: rule(*x)[0], shapes)
        print(f"{name:16s} {figures}")
    for name, kernels in {"mixer, kernels": True, "mixer, loop": False}.items():
        print(f"{name:16s} {compiled_for_tpu(*mixer(args, kernels=kernels))}")


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
    print_compiled(args, arrays)
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
