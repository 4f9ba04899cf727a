# SPDX-License-Identifier: Apache-2.0
"""What a model family supplies to the decoder, and where a model came from."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flax import nnx

from lora_tune.cache import LayerCache
from lora_tune.hf.table import Row
from lora_tune.layers.norms import RMSNorm


class Config(Protocol):
    """What the decoder reads of a family's configuration; fields of frozen dataclasses."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    tie_word_embeddings: bool

    def layer_kinds(self) -> Sequence[Hashable]:
        """The kind of every layer; equal kinds have equal parameter trees."""
        ...


def _one(config: Any) -> float:
    return 1.0


def _none(*_: Any, **__: Any) -> None:
    return None


def _nothing(config: Any) -> tuple[()]:
    return ()


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family: how to read its configuration, build a layer and name its tensors.

    Attributes:
      read_config: Hugging Face `config.json` as a dict -> configuration; raises InputError naming
        a field that asks for something the family's layers do not do.
      make_layer: `(config, kind, dtype=) -> layer`, called as `layer(h, LayerInputs, entry)`; it
        returns the new `h` and the entry it wrote to, None for None; and third what `keeps` names.
      make_cache: `(config, kind, batch=, size=, dtype=) -> empty cache` of such a layer.
      keeps: `(config, kind) ->` the name that later layers find in `LayerInputs.kept` for what a
        layer of this kind returns third; None where it returns two things. Of each name there is
        one layer.
      make_layer_inputs: `(config, dtype=) -> module`, called as `module(tokens, h)` on embedded
        tokens; what it has for each layer, `[L, B, T, P]`, is their `LayerInputs.own`. None where
        there is no such module.
      unused: `config ->` further tensors as in `ignored`, which files of some models hold in vain.
      layer_rows, top_rows, ignored, renamed, fused, layer_prefix: see `lora_tune.hf.table`.
      make_norm: `(features, eps=, dtype=) -> norm` behind the last layer.
      embedding_scale: `config ->` what embeddings of tokens are multiplied by.
      logit_cap: `config ->` the bound that logits are bent to stay within, None for none.
      not_adaptable: layer paths of projections that never carry an adapter, e.g. routers.
      portable_config: a `config.json` -> the same with all that only lora_tune understands spelled
        out for other libraries; exports write it.
    """

    read_config: Callable[[Mapping[str, Any]], Any]
    make_layer: Callable[..., nnx.Module]
    make_cache: Callable[..., LayerCache]
    layer_rows: Sequence[Row]
    top_rows: Sequence[Row]
    ignored: Sequence[tuple[str, str]]
    keeps: Callable[[Any, Any], str | None] = _none
    make_layer_inputs: Callable[..., nnx.Module | None] = _none
    unused: Callable[[Any], Sequence[tuple[str, str]]] = _nothing
    make_norm: Callable[..., nnx.Module] = RMSNorm
    embedding_scale: Callable[[Any], float] = _one
    logit_cap: Callable[[Any], float | None] = _none
    not_adaptable: Sequence[str] = ()
    renamed: Sequence[tuple[str, str]] = ()
    fused: Sequence[tuple[str, Sequence[str]]] = ()
    layer_prefix: str = "model.layers.{i}."
    portable_config: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where a decoder came from: what exports copy and name.

    Attributes:
      model_type: of the Hugging Face configuration.
      folder: the checkpoint on this machine.
      base_name: hub id, or the folder where there is none.
      commit: of the hub id.
    """

    model_type: str
    folder: Path
    base_name: str
    commit: str | None
