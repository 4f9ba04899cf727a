# SPDX-License-Identifier: Apache-2.0
"""Sampling against the logits processors of transformers, greedy text against its `generate`."""

import json
from typing import Any

import engine_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import EVERYWHERE
from torch_models import (
    random_tokens,
    read_theirs,
    tokenizer,
    torch,
    transformers,
    write_checkpoint,
)

import lora_tune
from lora_tune.generation import sampling

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.parity,
    # peft 0.21 reads a property that transformers 5.24 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # peft 0.21 looks for pattern keys among modules only, and applies those of parameters.
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module"),
]

NEW = 64


def theirs_processed(logits: np.ndarray, prompt: np.ndarray, **settings: Any) -> np.ndarray:
    """The processors that `generate` itself makes of these settings, in its own order."""
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, **settings})
    mixin = transformers.GenerationMixin()
    mixin.config = transformers.PretrainedConfig()
    processors = mixin._get_logits_processor(config, prompt.shape[1], device="cpu")
    names = {type(p).__name__ for p in processors}
    assert len(names) == len([v for k, v in settings.items() if (k, v) != ("temperature", 1.0)])
    return processors(torch.tensor(prompt).long(), torch.tensor(logits)).numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {
            "temperature": 1.7,
            "top_k": 40,
            "top_p": 0.8,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
        },
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()),
)
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_processed_logits(settings: dict[str, Any], ties: bool) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (64, 300)).astype(np.float32)
    if ties:  # as bfloat16 has them
        logits = np.round(logits)
    prompt = rng.integers(0, 300, (64, 20))
    wanted = theirs_processed(logits, prompt, **settings)
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, prompt, True, axis=1)
    ours = sampling.make_sampling(**{"temperature": 1.0, **settings})
    found = np.asarray(jax.jit(sampling.process)(logits, ours, jnp.asarray(seen)))
    if ties:  # which of equally likely tokens top_p drops is torch's accident; how many is not
        found, wanted = np.sort(found), np.sort(wanted)
    np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def their_answer(model: Any, prompt: list[int], *, stops: list[int] | None = None) -> list[int]:
    """Greedy, alone, without a stop id at the end."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=0,
        )
    answer = out[0, len(prompt) :].tolist()
    return answer[:-1] if answer[-1] in (stops or ()) else answer


def our_answers(model: Any, prompts: list[Any], words: Any = None, **options: Any) -> list[Any]:
    return lora_tune.generate(model, words, prompts, max_new_tokens=NEW, **options)


PROMPTS = [random_tokens(n, seed=n).tolist() for n in (1, 5, 32, 70)]
STOPS = [2, 0]


@pytest.fixture(scope="module")
def nine_layers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two blocks of two stacks each, and a dense layer after them."""
    folder = write_checkpoint(tmp_path_factory.mktemp("nine"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOPS}))
    model, words = lora_tune.load_model(folder, dtype="float32")
    return model, words, read_theirs(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), model_type="llama", seed=1)
    model, words = lora_tune.load_model(folder, dtype="float32")
    return model, words, read_theirs(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["nine_layers", "llama"])
def test_greedy_answers_of_one_batch(request: pytest.FixtureRequest, family: str) -> None:
    model, _, theirs = request.getfixturevalue(family)
    wanted = [their_answer(theirs, prompt) for prompt in PROMPTS]
    assert our_answers(model, PROMPTS, stop_ids=[]) == wanted
    assert all(len(set(answer)) > 3 for answer in wanted), "answers that say something"


def test_texts_and_messages_stop_where_the_model_folder_says(nine_layers: Any) -> None:
    model, ours, theirs = nine_layers
    words = tokenizer()
    text, messages = "w9 w8 w30", [{"role": "user", "content": "w11 w40"}]
    chat = words.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    ids = [words(text)["input_ids"], chat, *PROMPTS[2:]]
    wanted = [their_answer(theirs, prompt, stops=STOPS) for prompt in ids]
    assert min(map(len, wanted)) < NEW, "one of them stops"
    decoded = [words.decode(answer, skip_special_tokens=True) for answer in wanted[:2]]
    assert our_answers(model, [text, messages, *PROMPTS[2:]], ours) == [*decoded, *wanted[2:]]


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    kinds = ["linear_attention", "full_attention", "full_attention"]
    folder = tmp_path_factory.mktemp("three")
    return write_checkpoint(folder, num_hidden_layers=3, layer_types=kinds, mlp_only_layers=[2])


@pytest.mark.slow
def test_a_long_prompt_read_in_chunks(three_layers: Any) -> None:
    theirs = read_theirs(three_layers)
    prompts = [random_tokens(600, seed=3).tolist(), [7]]
    model, _ = lora_tune.load_model(three_layers, dtype="float32", scan_layers=False)
    wanted = [their_answer(theirs, prompt) for prompt in prompts]
    assert our_answers(model, prompts, stop_ids=[]) == wanted


@pytest.mark.slow
def test_greedy_answers_with_an_adapter(three_layers: Any, tmp_path: Any) -> None:
    """Every kind of projection adapted; we read the adapter back, on their side is peft."""
    model, _ = lora_tune.load_model(three_layers, dtype="float32")
    lora = lora_tune.LoraConfig(r=3, lora_alpha=9, target_modules=EVERYWHERE)
    lora_tune.add_lora(model, lora)
    engine_cases.randomise_b(model, 0.3)
    lora_tune.save_adapter(model, tmp_path / "adapter")

    theirs = read_theirs(three_layers)
    before = [their_answer(theirs, prompt) for prompt in PROMPTS]
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    wanted = [their_answer(adapted, prompt) for prompt in PROMPTS]
    assert all(a != b for a, b in zip(wanted, before, strict=True))
    fresh, _ = lora_tune.load_model(three_layers, dtype="float32")
    lora_tune.load_adapter(fresh, tmp_path / "adapter")
    assert our_answers(fresh, PROMPTS, stop_ids=[]) == wanted
