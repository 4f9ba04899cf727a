# SPDX-License-Identifier: Apache-2.0
"""`lora-tune plan`: a recipe's step, compiled for devices and reported."""

import json

import pytest

from lora_tune import cli

TINY = {
    "model_type": "qwen3_next",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model folder that holds a configuration only."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def run(capsys, *words):
    """Exit status, output and complaint of `lora-tune plan`."""
    status = cli.main(["plan", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected one recipe=NAME"),
        (["recipe=quickstart"], "expected one topology=NAME"),
        (["recipe=quickstart", "topology=v5p-8", "topology=cpu"], "expected one topology=NAME"),
        (["recipe=quickstart", "topology=v5p8"], "did you mean v5p-8"),
        (["recipe=quickstart", "topology=cpu", "layers=0"], "layers must be an integer"),
        (["recipe=quickstart", "topology=cpu", "layers=99"], "layers=99: the model has"),
        (["recipe=quickstart", "topology=cpu", "slices=two"], "slices must be an integer"),
        (["recipe=quickstart", "topology=cpu", "lora.rank=8"], "lora.rank"),
        (["recipe=quickstart", "topology=cpu", "mesh.fsdp=99"], "train.batch_size"),
        (["recipe=quickstart", "topology=cpu", "data.max_length=999999"], "max_position"),
        (["recipe=quickstart", "topology=cpu", "model.remat=offload"], "which has no other"),
        (["recipe=quickstart", "topology=gpu"], "no such device here"),
        (["recipe=quickstart", "topology=cpu", "json=/no/such/folder/p.json"], "make it first"),
        (["recipe=quickstart", "topology=v5p-8,v6e-8", "hlo=a.txt"], "name one"),
        (["recipe=qwen3next_sft", "topology=cpu", "model.path=no/such/model"], "model.path"),
        (["recipe=quickstart", "topology=cpu", "lora.target_modules=[nothing]"], "nothing"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, said):
    status, _, complaint = run(capsys, *words)
    assert status == 2
    assert said in complaint
    assert complaint.count("\n") == 1
