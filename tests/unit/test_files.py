# SPDX-License-Identifier: Apache-2.0
"""Bounds on what is read of a model folder, and what its weights take."""

import numpy as np
import pytest
from hf_cases import random_tensors, tiny, write_folder
from safetensors.numpy import save_file

from lora_tune.errors import InputError
from lora_tune.hf.files import SINGLE, open_checkpoint, read_json, weights_size


def test_a_fused_tensor_of_countless_experts_is_one_unknown_tensor(tmp_path):
    save_file({"x.gate_up": np.zeros((2**16 + 1, 2, 1), np.float16)}, tmp_path / SINGLE)
    found = open_checkpoint(tmp_path, fused=[("gate_up", ("gate_proj", "up_proj"))])
    assert list(found.tensors) == ["x.gate_up"]


def test_a_json_file_that_no_model_has_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(10**8 + 1)
    with pytest.raises(InputError, match=r"config\.json: is larger than 100 MB"):
        read_json(path)


def test_only_the_weights_of_the_index_are_counted(tmp_path):
    folder = write_folder(tmp_path / "m", random_tensors(tiny()), shards=2)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / "consolidated.safetensors").write_bytes(b"0" * 99)
    assert weights_size(folder) == total
