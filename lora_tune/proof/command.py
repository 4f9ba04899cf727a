# SPDX-License-Identifier: Apache-2.0
"""The command `prove`: from a run folder to its certificate."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_tune import build, build_data, trained, words
from lora_tune.errors import InputError
from lora_tune.hf.adapters import flat_arrays
from lora_tune.hf.files import read_json
from lora_tune.hf.header import nbytes
from lora_tune.hf.hub import Source
from lora_tune.hf.peft_config import CONFIG_FILE
from lora_tune.lora.inject import add_lora
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.models.fields import max_positions
from lora_tune.proof import adapter as adapters
from lora_tune.proof import certificate, merged, reference, serving
from lora_tune.trained import Trained
from lora_tune.training.state import unflatten

_BASE = {"model.path": str, "model.revision": str}
_KEYS = {"prove": {"run": str, "limit_gb": float, "tolerance": float, **_BASE}}
_FOREIGN = {"output_dir": "run", "recipe": "run", "path": "model.path", "model": "model.path"}
_ROWS, _LENGTH = 2, 80


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Tokens `[rows, T]`, and how many of each row count: what follows them is padding."""

    tokens: np.ndarray
    lengths: list[int]
    data: int

    def largest(self, logits: np.ndarray) -> float:
        """The largest magnitude in `[rows, T, V]` before the padding."""
        rows = zip(logits, self.lengths, strict=True)
        return max(float(np.abs(row[:n]).max()) for row, n in rows)


def prove(pairs: words.Pairs) -> list[str]:
    """Proves a run, writes its certificate and prints it.

    Returns:
      One sentence for each thing that is not as it was trained; none for a run that is proved.

    Raises:
      InputError: there is nothing to prove, or nothing to prove it with.
    """
    given = words.parse(pairs, "prove", _KEYS, foreign=_FOREIGN)
    if "run" not in given:
        raise InputError("expected run=DIR, the folder of a run")
    reference.require("torch", "transformers", "peft")
    overrides = [f"{key}={given[key]}" for key in _BASE if key in given]
    run = trained.read(given["run"], overrides)
    found = _Proof(run, given.get("tolerance", 1e-4), given.get("limit_gb", 8.0)).certificate()
    certificate.write(run.folder, found)
    print(certificate.summary(found), end="", flush=True)
    return found["problems"]


