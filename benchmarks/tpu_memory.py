# SPDX-License-Identifier: Apache-2.0
"""The step of Qwen3-Next-80B on TPU slices, against the published and measured MaxText.

Every row is `lora-tune plan`, with the command to get it alone; nothing runs and no TPU is needed
(`pip install 'jax[tpu]'`). MaxText's figures are of its release 0.2.5 and the commit e591f30 before
its nested scan, compiled ahead of time with jax 0.12.0.1 and libtpu 0.0.52: full training with
`remat_policy=full` and AdamW, LoRA of rank 16 on attention, linear attention and shared expert
forced in, since its own compile command leaves adapters out. Its temp for LoRA is the lesser of
both versions.

    python benchmarks/tpu_memory.py                        # all, about 5 minutes each
    python benchmarks/tpu_memory.py lora-v5p-8 --layers 8
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe on a slice, and what MaxText takes there: bytes, and seconds to compile."""

    topology: str
    words: str
    temp: float | None = None
    arguments: float | None = None
    code: float | None = None
    seconds: float | None = None


CASES = {
    "full-v5p-256": Case(
        "v5p-256",
        "recipe=qwen3next_sft lora=null save.adapter=false save.merged=true model.dtype=bfloat16 "
        "mesh.fsdp=1 mesh.expert=128 train.batch_size=128 data.max_length=2048",
        temp=11_047_518_208,
        arguments=7_487_574_016,
        code=159_030_272,
        seconds=269,
    ),
    "lora-v5p-256": Case(
        "v5p-256",
        "recipe=qwen3next_v5p_256",
        temp=17_958_289_408,
        arguments=1_386_507_264,
        code=139_705_344,
        seconds=131,
    ),
    "lora-v5p-8": Case("v5p-8", "recipe=qwen3next_v5p_8"),
    "lora-v6e-8": Case("v6e-8", "recipe=qwen3next_v6e_8"),
}


def plan(case: Case, layers: int | None) -> dict:
    """What `lora-tune plan` writes, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        words = [*case.words.split(), f"topology={case.topology}", f"json={file}"]
        words += [] if layers is None else [f"layers={layers}"]
        command = [sys.executable, "-m", "lora_tune.cli", "plan", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if not file.exists():
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")
        return json.loads(file.read_text())


def row(name: str, case: Case, layers: int | None) -> str:
    """A line of the table: ours, and MaxText's over ours."""
    found = plan(case, layers)
    if found["temp_bytes"] is None:
        return f"| {name} | does not fit: needs {found['needed_bytes']} bytes | | | | |"
    cells = (
        (found["argument_bytes"], case.arguments, 1e9, "GB"),
        (found["temp_bytes"], case.temp, 1e9, "GB"),
        (found["code_bytes"], case.code, 1e6, "MB"),
        (found["compile_seconds"], case.seconds, 1, "s"),
    )
    shown = [
        f"{ours / unit:.2f} {word}" + (f" (x {theirs / ours:.2f})" if theirs else "")
        for ours, theirs, unit, word in cells
    ]
    return f"| {name} | {' | '.join(shown)} | {found['needed_bytes'] / 1e9:.2f} GB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--layers", type=int, help="a depth instead of 48; no fair comparison")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}")
    print("In brackets MaxText's figure over this one.\n")
    print("| case | arguments | temp | code | compile | needed at once |")
    print("|---|---|---|---|---|---|")
    for name in args.cases or CASES:
        print(row(name, CASES[name], args.layers), flush=True)
    for name in args.cases or CASES:
        print(f"{name}: lora-tune plan topology={CASES[name].topology} {CASES[name].words}")


if __name__ == "__main__":
    main()
