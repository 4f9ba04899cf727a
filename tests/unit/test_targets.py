# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hf_cases import EVERYWHERE, leaves_of, tiny

from lora_tune.errors import InputError
from lora_tune.lora.config import LoraConfig, scaling
from lora_tune.lora.targets import adaptable_modules, resolve, stack_targets

NAMES = (
    "model.layers.0.linear_attn.out_proj",
    "model.layers.0.mlp.experts.0.gate_proj",
    "model.layers.0.mlp.experts.1.gate_proj",
    "model.layers.0.mlp.shared_expert.gate_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.self_attn.q_proj",
    "lm_head",
)


def chosen(**fields):
    return set(resolve(LoraConfig(**fields), NAMES))


def short(*numbers):
    return {NAMES[i] for i in numbers}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"target_modules": ["q_proj"]}, short(4, 6)),
        ({"target_modules": ["gate_proj"]}, short(1, 2, 3, 5)),
        ({"target_modules": ["shared_expert.gate_proj"]}, short(3)),
        ({"target_modules": ["mlp.gate_proj"]}, short(5)),
        ({"target_modules": ["1.self_attn.q_proj"]}, short(4)),
        ({"target_modules": ["lm_head"]}, short(7)),
        ({"target_modules": r".*q_proj"}, short(4, 6)),
        ({"target_modules": r".*\.experts\.\d+\..*"}, short(1, 2)),
        ({"target_modules": "all-linear"}, short(0, 1, 2, 3, 4, 5, 6)),
        ({"target_modules": "ALL-linear", "exclude_modules": ["q_proj"]}, short(0, 1, 2, 3, 5)),
        ({"target_modules": "all-linear", "exclude_modules": r".*mlp.*"}, short(0, 4, 6)),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, short(4)),
        ({"target_modules": ["q_proj"], "layers_to_transform": 11}, short(6)),
        ({}, short(0, 3, 4, 5, 6)),
    ],
)
def test_matching(fields, expected):
    assert chosen(**fields) == expected


def test_matching_is_that_of_peft():
    peft = pytest.importorskip("peft")
    check = __import__("peft.tuners.tuners_utils", fromlist=["x"]).check_target_module_exists
    for fields in (
        {"target_modules": ["q_proj", "0.gate_proj"]},
        {"target_modules": ["gate_proj"], "exclude_modules": ["shared_expert.gate_proj"]},
        {"target_modules": ["gate_proj", "q_proj"], "layers_to_transform": [0, 11]},
        {"target_modules": r"model\.layers\.1.*proj", "exclude_modules": r".*mlp\..*"},
    ):
        theirs = {n for n in NAMES if check(peft.LoraConfig(**fields), n)}
        assert chosen(**fields) == {n for n in theirs if n}, fields


def test_patterns_first_match_wins():
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "out_proj"],
        rank_pattern={"q_proj": 4, r"1\.self_attn\.q_proj": 2},
        alpha_pattern={r"layers\.11\..*": 6},
        use_rslora=True,
    )
    targets = resolve(config, NAMES)
    assert {n: (t.r, t.alpha) for n, t in targets.items()} == {
        NAMES[0]: (8, 16),
        NAMES[4]: (4, 16),
        NAMES[6]: (4, 6),
    }
    assert targets[NAMES[6]].scale == 6 / 2


