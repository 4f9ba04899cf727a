# SPDX-License-Identifier: Apache-2.0
"""The certificate of a run: the figures as JSON, and the same to read."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_tune.errors import InputError
from lora_tune.hf.folder import replace_file

FIGURES, SUMMARY = "certificate.json", "certificate.md"
_PROGRAMS = {"peft": "PEFT", "vllm": "vLLM", "sglang": "SGLang"}


def write(folder: Path, certificate: Mapping[str, Any]) -> None:
    """Writes both files into the run folder, each beside and renamed.

    Raises:
      InputError: they cannot be written.
    """
    try:
        replace_file(folder / FIGURES, _json(certificate))
        replace_file(folder / SUMMARY, summary(certificate))
    except OSError as error:
        raise InputError(
            f"{folder}: the certificate could not be written ({error.strerror or error})"
        ) from error


def remove_outdated(folder: Path, step: int) -> bool:
    """Removes a certificate of files that are about to be written anew from another step.

    Returns:
      Whether there was one.
    """
    there = [path for name in (FIGURES, SUMMARY) if (path := folder / name).is_file()]
    try:
        if not there or json.loads((folder / FIGURES).read_bytes())["step"] == step:
            return False
    except (OSError, ValueError, TypeError, KeyError):
        pass  # it says nothing of that step
    for path in there:
        path.unlink()
    return True


def _json(certificate: Mapping[str, Any]) -> str:
    """As strict JSON: a figure that is not finite becomes a text."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(certificate), indent=2, allow_nan=False) + "\n"


def summary(certificate: Mapping[str, Any]) -> str:
    """The certificate as Markdown."""
    return "\n".join(_lines(certificate)) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    verdict = "Passed" if found["passed"] else "Failed"
    without = " without its checkpoint, values unproved" if found["step"] is None else ""
    yield f"# {verdict}{without}: {found['run']}"
    yield ""
    revision = f" at {found['revision']}" if found["revision"] else ""
    yield f"- base: {found['base']}{revision} ({found['model_type']})"
    yield f"- trained weights: {_step(found['step'])}"
    others = ", ".join(f"{name} {version}" for name, version in found["compared_with"].items())
    yield f"- compared with: {others}"
    rows = found["rows"]
    counts = f"{rows['fixed']} fixed, {rows['data']} of the data"
    yield f"- rows: {counts}; {rows['length']} tokens at most"
    if found["windows"]:
        yield _windows(found["windows"])
    yield from (f"- **{problem}**" for problem in found["problems"])
    if found["problems"] and found["step"] is not None:
        command = f"lora-tune export run={shlex.quote(found['run'])} to=OUT"
        yield (
            f"- files that were changed or damaged: `{command} format=peft` writes this "
            "checkpoint's adapter anew, and `format=merged` the merged model"
        )
    if found["adapter"]:
        yield from _adapter(found["adapter"])
    if found["merge"]:
        yield from _merge(found["merge"])
    yield from _loads(found)


def _step(step: int | None) -> str:
    if step is None:
        return "no checkpoint is left; ranks and scales are those of the recipe"
    return f"checkpoint of step {step}"


def _windows(found: Mapping[str, Any]) -> str:
    experts = f" and {found['experts']} experts" if found["experts"] else ""
    return (
        f"- proved in {found['count']} windows, smaller models of at most {found['layers']} "
        f"layers{experts} ({found['largest_gb']:.2g} GB in float32) that together are the whole "
        "base; figures are the largest of all windows"
    )


def _adapter(found: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Adapter, loaded by PEFT", "")
    yield (
        f"- largest difference of a logit from ours: {found['max_logit_error']:.3g} (allowed "
        f"{found['allowed']:.3g}; the adapter moves logits by up to {found['effect']:.3g})"
    )
    yield f"- largest difference of a merged update from ours: {found['max_update_error']:.3g}"
    yield from _parameters(found["parameters_changed"])


def _merge(found: Mapping[str, Any]) -> Iterator[str]:
    written = found["written"]
    yield from ("", "## Merged checkpoint" if written else "## A merge, which is not written", "")
    if written:
        same = f"byte for byte as in the base: {found['unchanged']}"
        yield f"- tensors changed: {found['changed']}, {same}"
    if found["max_logit_error"] is not None:
        yield f"- largest difference of a logit from ours: {found['max_logit_error']:.3g}"
    if found["max_rounding"] is not None:
        yield (
            f"- rounding: at most {found['max_rounding']:.3g} in a weight, "
            f"{found['update_lost']:.2%} of the norm of all updates"
        )
    if written:
        yield from _parameters(found["parameters_changed"])


def _parameters(kinds: Mapping[str, int]) -> Iterator[str]:
    yield from ("", "| parameters changed | in |", "|---:|---|")
    for kind, count in kinds.items():
        yield f"| {count:,} | `{kind}` |"


def _loads(found: Mapping[str, Any]) -> Iterator[str]:
    if found["loads"]:
        yield from ("", "## What loads the adapter", "")
        for program, entry in found["loads"].items():
            reason = f": {'; '.join(entry['reasons'])}" if entry["reasons"] else ""
            yes = "yes" if entry["by"] == "loaded" else "nothing known against it; not run here"
            yield f"- {_PROGRAMS[program]}: {yes if entry['loads'] else 'no'}{reason}"
    if found["vllm_serve"]:
        yield from ("", "```sh", found["vllm_serve"], "```")
