# SPDX-License-Identifier: Apache-2.0
"""One model under proof, the whole base or a window of it: our logits, and those of the others."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_tune import build, trained
from lora_tune.errors import InputError
from lora_tune.hf.fused import Pair
from lora_tune.hf.hub import Source
from lora_tune.lora.inject import add_lora
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.proof import reference
from lora_tune.proof.windows import Window
from lora_tune.trained import Trained


@dataclasses.dataclass(frozen=True)
class Rows:
    """Tokens `[rows, T]`, and how many of each row count: what follows them is padding."""

    tokens: np.ndarray
    lengths: list[int]
    data: int

    def largest(self, logits: np.ndarray) -> float:
        """The largest magnitude in `[rows, T, V]` before the padding; NaN if there is one."""
        rows = zip(logits, self.lengths, strict=True)
        return float(np.max([np.abs(row[:n]).max() for row, n in rows]))


@dataclasses.dataclass(frozen=True)
class Part:
    """What is loaded at a time.

    Attributes:
      base: folder of the base, or of its window.
      trained: the adapter that was trained, for a window of the base; None where it adapts nothing.
      adapter, merged: those of the run, cut alike; None where there is none.
      pairs: the updates by module.
      window: None for the whole base.
    """

    base: Path
    trained: Path | None
    adapter: Path | None
    merged: Path | None
    pairs: Mapping[str, Pair]
    window: Window | None = None


@dataclasses.dataclass
class Found:
    """The figures of all parts together.

    Attributes:
      adapter_error: the largest difference of a logit, and what was allowed of it; None without
        an adapter that PEFT has loaded.
      effect: how far the adapter moves a logit.
      update_error: the largest difference of an update.
      parameters: (tensor, experts) of the whole model -> parameters that PEFT changes.
      merged_error: the largest difference of a logit from what was trained, rounding included;
        None without a merged folder.
      problems: one sentence for each thing that is not as it was trained.
    """

    adapter_error: tuple[float, float] | None = None
    effect: float = 0.0
    update_error: float = 0.0
    parameters: dict[tuple[str, Any], int] = dataclasses.field(default_factory=dict)
    merged_error: float | None = None
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Prover:
    """Takes the parts of a run one after the other.

    Attributes:
      run: the run.
      rows: what every part computes logits of.
      tolerance: of logits, times the largest one.
      exact: the merged weights are not rounded, so that their logits must be those of what was
        trained; else they must be those that we compute of the merged weights.
      found: what all parts have shown so far.
    """

    run: Trained
    rows: Rows
    tolerance: float
    exact: bool
    found: Found = dataclasses.field(default_factory=Found)

    def take(self, part: Part) -> None:
        """Compares a part; a problem is said with the names of the whole model, and once."""
        if part.adapter is None and part.merged is None:
            return
        ours, problems = self._our_logits(part), list[str]()
        if part.adapter is not None:
            problems += self._by_peft(part, part.adapter, ours)
        if part.merged is not None:
            problems += self._by_transformers(part.merged, ours)
        for problem in problems:
            said = problem if part.window is None else self._outside(problem, part.window)
            if said not in self.found.problems:
                self.found.problems.append(said)

    def _our_logits(self, part: Part) -> np.ndarray:
        """Logits of what was trained, computed here in float32."""
        run = self.run
        if run.lora is None:
            assert part.merged is not None
            model = _load(part.merged, run)
        else:
            model = _load(part.base, run)
            if part.window is None and run.step is not None:
                model = trained.with_weights(add_lora(model, run.lora), run.weights)
            elif part.trained is not None:
                # A window's is the checkpoint's as well: the whole adapter has been compared.
                model = build.with_adapter(model, part.trained)
        return self._logits(model)

    def _logits(self, model: Decoder) -> np.ndarray:
        graphdef, state = nnx.split(model)

        @jax.jit
        def call(state: Any, tokens: Any) -> Any:
            return nnx.merge(graphdef, state, copy=True)(tokens)

        return np.asarray(call(state, self.rows.tokens), np.float32)

    def _by_peft(self, part: Part, folder: Path, ours: np.ndarray) -> list[str]:
        rows, found = self.rows, self.found
        try:
            loaded = reference.load_adapter(part.base, folder, rows.tokens, part.pairs)
        except InputError as error:
            return [str(error)]
        error, largest = rows.largest(loaded.logits - ours), rows.largest(ours)
        allowed = self._allowed(largest)
        before = found.adapter_error
        # Of two, NaN is the larger.
        if before is None or not (
            math.isnan(before[0]) or error / allowed <= before[0] / before[1]
        ):
            found.adapter_error = (error, allowed)
        effect = rows.largest(loaded.logits - loaded.base_logits)
        found.effect = float(np.maximum(found.effect, effect))
        found.update_error = float(np.maximum(found.update_error, loaded.max_update_error))
        for name, count in loaded.parameters.items():
            found.parameters[self._whole_name(name, part.window)] = count
        return [*loaded.problems, *self._check("PEFT, with adapter/,", loaded.logits, ours)]

    def _by_transformers(self, merged: Path, ours: np.ndarray) -> list[str]:
        rows, found = self.rows, self.found
        model, problems = reference.read_model(merged)
        theirs = reference.logits_of(model, rows.tokens)
        del model
        error = rows.largest(theirs - ours)
        found.merged_error = float(np.maximum(found.merged_error or 0.0, error))
        wanted = ours if self.exact else self._logits(_load(merged, self.run))
        return [*problems, *self._check("transformers, with merged/,", theirs, wanted)]

    def _allowed(self, largest: float) -> float:
        return self.tolerance * max(1.0, largest)

    def _check(self, who: str, theirs: np.ndarray, ours: np.ndarray) -> list[str]:
        rows = self.rows
        if not math.isfinite(rows.largest(theirs)):
            return [f"{who} computes logits that are not finite"]
        error, allowed = rows.largest(theirs - ours), self._allowed(rows.largest(ours))
        if math.isfinite(error) and error <= allowed:
            return []
        return [
            f"{who} computes logits that differ from ours by up to {error:.3g}; allowed is "
            f"{allowed:.3g}"
        ]

    def _whole_name(self, name: str, window: Window | None) -> tuple[str, Any]:
        """What a tensor of transformers is in the whole model: windows may have parts of experts.

        What several windows have, as the head, has one name in all of them.
        """
        if window is None:
            return name, None
        return self._outside(name, window), window.experts if ".experts." in name else None

    def _outside(self, text: str, window: Window) -> str:
        return window.outside(text, self.run.model.family.layer_prefix)


def _load(folder: Path, run: Trained) -> Decoder:
    section, float32 = run.recipe.model, jnp.dtype(jnp.float32)
    options = DecoderOptions(
        dtype=float32,
        param_dtype=float32,
        scan_layers=section.scan_layers,
        param_scan_axis=section.param_scan_axis,
        remat=section.remat,
    )
    source = Source(folder, None, None)
    return build.load_weights(build.abstract_model(source, options), mesh=None)
