# SPDX-License-Identifier: Apache-2.0
"""Operations that training a token of a model asks for, whatever a program makes of it.

For each token (2 operations a multiply-add; backward passes to inputs and to weights cost what the
forward pass does):

* weights of projections, of convolutions, of the router and of the head: 6 for each that is
  trained, 4 for each that is frozen, since its own gradient is not asked for. Of routed experts
  counts the share that a token is sent to. Embeddings are looked up, which is no product.
* attention: 12 x heads x head width for each token that a token sees. Masked pairs, other documents
  of a row and what is outside a window do not count.
* the gated delta rule: 18 x value heads x key width x value width, the three products of its
  recurrence with the state (`lora_tune.layers.delta_net`); those of its chunked form are more.

The 6 are those of Kaplan et al. (arXiv 2001.08361, section 2.1), the 12 those of Chowdhery et al.
(arXiv 2204.02311, appendix B), there without a causal mask. What is computed again for the backward
pass, padding, and rows that an exchange of experts leaves empty count nothing, norms neither.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from lora_tune.hf.table import bind
from lora_tune.models.decoder import Decoder
from lora_tune.training.state import SplitModel

_TRAINED, _FROZEN = 6.0, 4.0
_PRODUCTS = ("kernel", "kernel_lora_a", "kernel_lora_b")
_ATTENTION = re.compile(r"layers\.(\d+)\.self_attn\.o_proj\.")
_DELTA = re.compile(r"layers\.(\d+)\.linear_attn\.(o|out)_proj\.")


def flops_per_token(model: Decoder, split: SplitModel, lengths: np.ndarray) -> float:
    """Operations of a training step for each of its tokens, padding left out.

    Args:
      model: for its configuration and the names of its layers.
      split: its weights, trained and frozen.
      lengths: tokens of every document, int [documents]: what attention sees depends on them.
    """
    weights = _TRAINED * _weights(model, split, split.trainable)
    weights += _FROZEN * _weights(model, split, split.frozen)
    return weights + 3.0 * _mixing(model, lengths)


def _weights(model: Decoder, split: SplitModel, names: Mapping[str, Any]) -> float:
    """Weights that a token is multiplied with."""
    config, total = model.config, 0.0
    for name, array in names.items():
        head = name.endswith("/embedding") and config.tie_word_embeddings
        if head or name.rsplit("/", 1)[-1] in _PRODUCTS:
            routed = "expert" in split.axes[name]
            total += array.size * (config.num_experts_per_tok / config.num_experts if routed else 1)
    return total


def _mixing(model: Decoder, lengths: np.ndarray) -> float:
    """Operations of a forward pass for each token that mix it with others, all layers together."""
    config, total = model.config, 0.0
    for leaf in bind(model.family, model):
        for name in map(str, leaf.names.flat):
            if found := _ATTENTION.search(name):
                sliding = config.layer_types[int(found[1])] == "sliding_attention"
                window = config.sliding_window if sliding else None
                total += 4.0 * leaf.hf_shape[-1] * _seen(lengths, window)
            elif _DELTA.search(name):
                total += 6.0 * leaf.hf_shape[-1] * config.linear_key_head_dim
    return total


def _seen(lengths: np.ndarray, window: int | None) -> float:
    """Tokens that a token attends to on average, itself included."""
    lengths = lengths.astype(np.float64)
    inside = lengths if window is None else np.minimum(lengths, window)
    pairs = inside * (inside + 1) / 2 + (lengths - inside) * inside
    return float(pairs.sum() / max(lengths.sum(), 1.0))
