# SPDX-License-Identifier: Apache-2.0
"""What depth, length and number of experts cost the compiler and the memory, at a fixed width.

Every program is the real step of a Qwen3-Next with adapters, data parallel, compiled for TPU chips
without one (`pip install 'jax[tpu]'`), or with `--cpu` for this one. One of the three is varied at
a time, from 8 layers, rows of 4,096 tokens and 8 experts; unrolled layers stand beside nested
scans. Seconds are of this machine; bytes are the compiler's, on one chip: temp as it allots it, and
peak, the most in use at one time beside the arguments (TPU only). Against the line above stand
`power`, that of the varied number which memory follows (1 is proportional), and for depth `inputs`,
what a layer adds in saved layer inputs (one is the least that recomputing layers can take).

    python benchmarks/growth.py    # 4 to 48 layers, 1k to 32k tokens, 8 to 512 experts
    python benchmarks/growth.py --length --experts --unrolled --depth 8 48 --base experts=0 --cpu
"""

import argparse
import math
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


BASE = {"depth": 8, "length": 4096, "experts": 8}
AXES = {
    "depth": [4, 8, 16, 32, 48],
    "length": [1024, 2048, 4096, 8192, 16384, 32768],
    "experts": [8, 32, 128, 512],
}
_COLUMNS = ("form", "what", "trace s", "compile s", "code MB", "temp MB", "peak MB")


def measure(
    depth: int, length: int, experts: int, *, scanned: bool, args: argparse.Namespace
) -> dict[str, float]:
    """Seconds and bytes of one program; 0 experts make every layer dense."""
    config = {**WIDTH, "num_hidden_layers": depth, "num_experts": experts}
    dtype = "float32" if args.cpu else "bfloat16"
    [topology] = parse("cpu" if args.cpu else args.topology)
    devices = abstract.devices_of(topology)[: 1 if args.cpu else None]
    asked = recipe.Recipe(
        model=recipe.Model(path="wide", dtype=dtype, scan_layers=scanned),
        lora=recipe.Lora(r=8, lora_alpha=16),
        data=recipe.Data(max_length=length),
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


def series(axis: str, values: list[int], *, scanned: bool, args: argparse.Namespace) -> None:
    """Prints the lines of one axis, each against the one above."""
    saved = args.rows * args.base["length"] * WIDTH["hidden_size"] * (4 if args.cpu else 2)
    memory = "temp" if args.cpu else "peak"
    before: tuple[int, dict[str, float]] | None = None
    for value in sorted(values):
        found = measure(**{**args.base, axis: value}, scanned=scanned, args=args)
        power = inputs = ""
        if before is not None:
            small, earlier = before
            ratio = found[memory] / earlier[memory]
            power = f"{math.log(ratio) / math.log(value / small):.2f}"
            if axis == "depth":
                inputs = f"{(found[memory] - earlier[memory]) / ((value - small) * saved):.2f}"
        before = (value, found)
        cells = [
            "nested" if scanned else "unrolled",
            f"{axis} {value}",
            *(f"{found[name]:.1f}" for name in ("trace", "compile")),
            *(f"{found[name] / 1e6:.2f}" for name in ("code", "temp", "peak")),
            power,
            inputs,
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _base(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in BASE or not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}, expected one of {', '.join(BASE)} = a number")
    return name, int(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis, values in AXES.items():
        parser.add_argument(f"--{axis}", type=int, nargs="*", default=values, help="none: left out")
    parser.add_argument("--unrolled", type=int, nargs="*", default=[4, 8, 16], help="depths")
    parser.add_argument("--base", type=_base, nargs="*", default=[], help="depth=8 length=4096 ...")
    parser.add_argument("--rows", type=int, default=4, help="on each chip")
    parser.add_argument("--topology", default="v5p-8")
    parser.add_argument("--cpu", action="store_true", help="float32, on this machine")
    args = parser.parse_args()
    args.base = {**BASE, **dict(args.base)}

    base = ", ".join(f"{name} {value}" for name, value in args.base.items())
    print(f"{args.rows} rows a chip; what is not varied: {base}; `full`\n")
    print(f"| {' | '.join((*_COLUMNS, 'power', 'inputs'))} |\n{'|---' * (len(_COLUMNS) + 2)}|")
    for axis in AXES:
        series(axis, getattr(args, axis), scanned=True, args=args)
    series("depth", args.unrolled, scanned=False, args=args)


if __name__ == "__main__":
    main()