def test_scaling_is_that_of_peft():
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    for rslora in (False, True):
        config = peft.LoraConfig(r=7, lora_alpha=3, target_modules=["0"], use_rslora=rslora)
        model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), config)
        theirs = model.base_model.model[0].scaling["default"]
        assert scaling(7, 3, rslora) == pytest.approx(theirs, rel=1e-15)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"target_modules": ["q_prj", "out_proj"]}, ["'q_prj'", "did you mean 'q_proj'?"]),
        ({"target_modules": ["q_prj", "k_prok"]}, ["'q_prj'", "'k_prok'", "self_attn.q_proj"]),
        ({"target_modules": r"q_proj"}, ["'q_proj' matches no module", "write [q_proj]"]),
        ({"target_modules": "q_proj,out_proj"}, ["write [q_proj, out_proj]"]),
        ({"target_modules": "q_prj"}, ["did you mean 'q_proj'?"]),
        ({"target_modules": ["q_proj"], "exclude_modules": ["v_proj"]}, ["exclude_modules"]),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, ["q_proj", "left"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, ["q_proj", "left"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 5]}, ["no layer [5]"]),
        ({"target_modules": ["q_proj"], "rank_pattern": {"out_proj": 4}}, ["rank_pattern"]),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"x": 4}}, ["alpha_pattern: 'x'"]),
    ],
)
def test_what_matches_nothing_is_an_error(fields, parts):
    with pytest.raises(InputError) as caught:
        chosen(**fields)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"target_modules": ["q_proj", "out_proj"], "layers_to_transform": [1, 5]},
            "layers_to_transform: the model has no layer [5], only 0 to 11",
        ),
        (
            {"target_modules": ["q_proj", "mlp.gate_proj"], "layers_to_transform": [0]},
            "target_modules: 'q_proj', 'mlp.gate_proj' matches no module among the layers and "
            "modules that are left; the model has",
        ),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ".*", "rank_pattern": {"q_proj": 2}},
            "exclude_modules leaves no module to adapt",
        ),
        (
            {"target_modules": ["q_prj"], "rank_pattern": {"q_proj": 2}},
            "target_modules: 'q_prj' matches no module (did you mean 'q_proj'?); the model has",
        ),
        (
            {"target_modules": "all-linear", "exclude_modules": ".*layers.*"},
            "no module is left to adapt",
        ),
    ],
)
def test_what_follows_from_a_problem_is_not_another_one(fields, said):
    with pytest.raises(InputError) as caught:
        chosen(**fields)
    assert str(caught.value).startswith(f"lora: {said}")


def test_the_defaults_follow_the_selected_layers():
    assert chosen(layers_to_transform=[0]) == short(0, 3)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"r": 0}, "r must be a whole number >= 1, got 0"),
        ({"r": True}, "got True"),
        ({"r": 2.0}, "got 2.0"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": "("}, "no regular expression"),
        ({"target_modules": "*proj"}, "in one, anything is .*, as in '.*proj'"),
        ({"target_modules": "all_linear"}, "'all_linear' is written all-linear"),
        ({"target_modules": ["all-linear"]}, "write it alone"),
        ({"exclude_modules": "all-linear"}, "leaves no module to adapt"),
        ({"layers_to_transform": []}, "layers_to_transform is empty"),
        ({"target_modules": [""]}, "names only"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern['q']"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern: '('"),
        ({"alpha_pattern": {"q": -1}}, "alpha_pattern['q']"),
        ({"layers_to_transform": [-1]}, "layers_to_transform"),
        ({"target_modules": "all-linear", "layers_to_transform": [1]}, "to be a list"),
    ],
)
def test_bad_settings_are_refused(fields, part):
    with pytest.raises(InputError) as caught:
        LoraConfig(**fields)
    assert part in str(caught.value)


def test_all_problems_are_named_at_once():
    with pytest.raises(InputError, match=r"r must .*; lora_alpha must .*; lora_dropout must"):
        LoraConfig(r=0, lora_alpha=0, lora_dropout=2)


def test_stacks_pad_to_their_largest_rank():
    leaves = leaves_of(tiny())
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=EVERYWHERE,
        exclude_modules=r"model\.layers\.1\..*",
        rank_pattern={r"layers\.4\..*": 6},
    )
    stacks = stack_targets(leaves, resolve(config, adaptable_modules(leaves)))
    linear = stacks["blocks", "runs", 0, "linear_attn", "out_proj", "kernel"]
    assert linear.r == 6
    assert linear.ranks.tolist() == [[4, 0, 4], [6, 4, 4]]
    np.testing.assert_allclose(linear.scales, [[2, 0, 2], [8 / 6, 2, 2]], rtol=1e-7)
    experts = stacks["blocks", "runs", 0, "mlp", "experts", "up_proj", "kernel"]
    assert experts.ranks.tolist() == linear.ranks.tolist()
    assert ("lm_head", "kernel") not in stacks


@pytest.mark.parametrize("field", [{"rank_pattern": {r"experts\.0\.up_proj": 2}}, {}])
def test_experts_of_a_layer_share_one_adapter(field):
    leaves = leaves_of(tiny())
    targets = r".*experts\.\d+\.up_proj" if field else r".*experts\.[01]\.up_proj"
    found = resolve(LoraConfig(target_modules=targets, **field), adaptable_modules(leaves))
    with pytest.raises(InputError, match="all routed experts of a layer take the same adapter"):
        stack_targets(leaves, found)
