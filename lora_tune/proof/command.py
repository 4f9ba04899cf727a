# SPDX-License-Identifier: Apache-2.0
"""The command `prove`: from a run folder to its certificate."""

import contextlib
import dataclasses
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_tune import build_data, run_lock, trained, words
from lora_tune.errors import InputError
from lora_tune.export import write
from lora_tune.hf.adapters import flat_arrays
from lora_tune.hf.files import read_json
from lora_tune.hf.header import nbytes
from lora_tune.hf.load import ignored_tensors, open_base
from lora_tune.hf.peft_config import Settings, read_config
from lora_tune.models.fields import max_positions
from lora_tune.proof import adapter as adapters
from lora_tune.proof import certificate, merged, reference, serving
from lora_tune.proof.cut import cut_adapter, cut_base
from lora_tune.proof.part import Part, Prover, Rows
from lora_tune.proof.windows import Window, measure, plan_windows
from lora_tune.trained import Trained
from lora_tune.training.state import unflatten

_BASE = {"model.path": str, "model.revision": str}
_KEYS = {"prove": {"run": str, "limit_gb": float, "tolerance": float, **_BASE}}
_FOREIGN = {"output_dir": "run", "recipe": "run", "path": "model.path", "model": "model.path"}
_ROWS, _LENGTH = 2, 80
_WINDOW = ".prove-"
"""How the folders begin that windows are cut into."""


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
    tolerance, limit_gb = (
        _above_zero(given, key, default)
        for key, default in (("tolerance", 1e-4), ("limit_gb", 8.0))
    )
    reference.require("torch", "transformers", "peft")
    overrides = [f"{key}={given[key]}" for key in _BASE if key in given]
    run = trained.read(given["run"], overrides)
    found = _Proof(run, tolerance, limit_gb).certificate()
    certificate.write(run.folder, found)
    print(certificate.summary(found), end="", flush=True)
    return found["problems"]


