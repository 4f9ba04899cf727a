# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints as transformers writes them, and the logits of both sides."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # for models this small, handing out work takes 20 times the work

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "?")
VOCAB = 48
# Every kind of projection in both kinds of layer; two full repetitions of the cycle, then a rest.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "num_experts": 6,
    "mlp_only_layers": [8],
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": False,
}

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-4,
}
TINY_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
EXPERTS = (*TINY_MOE, "shared_expert_intermediate_size", "mlp_only_layers")
TINY_DENSE_HYBRID = {name: value for name, value in TINY.items() if name not in EXPERTS}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
TINY_SPARSE_HYBRID = {
    name: value for name, value in TINY.items() if name not in ("intermediate_size", *EXPERTS[-1:])
}
TINY_GEMMA4 = TINY_LLAMA | {
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": VOCAB,
    "head_dim": 12,
    "global_head_dim": 20,
}
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "position_embedding_size": 16,
    "patch_size": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TINY_LLAMA, "vision_config": SIGLIP},
    "gemma4": {"text_config": TINY_GEMMA4, "vision_config": GEMMA4_VISION, "audio_config": None},
    "gemma4_text": TINY_GEMMA4,
    "qwen3_next": TINY,
    **dict.fromkeys(("gemma3_text", "llama", "mistral", "qwen2", "qwen3"), TINY_LLAMA),
    "qwen3_moe": TINY_LLAMA | TINY_MOE,
    "olmo_hybrid": {
        **{name: value for name, value in TINY_DENSE_HYBRID.items() if name != "head_dim"},
        **{"num_hidden_layers": 5, "pad_token_id": None, "eos_token_id": 2},
        # With 1e-4, float32 in transformers is off by 1e-4 from what float64 gives there.
        "rms_norm_eps": 1e-2,
    },
    "qwen3_5_text": TINY_DENSE_HYBRID,
    "qwen3_5_moe_text": TINY_SPARSE_HYBRID,
    "qwen3_5_moe": {"text_config": TINY_SPARSE_HYBRID, "vision_config": VISION},
    "qwen3_5": {"text_config": TINY_DENSE_HYBRID, "vision_config": VISION},
}
ZERO_CENTRED = ("gemma3", "qwen3_next", "qwen3_5")
"""How the names of families begin whose norms scale by 1 + weight."""


def write_checkpoint(
    folder: Path, *, model_type: str = "qwen3_next", seed: int = 0, **changes: Any
) -> Path:
    """A checkpoint in which no weight has the value that training starts from."""
    fields = FAMILIES[model_type]
    made = transformers.AutoModelForCausalLM
    if "text_config" in fields:
        made = transformers.AutoModelForImageTextToText
        fields = fields | {"text_config": fields["text_config"] | changes}
        changes = {name: changes[name] for name in ("tie_word_embeddings",) if name in changes}
    config = transformers.AutoConfig.for_model(model_type, **(fields | changes))
    model = made.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    plain_norms = not model_type.startswith(ZERO_CENTRED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = _draw(name, tuple(parameter.shape), generator)
            parameter.copy_(1.0 + drawn if plain_norms and "norm" in name else drawn)
        if config.tie_word_embeddings:
            # Rows of the embedding are longer than those of a head: keep the logits around 1.
            text = getattr(model.model, "language_model", model.model)
            text.norm.weight.sub_(0.8)
    model.save_pretrained(folder)
    if model_type == "olmo_hybrid":
        split_convolutions(folder, model)
    tokenizer().save_pretrained(folder)
    return folder


def split_convolutions(folder: Path, model: Any) -> None:
    """Cuts convolutions where queries, keys and values meet, as published files have them.

    transformers 5.24 cuts them into three equal parts.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, module in model.named_modules():
        if name.endswith(".linear_attn"):
            parts = module.conv1d.weight.detach().split(
                [module.key_dim, module.key_dim, module.value_dim]
            )
            named = zip("qkv", parts, strict=True)
            tensors |= {f"{name}.{side}_conv1d.weight": part.clone() for side, part in named}
    save_file(tensors, path, {"format": "pt"})


def _draw(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        # From a memory of hundreds of tokens to one of less than one.
        return torch.linspace(-5.0, 1.5, *shape) + 0.1 * noise
    if name.endswith(".bias"):
        return 0.5 * noise
    if name.endswith("dt_bias") or "embed_tokens" in name:
        return noise
    if "linear_attn.norm" in name:
        return 1.0 + 0.3 * noise
    if "norm" in name:
        return 0.3 * noise
    if "conv1d" in name:
        # The first channels are queries: some are so short that the epsilon of their norm counts.
        return noise * torch.logspace(-2, 0, shape[0])[:, None, None]
    return noise * shape[-1] ** -0.5


def tokenizer() -> Any:
    """One token a word."""
    words = {word: i for i, word in enumerate(WORDS)}
    words |= {f"w{i}": i for i in range(len(WORDS), VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATE
    return made


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets fields of `config.json`; None removes a field."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def read_theirs(folder: Path) -> Any:
    """The checkpoint in transformers, every tensor of it used and none made up."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def exact(theirs: Any) -> Any:
    """A model of theirs in float64: where rounding grows, the exact value counts, not theirs."""
    theirs.set_experts_implementation("eager")  # the others are of float32 alone
    return theirs.double()


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Around the use of an exact model: what it would cast to float32 stays in float64.

    In float32 the mask's least value of float64 is an infinity, and rows of padding become NaN.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        yield


def their_logits(model: Any, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    with torch.no_grad():
        attention_mask = None if mask is None else torch.tensor(mask).long()
        out = model(torch.tensor(tokens).long(), attention_mask=attention_mask, use_cache=False)
    return out.logits.numpy()


def our_logits(model: Any, tokens: np.ndarray, segment_ids: np.ndarray | None = None) -> np.ndarray:
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state: Any, tokens: Any, segment_ids: Any) -> Any:
        return nnx.merge(graphdef, state, copy=True)(tokens, segment_ids)

    return np.asarray(run(state, tokens, segment_ids))


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, shape).astype(np.int32)
