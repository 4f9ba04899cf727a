# SPDX-License-Identifier: Apache-2.0
"""The command `convert-adapter`: routed experts of an adapter from one layout to another."""

from pathlib import Path

from lora_tune import build, words
from lora_tune.errors import InputError
from lora_tune.hf.folder import check_apart, check_replaceable
from lora_tune.hf.header import read_header
from lora_tune.hf.hub import Source
from lora_tune.hf.peft import WEIGHTS_FILE, adapter_arrays, load_adapter, save_adapter
from lora_tune.hf.peft_config import CONFIG_FILE, PARAMETER_TYPES, read_config, split_expert
from lora_tune.hf.table import bind
from lora_tune.lora.targets import adaptable_modules, resolve
from lora_tune.models.decoder import DecoderOptions

LAYOUTS = ("per-expert", "fused")
_BASE = {"model.path": str, "model.revision": str}
_KEYS = {"convert-adapter": {"from": str, "to": str, "layout": str, **_BASE}}
_FOREIGN = {"adapter": "from", "in": "from", "out": "to", "format": "layout", "base": "model.path"}


def convert(pairs: words.Pairs) -> None:
    """Reads an adapter in any layout and writes it to `to=` in that of `layout=`.

    Raises:
      InputError: the words or folders are not what they must be, a tensor of the adapter is unknown
        or missing, or PEFT does not read the layout for this type of model.
    """
    given = words.parse(pairs, "convert-adapter", _KEYS, foreign=_FOREIGN)
    missing = [f"{key}=" for key in ("from", "to", "layout") if key not in given]
    if missing:
        raise InputError(f"convert-adapter lacks {' and '.join(missing)}; see lora-tune --help")
    layout, old, new = given["layout"], Path(given["from"]), Path(given["to"])
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if not (old / CONFIG_FILE).is_file():
        inside = old / "adapter"
        hint = f"; did you mean from={inside}?" if (inside / CONFIG_FILE).is_file() else ""
        raise InputError(f"{old} holds no adapter: there is no {CONFIG_FILE} in it{hint}")
    config = read_config(old)
    base, revision = config.base, config.revision
    model = build.abstract_model(_base(given, base, revision), DecoderOptions())
    leaves = bind(model.family, model)
    assert model.origin is not None  # build gave it one
    model_type = model.origin.model_type
    if layout == "per-expert" and model_type in PARAMETER_TYPES:
        raise InputError(
            f"layout=per-expert: PEFT reads adapters on experts of {model_type} in the fused "
            "layout alone; use layout=fused"
        )
    check_apart(new, old)
    check_replaceable(new, kind="adapter")
    lora, adapters = load_adapter(old, leaves, model_type=model_type, named=True)
    modules = list(resolve(lora, adaptable_modules(leaves)))
    routed = sum(split_expert(module) is not None for module in modules)
    if not routed:
        raise InputError(f"{old} adapts no routed experts, and layouts differ in nothing else")
    save_adapter(
        adapter_arrays(adapters),
        leaves,
        lora,
        new,
        model_type=model_type,
        base=base or model.origin.base_name,
        revision=revision,
        allow_untrained=True,
        fused=layout == "fused",
    )
    counts = [len(read_header(folder / WEIGHTS_FILE)[0]) for folder in (old, new)]
    print(
        f"wrote {new}: {len(modules)} modules, {routed} of them projections of routed experts; "
        f"{counts[0]} tensors became {counts[1]}"
    )


def _base(given: dict[str, str], named: str | None, revision: str | None) -> Source:
    """The base model's configuration: that of `model.path`, or the one that the adapter names."""
    path = given.get("model.path", named)
    if not path:
        raise InputError(f"{CONFIG_FILE} names no base model; give it with model.path=PATH")
    at = given.get("model.revision", None if "model.path" in given else revision)
    with build.said_of("model.path"):
        return build.find_source(path, revision=at, weights=False)
