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
import time

import jax.numpy as jnp
from tpu_memory import memory, topology_mesh, trace_step

from lora_tune import sharding
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import add_lora
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions

WIDTH = {
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
    family = FAMILIES["qwen3_next"]
    config = family.read_config({**WIDTH, "num_hidden_layers": depth, "num_experts": args.experts})
    dtype = jnp.float32 if args.cpu else jnp.bfloat16
    options = DecoderOptions(dtype=dtype, param_dtype=dtype, scan_layers=scanned, remat="full")
    mesh = sharding.make_mesh() if args.cpu else topology_mesh(args.topology)
    started = time.perf_counter()
    model = add_lora(Decoder(family, config, options), LoraConfig(r=8, lora_alpha=16))
    lowered = trace_step(model, mesh, length=args.length, rows=args.rows).lower()
    traced = time.perf_counter()
    found = memory(lowered.compile())
    return {
        "trace": traced - started,
        "compile": time.perf_counter() - traced,
        "code": found["code"],
        "temp": found["temp"],
        "peak": found["peak"] - found["arguments"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 32, 48])
    parser.add_argument("--unrolled", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--experts", type=int, default=8, help="0 makes every layer dense")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="on each chip")
    parser.add_argument("--topology", default="v5:2x2x1")
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
