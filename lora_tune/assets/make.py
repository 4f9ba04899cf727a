# SPDX-License-Identifier: Apache-2.0
"""Write the data, the tokenizer and the configuration of the embedded model.

    python -m lora_tune.assets.make OUT

writes, always the same bytes:

    OUT/pretrain/{train,eval}.jsonl       the corpus that recipes/pretrain_tiny.yaml trains on
    OUT/quickstart/{train,eval}.jsonl     the Tali lessons, as shipped beside this file
    OUT/orders/{train,eval}.jsonl         the orders of recipes/smollm2_sft.yaml, shipped as well
    OUT/tiny-qwen3-next/                  config.json, generation_config.json and the tokenizer

The weights of the embedded model come from the pretraining recipe, not from this script.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from lora_tune.assets.conversations import Conversation, pretraining_corpus, tali_lessons
from lora_tune.assets.orders import orders
from lora_tune.assets.skills import LANGUAGES
from lora_tune.assets.words import SYLLABLES

PRETRAIN_COUNTS = {"train": 40_000, "eval": 400}
PRETRAIN_SEEDS = {"train": 1, "eval": 2}
QUICKSTART_COUNTS = (1000, 128)
QUICKSTART_SEED = 3
ORDER_COUNTS = (288, 64)
ORDER_SEED = 4
TOKENIZER_CONVERSATIONS = 8_000
SYLLABLE_DRILLS = 4_000
VOCAB_SIZE = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
MODEL_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 2048,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 128,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
TOKENIZER_CONFIG: dict[str, object] = {
    "add_prefix_space": False,
    "bos_token": None,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": TURN_END,
    "model_max_length": MODEL_CONFIG["max_position_embeddings"],
    "pad_token": END_OF_TEXT,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}
GENERATION_CONFIG: dict[str, object] = {
    "do_sample": False,
    "eos_token_id": [2, 0],
    "max_new_tokens": 64,
    "pad_token_id": 0,
}


def render(conversation: Conversation) -> str:
    """Write a conversation as the chat template does."""
    return "".join(
        f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n"
        for message in conversation["messages"]
    )


def tokenizer_texts() -> list[str]:
    """Choose the text that the tokenizer learns from.

    Syllables come first and often, so that they merge first, and conversations in the invented
    languages are left out: every invented word then reads as its syllables, known or new.
    """
    drill = " ".join(SYLLABLES) + "\n" + "\n".join(SYLLABLES) + "\n"
    corpus = pretraining_corpus(TOKENIZER_CONVERSATIONS, seed=PRETRAIN_SEEDS["train"])
    names = [language.name for language in LANGUAGES]
    texts = [text for text in map(render, corpus) if not any(name in text for name in names)]
    return [drill] * SYLLABLE_DRILLS + texts


def train_tokenizer(texts: Iterable[str], folder: Path) -> None:
    """Train a byte-level BPE of `VOCAB_SIZE` entries and save it with its template in `folder`.

    Every byte is an entry, so every text can be written and read back; digits stand alone.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    write_text(folder / "tokenizer_config.json", json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    write_text(folder / "chat_template.jinja", CHAT_TEMPLATE)


def write_text(path: Path, text: str) -> None:
    """Write a file through a neighbour that takes its name when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def write_jsonl(path: Path, rows: Sequence[Conversation]) -> None:
    """Write one conversation a line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def make_data(out: Path) -> None:
    """Write the pretraining corpus, the quickstart's lessons and the orders below `out`."""
    for split, count in PRETRAIN_COUNTS.items():
        corpus = pretraining_corpus(count, seed=PRETRAIN_SEEDS[split])
        write_jsonl(out / "pretrain" / f"{split}.jsonl", corpus)
    for name, (train, held_out) in (
        ("quickstart", tali_lessons(*QUICKSTART_COUNTS, seed=QUICKSTART_SEED)),
        ("orders", orders(*ORDER_COUNTS, seed=ORDER_SEED)),
    ):
        write_jsonl(out / name / "train.jsonl", train)
        write_jsonl(out / name / "eval.jsonl", held_out)


def make_model_folder(folder: Path) -> None:
    """Write the model's configuration and its tokenizer, trained on the head of the corpus."""
    write_text(folder / "config.json", json.dumps(MODEL_CONFIG, indent=2) + "\n")
    write_text(folder / "generation_config.json", json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    train_tokenizer(tokenizer_texts(), folder)


def main() -> None:
    """Write everything below the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Make the embedded model's data and tokenizer.")
    parser.add_argument("out", type=Path, help="folder to write to, created when missing")
    out: Path = parser.parse_args().out
    make_data(out)
    make_model_folder(out / "tiny-qwen3-next")


if __name__ == "__main__":
    main()
