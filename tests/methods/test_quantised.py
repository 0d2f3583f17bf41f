"""Weights quantised by other projects are read as the numbers that they stand for, computed here number by number."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_target
from family_helpers import make_eagle
from oracles.quantised_weights import CASES, GENERATOR, K, N, gptq
from safetensors.torch import load_file, save_file

from hf_hsdraft import AutoDrafter
from hf_hsdraft.cli._describe import describe
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint


def saved(folder, config, parts, pickled=False):
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", **config}))
    names = {part: f"a.weight{part}" if part.startswith("_") or not part else f"a.{part}" for part in parts}
    tensors = {names[part]: tensor for part, tensor in parts.items()}
    tensors |= {"norm.weight": torch.ones(3), "a.input_scale": torch.ones(1), "a.k_scale": torch.ones(1)}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return AnyCheckpoint.open(folder)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pickled", [False, True])
def test_a_quantised_weight_is_read_as_the_numbers_it_stands_for(tmp_path, name, pickled):
    GENERATOR.manual_seed(1)
    config, parts, right = CASES[name]()
    found = saved(tmp_path, config, parts, pickled)
    assert found.shapes == {"a.weight": (N, K), "norm.weight": (3,)}
    found.check_shapes(found.shapes)
    tensors = dict(found.tensors())
    assert tensors["a.weight"].dtype == torch.float32
    assert torch.allclose(tensors["a.weight"], right.float(), rtol=1e-6, atol=1e-6)
    assert dict(found.tensors(["a.weight"], torch.bfloat16))["a.weight"].dtype == torch.bfloat16


def test_scales_of_blocks_may_leave_a_rest_and_no_word_of_their_size(tmp_path):
    numbers, scale = torch.ones(200, 300).to(torch.float8_e4m3fn), torch.arange(1.0, 7.0).view(2, 3)
    tensor = dict(saved(tmp_path, {}, {"": numbers, "_scale_inv": scale}).tensors())["a.weight"]
    for row, column in ((0, 0), (127, 127), (128, 128), (199, 255), (199, 256), (0, 299)):
        assert tensor[row, column] == scale[row // 128, column // 128]


def test_a_fused_weight_of_experts_has_scales_of_blocks_too(tmp_path):
    numbers, scale = torch.ones(2, 4, 8).to(torch.float8_e4m3fn), torch.arange(1.0, 9.0).view(2, 2, 2)
    config = {"quantization_config": {"weight_block_size": [2, 4]}}
    tensor = dict(saved(tmp_path, config, {"": numbers, "_scale_inv": scale}).tensors())["a.weight"]
    assert tensor[1, 3, 7] == 8 and tensor[0, 1, 4] == 2 and tensor[1, 0, 0] == 5


def test_a_quantisation_that_is_copied_from_a_target_changes_nothing(tmp_path):
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert torch.equal(dict(saved(tmp_path, config, {"": torch.full((2, 2), 0.3)}).tensors())["a.weight"][0, :1],
                       torch.tensor([0.3]))  # fmt: skip


@pytest.mark.parametrize(
    ("method", "parts", "told"),
    [
        ("bitsandbytes of 8 bits", {"": torch.ones(8, 4).char(), ".SCB": torch.ones(2)}, "bitsandbytes"),
        ("bitsandbytes", {"": torch.ones(8, 1).byte(), "_absmax": torch.ones(2)}, "bitsandbytes"),
        ("hqq", {"": torch.ones(8, 4).byte()}, "quantised by hqq"),
        (None, {"": torch.ones(8, 4).char()}, "quantised by an unknown method"),
        ("gptq", gptq(4)()[1], r"quantised by gptq \(a.qweight\): expected one of fp8 with scales of blocks"),
    ],
)
def test_an_unknown_quantisation_is_named(tmp_path, method, parts, told):
    config = {"quantization_config": {"quant_method": method, "bits": 3}}
    with pytest.raises(ValueError, match=f"is {told}|{told}.*before quantisation"):
        saved(tmp_path, config, parts).check_shapes({"a.weight": (8, 4), "norm.weight": (3,)})


def test_parts_that_do_not_fit_are_named(tmp_path):
    parts = {"": torch.ones(N, K).to(torch.float8_e4m3fn), "_scale": torch.ones(7, 1)}
    with pytest.raises(ValueError, match=r"a.weight cannot be dequantised as 8 bits with scales.*do not divide"):
        list(saved(tmp_path, {}, parts).tensors())


def test_a_quantised_drafter_drafts_with_the_numbers_it_stands_for(tmp_path):
    target = make_target(num_hidden_layers=6)
    make_eagle(target).save_pretrained(tmp_path)
    path, right = tmp_path / "model.safetensors", {}
    stored = load_file(path)
    for name, weight in list(stored.items()):
        if weight.dim() == 2:
            scale = weight.abs().amax(dim=1, keepdim=True) / 448
            stored[name], stored[f"{name}_scale"] = (weight / scale).to(torch.float8_e4m3fn), scale
            right[name] = stored[name].float() * scale
    save_file(stored, path)
    drafter = AutoDrafter.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(drafter.state_dict()[name], weight) for name, weight in right.items()) and len(right) > 7
    assert "quantised: 8 bits with scales" in describe(str(tmp_path))["drafter"]["weights"]
    call = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(**call, assistant_model=drafter), target.generate(**call))
