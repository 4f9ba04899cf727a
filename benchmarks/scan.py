# SPDX-License-Identifier: Apache-2.0
"""What depth costs: the training step, nested scans against unrolled layers, at a fixed width.

Every program is the real step of a Qwen3-Next with adapters, data parallel, compiled for TPU chips
without one (`pip install 'jax[tpu]'`), or with `--cpu` for this one. Seconds are of this machine;
bytes are the compiler's, on one chip: temp as it allots it, and peak, the most in use at one time
beside the arguments (TPU only). Behind both, what a layer adds over the line above, in saved layer
inputs: one is the least that recomputing layers can take.

    python benchmarks/scan.py                         # depths 4 to 48 nested, to 16 unrolled
    python benchmarks/scan.py --depths 8 48 --unrolled --experts 0 --cpu
"""

import argparse
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from lora_tune import recipe, sharding
from lora_tune.plan import abstract
from lora_tune.plan.measure import compile_step
from lora_tune.plan.topologies import parse

WIDTH = {
    "model_type": "qwen3_next",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}


def measure(depth: int, *, scanned: bool, args: argparse.Namespace) -> dict[str, float]:
    """Seconds and bytes of one program."""
    config = {**WIDTH, "num_hidden_layers": depth, "num_experts": args.experts}
    dtype = "float32" if args.cpu else "bfloat16"
    [topology] = parse("cpu" if args.cpu else args.topology)
    devices = abstract.devices_of(topology)[: 1 if args.cpu else None]
    asked = recipe.Recipe(
        model=recipe.Model(path="wide", dtype=dtype, scan_layers=scanned),
        lora=recipe.Lora(r=8, lora_alpha=16),
        data=recipe.Data(max_length=args.length),
        mesh=recipe.Mesh(data=len(devices)),
        train=recipe.Train(max_steps=100, batch_size=args.rows * len(devices)),
    )
    mesh = sharding.make_mesh(data=len(devices), devices=devices)
    started = time.perf_counter()
    program = abstract.trace(asked, abstract.make_model(asked, config), mesh)
    traced = time.perf_counter()
    compiled = compile_step(program.traced, mesh)
    found = compiled.memory
    return {
        "trace": traced - started,
        "compile": compiled.seconds,
        "code": found.code,
        "temp": found.temp,
        "peak": 0 if found.peak is None else found.peak - found.argument,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 32, 48])
    parser.add_argument("--unrolled", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--experts", type=int, default=8, help="0 makes every layer dense")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="on each chip")
    parser.add_argument("--topology", default="v5p-8")
    parser.add_argument("--cpu", action="store_true", help="float32, on this machine")
    args = parser.parse_args()

    saved = args.rows * args.length * WIDTH["hidden_size"] * (4 if args.cpu else 2)
    print(f"a saved layer input is {saved / 1e6:.2f} MB")
    print(
        f"{'layers':>14} {'trace s':>8} {'compile s':>10} {'code MB':>8} "
        f"{'temp MB':>9} {'inputs':>7} {'peak MB':>9} {'inputs':>7}"
    )
    for form, depths in (("nested", args.depths), ("unrolled", args.unrolled)):
        before: tuple[int, dict[str, float]] | None = None
        for depth in sorted(depths):
            found = measure(depth, scanned=form == "nested", args=args)
            added = {"temp": "", "peak": ""}
            if before is not None:
                layers = (depth - before[0]) * saved
                added = {n: f"{(found[n] - before[1][n]) / layers:.2f}" for n in added}
            before = (depth, found)
            print(
                f"{form:>8} {depth:>5} {found['trace']:>8.1f} {found['compile']:>10.1f} "
                f"{found['code'] / 1e6:>8.2f} {found['temp'] / 1e6:>9.2f} {added['temp']:>7} "
                f"{found['peak'] / 1e6:>9.2f} {added['peak']:>7}",
                flush=True,
            )


if __name__ == "__main__":
    main()
