# SPDX-License-Identifier: Apache-2.0
"""One fault at a time in the table of every family: each is found, and by name."""

import dataclasses
import itertools
from typing import Any

import pytest

from lora_tune.hf.table import bind
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.training.optim import decay_mask
from lora_tune.training.state import split_model

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,  # square: shapes alone cannot tell [in, out] from [out, in]
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
HYBRID: dict[str, Any] = {
    **SIZES,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
SPARSE_HYBRID = {n: v for n, v in (HYBRID | SHARED).items() if n != "intermediate_size"}
GEMMA4: dict[str, Any] = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 40,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", *["full_attention"] * 3],
    "global_head_dim": 8,
    "attention_bias": True,
}
# With every kind of parameter that the family has.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": SIZES | {"attention_bias": True}},
    "gemma3_text": SIZES | {"attention_bias": True, "sliding_window_pattern": 2},
    "gemma4": {"text_config": SIZES | GEMMA4},
    "gemma4_text": SIZES | GEMMA4,
    "llama": SIZES | {"attention_bias": True, "mlp_bias": True},
    "mistral": SIZES,
    "olmo_hybrid": HYBRID | {"attention_bias": True},
    "qwen2": SIZES,
    "qwen3": SIZES | {"attention_bias": True},
    "qwen3_5": {"text_config": HYBRID},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe": {"text_config": SPARSE_HYBRID},
    "qwen3_5_moe_text": SPARSE_HYBRID,
    "qwen3_moe": SIZES | EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_next": HYBRID | SHARED | {"mlp_only_layers": [1]},
}
SIDES = ("layer_rows", "top_rows")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    family = FAMILIES[request.param]
    return Decoder(family, family.read_config(CONFIGS[request.param]), DecoderOptions())


def used_rows(model):
    """(side, row) of the rows that this model has parameters for."""
    ours = {".".join(map(str, leaf.path)) for leaf in bind(model.family, model)}
    for side in SIDES:
        for row in getattr(model.family, side):
            if any(path == row.ours or path.endswith("." + row.ours) for path in ours):
                yield side, row


def faults(model, side, rows, named):
    """The error of the model with these rows, which has to contain every text of `named`."""
    with pytest.raises(ValueError, match="the table does not fit the model") as caught:
        bind(dataclasses.replace(model.family, **{side: tuple(rows)}), model)
    for text in named:
        assert text in str(caught.value)


def test_every_name_is_there_once(model):
    names = [name for leaf in bind(model.family, model) for name in leaf.names.ravel()]
    assert len(names) == len(set(names))
    assert len(list(used_rows(model))) > 10


def test_weight_decay_pulls_on_kernels_and_the_embedding_alone(model):
    """By the names that weights have in training, where norms, biases and rates must be known."""
    mask = decay_mask(split_model(model).trainable)
    assert len(mask) > 10
    for name, decays in mask.items():
        assert decays == (name.rpartition("/")[2] in ("kernel", "embedding")), name


def test_a_missing_row(model):
    for side, row in used_rows(model):
        rows = [other for other in getattr(model.family, side) if other != row]
        faults(model, side, rows, [f"{row.ours} has no row"])


def test_a_duplicated_row(model):
    for side, row in used_rows(model):
        again = dataclasses.replace(row, theirs=row.theirs + ".again")
        faults(model, side, [*getattr(model.family, side), row], [f"ours={row.ours!r}"])
        faults(model, side, [*getattr(model.family, side), again], [f"ours={row.ours!r}"])


def test_a_row_that_hits_two_parameters(model):
    """Two parameters that one tensor of the files would fill."""
    for side in SIDES:
        rows = [row for used, row in used_rows(model) if used == side]
        for first, second in itertools.pairwise(rows):
            both = [
                dataclasses.replace(row, theirs=first.theirs) if row == second else row
                for row in getattr(model.family, side)
            ]
            faults(model, side, both, [f"theirs={first.theirs!r}"])


def test_a_wrong_axis_order(model):
    kernels = 0
    for side, row in used_rows(model):
        if row.view != "transpose":
            continue
        kernels += 1
        wrong = [
            dataclasses.replace(other, view="identity") if other == row else other
            for other in getattr(model.family, side)
        ]
        faults(model, side, wrong, [row.ours, "[out, in]"])
    assert kernels >= 7