def _above_zero(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if not 0 < value < math.inf:
        raise InputError(f"{key} must be a finite number above 0, got {value:g}")
    return value


class _Proof:
    """One run under proof; `problems` grows as its parts are looked at."""

    def __init__(self, run: Trained, tolerance: float, limit_gb: float) -> None:
        self.run, self.tolerance, self.limit = run, tolerance, limit_gb * 1e9
        self.problems: list[str] = []
        self.adapter = _existing(run.folder / "adapter") if run.lora else None
        self.merged = _existing(run.folder / "merged")
        if not self.adapter and not self.merged:
            raise InputError(
                f"{run.folder} has neither adapter/ nor merged/, which a run writes at its end; "
                "give its command again to go on"
            )
        if run.lora and not self.adapter and run.step is None:
            raise InputError(
                f"{run.folder} has neither adapter/ nor a checkpoint, so nothing says what merged/ "
                "should be; bring one of them back, or train again into another output_dir"
            )
        if self.adapter and not self._has_base():
            raise InputError(
                f"{run.folder}: its base was drawn at random (model.init=random) and lies nowhere, "
                "so there is nothing that PEFT could load the adapter on"
            )
        self.windows, self.largest = self._plan()

    def _plan(self) -> tuple[list[Window | None], int]:
        """The windows, None for the whole base, and the bytes of the largest in float32."""
        run = self.run
        family, folder = run.model.family, run.source.folder
        carried = ignored_tensors(folder, family) if self._has_base() else ()
        whole = sum(nbytes(leaf.shape, np.dtype(np.float32)) for leaf in run.leaves)
        whole += measure((), carried).outside
        if whole <= self.limit:
            return [None], whole
        try:
            config = read_json(folder / "config.json")
            windows, largest = plan_windows(config, family, run.leaves, self.limit, carried)
        except InputError as error:
            raise InputError(f"{run.source.base_name}: {error}") from error
        return [*windows], largest

    def _has_base(self) -> bool:
        return self.run.recipe.model.init != "random"

    def certificate(self) -> dict[str, Any]:
        run, config, pairs = self.run, None, {}
        if self.adapter:
            with self._noted():
                pairs, problems = adapters.compare(self.adapter, run)
                config = self._served(read_config(self.adapter))
                self.problems += problems
        elif run.lora:
            pairs = adapters.trained_pairs(run)
        if self.merged:
            with self._noted():
                read_json(self.merged / "config.json")
                open_base(self.merged, run.model.family)
                if run.lora is None and run.step is not None:
                    weights = flat_arrays(unflatten(run.weights))
                    self.problems += merged.compare_trained(
                        self.merged, run.model.family, run.leaves, weights
                    )
        rows = _rows(run)
        adapter = merge = None
        if not self.problems:
            adapter, merge = self._compare_models(rows, pairs)
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
            "windows": self._described(),
            "adapter": adapter,
            "merge": merge,
            "loads": loads,
            "vllm_serve": None
            if self.problems
            else serving.vllm_command(config, run.folder / "adapter", self.merged, takes=takes),
        }

    def _served(self, settings: Settings) -> dict[str, Any]:
        """What servers read of an adapter's configuration, what it leaves out filled in."""
        return {
            "base_model_name_or_path": settings.base or self.run.source.base_name,
            "r": settings.r,
            "lora_alpha": settings.alpha,
            "use_rslora": settings.use_rslora,
            "rank_pattern": settings.rank_pattern,
        }

    def _described(self) -> dict[str, Any] | None:
        cut = [window for window in self.windows if window is not None]
        if not cut:
            return None
        experts = [len(window.experts) for window in cut if window.experts is not None]
        return {
            "count": len(cut),
            "layers": max(len(window.layers) for window in cut),
            "experts": max(experts, default=None),
            "largest_gb": self.largest / 1e9,
        }

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """What cannot be read of the run's own exports is a problem of the run, no wrong input."""
        try:
            yield
        except InputError as error:
            self.problems.append(str(error))

    def _compare_models(
        self, rows: Rows, pairs: adapters.Pairs
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        merge = self._merge(pairs)
        if self.merged and self.problems:
            return None, merge
        rounded = merge is not None and (merge["max_rounding"] or 0.0) >= 1e-6
        prover = Prover(self.run, rows, self.tolerance, exact=not rounded)
        with self._place() as whole:
            for number, window in enumerate(self.windows, start=1):
                if window is not None:
                    print(f"window {number} of {len(self.windows)}", file=sys.stderr, flush=True)
                with self._part(window, whole, pairs) as part:
                    prover.take(part)
        found = prover.found
        self.problems += found.problems
        if merge is not None:
            merge["max_logit_error"] = found.merged_error
        if found.adapter_error is None:
            return None, merge
        counts: dict[str, int] = {}
        for (name, _), count in found.parameters.items():
            counts[merged.kind_of(name)] = counts.get(merged.kind_of(name), 0) + count
        adapter = {
            "max_logit_error": found.adapter_error[0],
            "allowed": found.adapter_error[1],
            "effect": found.effect,
            "max_update_error": found.update_error,
            "parameters_changed": counts,
        }
        return adapter, merge

    @contextlib.contextmanager
    def _place(self) -> Iterator[Path | None]:
        """Keeps the run folder while windows are cut into it, without those of a killed proof.

        Yields the adapter that windows are cut from: that of the checkpoint where there is no
        other.
        """
        if self.windows == [None]:
            yield self.adapter
            return
        with run_lock.held(self.run.folder):
            for left in [*self.run.folder.glob(f"{_WINDOW}*")]:
                shutil.rmtree(left, ignore_errors=True)
            run = self.run
            if self.adapter or run.lora is None:
                yield self.adapter
                return
            with tempfile.TemporaryDirectory(prefix=_WINDOW, dir=run.folder) as folder:
                written = Path(folder) / "adapter"
                write.adapter(run.adapter_state(), run.leaves, run.lora, run.origin, written)
                yield written

    @contextlib.contextmanager
    def _part(
        self, window: Window | None, whole: Path | None, pairs: adapters.Pairs
    ) -> Iterator[Part]:
        """The whole base, or a window of it in a folder that is removed afterwards.

        `whole` is the adapter that windows are cut from.
        """
        run = self.run
        if window is None:
            yield Part(run.source.folder, self.adapter, self.adapter, self.merged, pairs)
            return
        family = run.model.family
        experts = getattr(run.model.config, "num_experts", 0)
        with tempfile.TemporaryDirectory(prefix=_WINDOW, dir=run.folder) as folder:
            base, adapter, merge = (Path(folder) / name for name in ("base", "adapter", "merged"))
            there = whole is not None and cut_adapter(whole, adapter, window, experts)
            if run.lora is not None and (there or self.merged is not None):
                cut_base(run.source.folder, base, family, window)
            if self.merged is not None:
                cut_base(self.merged, merge, family, window)
            yield Part(
                base,
                adapter if there else None,
                adapter if there and self.adapter else None,
                merge if self.merged is not None else None,
                {new: pair for name, pair in pairs.items() if (new := window.inside(name))},
                window,
            )

    def _merge(self, pairs: adapters.Pairs) -> dict[str, Any] | None:
        run = self.run
        if not self._has_base():
            return None
        family, base = run.model.family, run.source.folder
        changes = merged.compare(base, self.merged, family, pairs)
        self.problems += changes.problems
        found = dataclasses.asdict(changes)
        del found["problems"]
        found["parameters_changed"] = found.pop("parameters")
        if not pairs:
            found |= {"max_rounding": None, "update_lost": None}
        return found | {"written": self.merged is not None, "max_logit_error": None}

    def _loads(self, config: Mapping[str, Any] | None, pairs: adapters.Pairs) -> dict[str, Any]:
        if self.adapter is None:
            return {}
        wrong = ["see the problems"] if self.problems else []
        found = {"peft": _entry(wrong, by="loaded")}
        against = dict.fromkeys(serving.SERVERS, ())
        if config is not None:
            against = serving.reasons_against(config, pairs, self.run.model_type)
        for server, reasons in against.items():
            found[server] = _entry([*reasons, *wrong], by="rules")
        return found


def _entry(reasons: Sequence[str], *, by: str) -> dict[str, Any]:
    return {"loads": not reasons, "reasons": list(reasons), "by": by}


def _existing(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None


def _rows(run: Trained) -> Rows:
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
    return Rows(tokens, [length] * _ROWS + [len(text) for text in texts], len(texts))