class _Proof:
    """One run under proof; `problems` grows as its parts are looked at."""

    def __init__(self, run: Trained, tolerance: float, limit_gb: float) -> None:
        self.run, self.tolerance = run, tolerance
        self.problems: list[str] = []
        self.adapter = _existing(run.folder / "adapter") if run.lora else None
        self.merged = _existing(run.folder / "merged")
        if not self.adapter and not self.merged:
            raise InputError(
                f"{run.folder} has neither adapter/ nor merged/, which a run writes at its end; "
                "give its command again to go on"
            )
        if self.adapter and run.recipe.model.init == "random":
            raise InputError(
                f"{run.folder}: its base was drawn at random (model.init=random) and lies nowhere, "
                "so there is nothing that PEFT could load the adapter on"
            )
        _check_size(run, limit_gb)

    def certificate(self) -> dict[str, Any]:
        run, config, pairs = self.run, None, {}
        if self.adapter:
            config = read_json(self.adapter / CONFIG_FILE)
            pairs = self._compare_files(self.adapter)
        elif self.merged and run.step is not None:
            weights = flat_arrays(unflatten(run.weights))
            family = run.model.family
            self.problems += merged.compare_trained(self.merged, family, run.leaves, weights)
        rows = _rows(run)
        adapter = merge = None
        if not self.problems:
            ours = self._our_logits(rows.tokens)
            if self.adapter:
                adapter = self._by_peft(self.adapter, rows, ours, pairs)
            merge = self._by_merging(rows, ours, pairs)
        loads = self._loads(config, pairs)
        takes = bool(loads) and loads["vllm"]["loads"]
        return {
            "passed": not self.problems,
            "problems": self.problems,
            "run": str(run.folder),
            "base": run.source.base_name,
            "revision": run.source.commit,
            "model_type": run.model_type,
            "step": run.step,
            "compared_with": reference.versions(),
            "rows": {"fixed": _ROWS, "data": rows.data, "length": rows.tokens.shape[1]},
            "adapter": adapter,
            "merge": merge,
            "loads": loads,
            "vllm_serve": None
            if self.problems
            else serving.vllm_command(config, run.folder / "adapter", self.merged, takes=takes),
        }

    def _compare_files(self, folder: Path) -> adapters.Pairs:
        try:
            pairs, problems = adapters.compare(folder, self.run)
        except InputError as error:
            self.problems.append(str(error))
            return {}
        self.problems += problems
        return pairs

    def _our_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of what was trained, computed here in float32."""
        run = self.run
        if run.lora is None:
            assert self.merged is not None
            model = _load(Source(self.merged, None, None), run)
        else:
            model = _load(run.source, run)
            if run.step is None:
                assert self.adapter is not None
                model = build.with_adapter(model, self.adapter)
            else:
                model = trained.with_weights(add_lora(model, run.lora), run.weights)
        graphdef, state = nnx.split(model)

        @jax.jit
        def call(state: Any, tokens: Any) -> Any:
            return nnx.merge(graphdef, state, copy=True)(tokens)

        return np.asarray(call(state, tokens), np.float32)

    def _by_peft(
        self, folder: Path, rows: _Rows, ours: np.ndarray, pairs: adapters.Pairs
    ) -> dict[str, Any] | None:
        try:
            loaded = reference.load_adapter(self.run.source.folder, folder, rows.tokens, pairs)
        except InputError as error:
            self.problems.append(str(error))
            return None
        self.problems += loaded.problems
        error = rows.largest(loaded.logits - ours)
        self._check_logits("PEFT, with adapter/,", error, rows.largest(ours))
        return {
            "max_logit_error": error,
            "allowed": self._allowed(rows.largest(ours)),
            "effect": rows.largest(loaded.logits - loaded.base_logits),
            "max_update_error": loaded.max_update_error,
            "parameters_changed": loaded.parameters,
        }

    def _by_merging(
        self, rows: _Rows, ours: np.ndarray, pairs: adapters.Pairs
    ) -> dict[str, Any] | None:
        run = self.run
        if run.recipe.model.init == "random":
            return None
        family, base = run.model.family, run.source.folder
        changes = merged.compare(base, self.merged, family, pairs)
        self.problems += changes.problems
        found = dataclasses.asdict(changes)
        del found["problems"]
        found["parameters_changed"] = found.pop("parameters")
        if not pairs:
            found |= {"max_rounding": None, "update_lost": None}
        found |= {"written": self.merged is not None, "max_logit_error": None}
        if self.merged is not None:
            model, problems = reference.read_model(self.merged)
            self.problems += problems
            error = rows.largest(reference.logits_of(model, rows.tokens) - ours)
            found["max_logit_error"] = error
            if not found["max_rounding"] or found["max_rounding"] < 1e-6:
                self._check_logits("transformers, with merged/,", error, rows.largest(ours))
        return found

    def _allowed(self, largest: float) -> float:
        return self.tolerance * max(1.0, largest)

    def _check_logits(self, who: str, error: float, largest: float) -> None:
        allowed = self._allowed(largest)
        if not error <= allowed:
            self.problems.append(
                f"{who} computes logits that differ from ours by up to {error:.3g}; allowed is "
                f"{allowed:.3g}"
            )

    def _loads(self, config: Mapping[str, Any] | None, pairs: adapters.Pairs) -> dict[str, Any]:
        if config is None:
            return {}
        found = {"peft": _entry(self.problems, by="loaded")}
        against = serving.reasons_against(config, pairs, self.run.model_type)
        for server, reasons in against.items():
            found[server] = _entry([*reasons, *self.problems], by="rules")
        return found


def _entry(reasons: Sequence[str], *, by: str) -> dict[str, Any]:
    return {"loads": not reasons, "reasons": list(reasons), "by": by}


def _existing(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None


def _check_size(run: Trained, limit_gb: float) -> None:
    size = sum(nbytes(leaf.shape, np.dtype(np.float32)) for leaf in run.leaves) / 1e9
    if size > limit_gb:
        raise InputError(
            f"{run.source.base_name}: the base takes {size:.1f} GB in float32, over limit_gb="
            f"{limit_gb:g}; prove holds it about four times and cannot cut a smaller one yet: "
            "raise limit_gb where the memory is there"
        )


def _load(source: Source, run: Trained) -> Decoder:
    section, float32 = run.recipe.model, jnp.dtype(jnp.float32)
    options = DecoderOptions(
        dtype=float32,
        param_dtype=float32,
        scan_layers=section.scan_layers,
        param_scan_axis=section.param_scan_axis,
        remat=section.remat,
    )
    return build.load_weights(build.abstract_model(source, options), mesh=None)


def _rows(run: Trained) -> _Rows:
    """Fixed rows, drawn from the vocabulary, then the first rows of the data if they are there."""
    config = read_json(run.source.folder / "config.json")
    length = min(_LENGTH, max_positions(config) or _LENGTH)
    size = run.model.config.vocab_size
    fixed = np.random.default_rng(0).integers(0, size, (_ROWS, length))
    texts = []
    try:
        tokenizer = build_data.make_tokenizer(run.recipe, run.source, size)
        texts = [e.tokens[:length] for e in build_data.first_examples(run.recipe, tokenizer, _ROWS)]
    except InputError as error:
        print(f"the data's rows are left out: {error}", flush=True)
    tokens = np.zeros((_ROWS + len(texts), length), np.int32)
    tokens[:_ROWS] = fixed
    for row, text in zip(tokens[_ROWS:], texts, strict=True):
        row[: len(text)] = text
    return _Rows(tokens, [length] * _ROWS + [len(text) for text in texts], len(texts))
