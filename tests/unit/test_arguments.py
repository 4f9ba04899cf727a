# SPDX-License-Identifier: Apache-2.0
"""Arguments of another type, in Python: one sentence before anything is read or computed."""

from typing import Any

import pytest
from hf_cases import tiny

import lora_tune
from lora_tune.errors import InputError
from lora_tune.models.decoder import DecoderOptions

MODEL = tiny()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: lora_tune.add_lora(MODEL, {"r": 4}), "config is {'r': 4}, expected LoraConfig | "),
        (lambda: lora_tune.add_lora(MODEL, seed=2**32), "seed is 4294967296, expected at least 0"),
        (lambda: lora_tune.add_lora(MODEL, seed=1.5), "seed is 1.5, expected int"),
        (lambda: lora_tune.add_lora("base"), "model is 'base', expected Decoder"),
        (lambda: lora_tune.load_adapter((MODEL, 1), "a"), "expected Decoder"),
        (lambda: lora_tune.load_adapter(MODEL, None), "folder is None, expected str | Path"),
        (lambda: lora_tune.save_adapter("base", "a"), "model is 'base', expected Decoder"),
        (lambda: lora_tune.save_merged("base", "a"), "model is 'base', expected Decoder"),
        (lambda: lora_tune.load_model(5), "path is 5, expected str | Path"),
        (lambda: lora_tune.load_model("m", mesh=5), "mesh is 5, expected Mesh | None"),
        (lambda: lora_tune.load_model("m", scan_layers="no"), "scan_layers is 'no', expected bool"),
        (lambda: lora_tune.load_model("m", param_scan_axis="1"), "param_scan_axis is '1', exp"),
        (lambda: lora_tune.load_model("m", chat_template=5), "chat_template is 5, expected str"),
        (lambda: lora_tune.load_run(None), "folder is None, expected str | Path"),
        (lambda: DecoderOptions(param_scan_axis=9), "param_scan_axis is 9, expected 0 to 3"),
        (lambda: DecoderOptions(param_scan_axis=1, scan_layers=False), "0 where scan_layers is F"),
        (lambda: lora_tune.train("quickstart", "lora.r=4"), "overrides is 'lora.r=4', expected a"),
        (lambda: lora_tune.train("quickstart", {"lora.r": 4}), "overrides is {'lora.r': 4}, exp"),
        (lambda: lora_tune.train("quickstart", [4]), "overrides is [4], expected a list of texts"),
        (lambda: lora_tune.train({"lora": {}}), "recipe is {'lora': {}}, expected the path"),
    ],
)
def test_an_argument_of_another_type(call: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert said in str(caught.value)
