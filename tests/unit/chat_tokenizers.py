# SPDX-License-Identifier: Apache-2.0
"""Small fast tokenizers, made when a test runs."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_DATA = Path(__file__).parents[1] / "data"
QWEN3_TEMPLATE = (_DATA / "qwen3_chat_template.jinja").read_text()
SMOLLM2_TEMPLATE = (_DATA / "smollm2_chat_template.jinja").read_text()
# In the manner of Llama 3: headers, trimmed contents, tools in the system message, calls as JSON.
LLAMA3_TEMPLATE = (_DATA / "llama3_style_chat_template.jinja").read_text()

CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)

CORPUS = ["What is it? It is 42.\n\n\n\nHello there, the answer is blue.\n\n" * 20]


@cache
def _bpe() -> str:
    """A byte-level BPE that has merges across line breaks, as Qwen's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def qwen(template: str | None = QWEN3_TEMPLATE, **options: str) -> PreTrainedTokenizerFast:
    """A tokenizer with Qwen's added tokens; by default with the real Qwen3 template."""
    backend = Tokenizer.from_str(_bpe())
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    plain = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | options
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def llama(template: str | None = LLAMA_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer that, as Llama's, puts <s> before every text by itself."""
    backend = Tokenizer.from_str(_bpe())
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def llama3(template: str | None = LLAMA3_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with Llama 3's special tokens, which puts the first before every text."""
    backend = Tokenizer.from_str(_bpe())
    begin, end = "<|begin_of_text|>", "<|eot_id|>"
    backend.add_special_tokens([begin, "<|start_header_id|>", "<|end_header_id|>", end])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=begin, eos_token=end, pad_token=end
    )
    tokenizer.chat_template = template
    return tokenizer
