# SPDX-License-Identifier: Apache-2.0
"""The embedded model's folder and conversation sets, as shipped and as generated."""

import json
import re
from pathlib import Path

import pytest
import transformers

from lora_tune import assets
from lora_tune.assets import make
from lora_tune.assets.conversations import Conversation, pretraining_corpus, tali_lessons
from lora_tune.assets.languages import RESERVED, TALI
from lora_tune.assets.words import NounPhrase, Sentence

ASSETS = Path(assets.__file__).parent
MODEL = ASSETS / "tiny-qwen3-next"
QUICKSTART = ASSETS / "quickstart"
CHAT = [
    {"role": "system", "content": "Put every answer in brackets."},
    {"role": "user", "content": "What is 3 + 14?"},
    {"role": "assistant", "content": "(17)"},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "(You are welcome!)"},
]
WRITTEN_CHAT = (
    "<|im_start|>system\nPut every answer in brackets.<|im_end|>\n"
    "<|im_start|>user\nWhat is 3 + 14?<|im_end|>\n"
    "<|im_start|>assistant\n(17)<|im_end|>\n"
    "<|im_start|>user\nThanks!<|im_end|>\n"
    "<|im_start|>assistant\n(You are welcome!)<|im_end|>\n"
)


def read_jsonl(path: Path) -> list[Conversation]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked_text(lesson: Conversation) -> str:
    """The English that a lesson asks for, without the wording of the question."""
    question = lesson["messages"][0]["content"]
    return re.sub(r"^.*?Tali[:?] ", "", question)


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def test_tali_follows_its_rules() -> None:
    cats = NounPhrase("cat", "small", plural=True)
    dog = NounPhrase("dog", None, plural=False)
    assert Sentence(cats, "see", dog).english() == "the small cats see the dog"
    assert TALI.sentence(Sentence(cats, "see", dog)) == "ya mirune piki kova dira"
    assert TALI.phrase(cats) == "ya mirune piki"
    assert Sentence(dog, "carry", cats).english(past=True) == "the dog carried the small cats"


def test_first_syllables_tell_tali_words_apart() -> None:
    assert len({word[:2] for word in TALI.lexicon.values()}) == len(TALI.lexicon) == 30


def test_corpus_is_decided_by_its_seed() -> None:
    assert pretraining_corpus(200, seed=1) == pretraining_corpus(200, seed=1)
    assert pretraining_corpus(200, seed=1) != pretraining_corpus(200, seed=2)


@pytest.mark.parametrize(("index", "split"), [(0, "train"), (1, "eval")])
def test_shipped_lessons_are_what_the_generator_makes(index: int, split: str) -> None:
    made = tali_lessons(*make.QUICKSTART_COUNTS, seed=make.QUICKSTART_SEED)[index]
    assert read_jsonl(QUICKSTART / f"{split}.jsonl") == made
    assert len(made) == make.QUICKSTART_COUNTS[index]


def test_no_held_out_text_is_taught() -> None:
    taught = [asked_text(lesson) for lesson in read_jsonl(QUICKSTART / "train.jsonl")]
    held_out = [asked_text(lesson) for lesson in read_jsonl(QUICKSTART / "eval.jsonl")]
    assert not set(taught) & set(held_out)
    assert len(set(taught)) == len(taught)
    assert len(set(held_out)) == len(held_out)
    assert all(text.startswith("the ") for text in [*taught, *held_out])


def test_every_tali_word_is_taught_often() -> None:
    lessons = read_jsonl(QUICKSTART / "train.jsonl")
    taught = " ".join(lesson["messages"][1]["content"] for lesson in lessons)
    counts = {word: len(re.findall(word, taught)) for word in TALI.lexicon.values()}
    assert min(counts.values()) >= 40, counts


def test_pretraining_never_speaks_tali() -> None:
    corpus = pretraining_corpus(5000, seed=make.PRETRAIN_SEEDS["train"])
    words = set(re.findall(r"[a-z]+", " ".join(map(make.render, corpus)).lower()))
    assert len(words) > 1000
    assert not words & RESERVED
    assert {"tali", "mirune"} <= RESERVED


def test_shipped_settings_are_what_the_generator_makes(tmp_path: Path) -> None:
    make.make_model_folder(tmp_path)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (MODEL / name).read_text() == (tmp_path / name).read_text(), name
    assert (MODEL / "chat_template.jinja").read_text() == make.CHAT_TEMPLATE
    first = (tmp_path / "tokenizer.json").read_bytes()
    assert len(json.loads(first)["model"]["vocab"]) == make.VOCAB_SIZE
    make.make_model_folder(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == first


def test_tokenizer_writes_any_text_and_reads_it_back(tokenizer) -> None:
    text = "Der Fluß: 東京, 1234  spaces\n\ttab, ya mirune piki! <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == make.VOCAB_SIZE == make.MODEL_CONFIG["vocab_size"]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == specials
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)


def test_unknown_words_read_as_their_syllables(tokenizer) -> None:
    assert tokenizer.tokenize(" mirune") == ["Ġmi", "ru", "ne"]
    for word in TALI.lexicon.values():
        assert tokenizer.tokenize(f" {word}") == [f"Ġ{word[:2]}", word[2:]]


def test_template_writes_chatml_and_every_prefix_is_a_prefix(tokenizer) -> None:
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == WRITTEN_CHAT
    assert make.render({"messages": CHAT}) == WRITTEN_CHAT
    whole = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    for turn, message in enumerate(CHAT[1:], start=1):
        answers_next = message["role"] == "assistant"
        ids = tokenizer.apply_chat_template(
            CHAT[:turn], add_generation_prompt=answers_next, return_dict=True
        )["input_ids"]
        assert len(ids) > 0
        assert whole[: len(ids)] == ids


@pytest.mark.parity
def test_configuration_is_a_small_qwen3_next() -> None:
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.from_pretrained(MODEL, local_files_only=True)
    assert type(config).__name__ == "Qwen3NextConfig"
    assert config.layer_types.count("full_attention") == 2
    assert len(config.layer_types) == 8
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == "Qwen3NextForCausalLM"
    assert 2 * sum(parameter.numel() for parameter in model.parameters()) < 8e6


def test_assets_stay_small() -> None:
    sizes = {path: path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()}
    weights = sum(size for path, size in sizes.items() if path.suffix == ".safetensors")
    lessons = sum(size for path, size in sizes.items() if path.suffix == ".jsonl")
    assert weights <= 8_000_000
    assert 0 < lessons < 300_000
    settings = [path for path in MODEL.iterdir() if path.suffix != ".safetensors"]
    assert sum(sizes[path] for path in settings) < 150_000
