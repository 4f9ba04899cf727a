# SPDX-License-Identifier: Apache-2.0
"""Memory of the real training step on a TPU slice, by compiling it there and running nothing.

The step is that of `lora_tune.training.step` on a Qwen3-Next whose weights are shapes, adapters on
every projection but the routed experts. libtpu compiles for a named topology on any machine, so no
TPU is needed (`pip install 'jax[tpu]'`). Bytes are the compiler's, for one chip; `teraflops` counts
the products in the traced step, forward, recomputed and backward, on one chip.

    python benchmarks/tpu_memory.py                                  # v5p-8, expert=4, 80B
    python benchmarks/tpu_memory.py --topology v5p:4x4x8 --expert 128 --length 2048
    python benchmarks/tpu_memory.py --layers 8 --config num_experts=64 --remat dots --hlo step.txt
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_tune import sharding
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import add_lora
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.training.optim import make_optimizer
from lora_tune.training.state import Weights, split_model
from lora_tune.training.step import make_step

OPTIMIZER = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
}


def topology_mesh(name: str, *, fsdp: int = 1, expert: int = 1) -> Mesh:
    """A mesh of the devices of a TPU topology such as `v5:2x2x1`; data parallel over the rest."""
    sides = [int(side) for side in name.split(":")[1].split("x")]
    # Slices of whole 4x4x4 cubes are tori. Compiled without their wrap-around links, a gather over
    # the slice becomes an all-reduce of a buffer of its full size.
    torus = len(sides) == 3 and all(side % 4 == 0 for side in sides)
    wrap = {"wrap": (True, True, True)} if torus else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **wrap).devices
    return sharding.make_mesh(
        data=len(devices) // (fsdp * expert), fsdp=fsdp, expert=expert, devices=devices
    )


def trace_step(model: Decoder, mesh: Mesh, *, length: int, rows: int = 1) -> Any:
    """Traces the step of an abstract model on `rows` rows of `length` tokens for each device."""
    split = split_model(model)
    optimizer, _ = make_optimizer(total_steps=100, **OPTIMIZER)
    replicated = NamedSharding(mesh, PartitionSpec())

    def shape_on(value: Any, place: NamedSharding = replicated) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place)

    def placed(weights: Weights) -> Any:
        shardings = split.shardings(mesh, weights)
        return {name: shape_on(value, shardings[name]) for name, value in weights.items()}

    trainable = placed(split.trainable)
    moments = {value.shape: value.sharding for value in trainable.values()}
    opt_state = jax.tree.map(
        lambda value: shape_on(value, moments.get(value.shape, replicated)),
        jax.eval_shape(optimizer.init, split.trainable),
    )
    by_rows = NamedSharding(mesh, PartitionSpec(None, sharding.BATCH_AXES, None))
    ids = jax.ShapeDtypeStruct((1, rows * mesh.size, length), jnp.int32, sharding=by_rows)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ids)
    batch["weights"] = ids.update(dtype=jnp.float32)
    key = shape_on(jax.eval_shape(lambda: jax.random.key(0)))
    step = jax.jit(make_step(split, optimizer, mesh=mesh), donate_argnums=(0, 1))
    return step.trace(trainable, opt_state, placed(split.frozen), batch, key)


def product_flops(jaxpr: Any, *, share: float, trips: int = 1) -> float:
    """Floating-point operations of all matrix products in a jaxpr and the jaxprs inside it.

    Args:
      jaxpr: the step; its products in the manual region are those of one chip.
      share: of the rows of a grouped product, those that this chip's experts are asked for.
      trips: how often the jaxpr runs.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        kind, params = eqn.primitive.name, eqn.params
        if kind in ("dot_general", "ragged_dot_general"):
            dims = params.get("ragged_dot_dimension_numbers")
            (contracted, _), _ = dims.dot_dimension_numbers if dims else params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            rows = 1.0 if dims is None else share
            total += trips * rows * 2 * math.prod(eqn.outvars[0].aval.shape) * inner
        # The only conditionals are choices of a form by platform, the one for TPU last.
        inside = [params["branches"][-1]] if kind == "cond" else jax.tree.leaves(params)
        for sub in (getattr(value, "jaxpr", value) for value in inside):
            if hasattr(sub, "eqns"):
                inner_trips = trips * (params["length"] if kind == "scan" else 1)
                total += product_flops(sub, share=share, trips=inner_trips)
    return total


def memory(compiled: Any) -> dict[str, int]:
    """The compiler's numbers, bytes per device."""
    stats = compiled.memory_analysis()
    return {
        "temp": stats.temp_size_in_bytes,
        "arguments": stats.argument_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
        "peak": stats.peak_memory_in_bytes,
        "host_temp": stats.host_temp_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5:2x2x1")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--expert", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1, help="rows on each device")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--config", nargs="*", default=[], metavar="FIELD=SIZE")
    parser.add_argument("--hlo", help="file for the compiled program")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    family = FAMILIES["qwen3_next"]
    changes = {name: int(size) for name, size in (pair.split("=") for pair in args.config)}
    config = family.read_config({"num_hidden_layers": args.layers, **changes})
    options = DecoderOptions(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, remat=args.remat)
    model = add_lora(Decoder(family, config, options), LoraConfig(r=16, lora_alpha=32))
    mesh = topology_mesh(args.topology, fsdp=args.fsdp, expert=args.expert)
    started = time.perf_counter()
    traced = trace_step(model, mesh, length=args.length, rows=args.rows)
    flops = product_flops(traced.jaxpr.jaxpr, share=1 / args.expert)
    numbers: dict[str, Any] = {"teraflops": round(flops / 1e12, 2)}
    if args.compile:
        compiled = traced.lower().compile()
        numbers |= memory(compiled)
        if args.hlo:
            Path(args.hlo).write_text(compiled.as_text())
    numbers["seconds"] = round(time.perf_counter() - started)
    print(json.dumps({**vars(args), **numbers}))


if __name__ == "__main__":
    main()
