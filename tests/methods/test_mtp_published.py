"""Layers for multi-token prediction by their published names, in a target's files, quantised, and alone."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from oracles import mtp_alone_parity, mtp_blocks, mtp_parity
from oracles.plain_texts import padded
from oracles.tiny import VOCABULARY, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_hsdraft import AutoDrafter
from hf_hsdraft.cli._describe import describe
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base.auto_drafter import find
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Call
from hf_hsdraft.drafters.base.registry import Evidence, TargetInfo
from hf_hsdraft.methods.mtp.drafter import MtpDrafter
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint
from hf_hsdraft.methods.published.formats import recognise


@pytest.mark.parametrize("case", mtp_parity.CASES, ids=lambda case: case.name)
def test_layers_by_published_names_draft_as_the_formula(case):
    assert mtp_parity.parity(case).difference < 1e-4


@pytest.mark.parametrize("case", mtp_alone_parity.CASES, ids=lambda case: case.name)
def test_layers_of_speculators_draft_as_its_class(case):
    pytest.importorskip("speculators")
    found = mtp_alone_parity.parity(case)
    assert found.difference < 1e-4 and found.rejected


@pytest.mark.parametrize(
    "name",
    [
        "Step-3.7 layers",
        "GLM-5 layers",
        "MiMo-V2 layers",
        "EXAONE 4.5 layers",
        "LongCat-Flash layers",
        "Nemotron-H layers",
        "Inkling layers, two, the second with a window",
        "MiniMax-M3 layers",
        "GLM-5.3-Flash layers",
        "Qwen4-Exp layers",
    ],
)
def test_texts_with_published_layers_are_those_of_plain_decoding(name, tmp_path):
    case = next(case for case in mtp_parity.CASES if case.name == name)
    target, inputs = mtp_parity.published(case, tmp_path).target, padded(2 if case.in_batches else 1)
    call = {"max_new_tokens": 12, "do_sample": False}
    drafted = target.generate(**inputs, **call, assistant_model="mtp")
    assert drafted.tolist() == target.generate(**inputs, **call).tolist()
    for info in (TargetInfo.of_model(target, local_files_only=True), TargetInfo.of_name(str(tmp_path), "", True)):
        [found, *_], _ = find(info, local_files_only=True)
        assert found.kind == "MtpDrafter"


def test_layers_alone_in_their_files_draft_as_those_in_the_targets(tmp_path):
    case = next(case for case in mtp_parity.CASES if case.model_type == "deepseek_v3")
    target = mtp_parity.published(case, tmp_path / "target").target
    tensors = load_file(tmp_path / "target/model.safetensors")
    alone = {name.replace(".3.", ".0.", 1): each for name, each in tensors.items() if ".layers.3." in name}
    shared = ("embed_tokens.weight", "shared_head.head.weight")
    alone |= {f"model.layers.0.{name}": tensors["lm_head.weight"] for name in shared}
    folder = tmp_path / "nextn"
    folder.mkdir()
    save_file({name: each.clone() for name, each in alone.items()}, folder / "model.safetensors")
    config = {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1, "model_type": "deepseek_v3"}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    drafter = AutoDrafter.from_pretrained(folder, beam_width=3)
    inputs, call = padded(2), {"max_new_tokens": 12, "do_sample": False}
    drafted = target.generate(**inputs, **call, assistant_model=drafter)
    assert drafted.tolist() == target.generate(**inputs, **call).tolist()
    own = MtpDrafter.for_target(target).layers.model.layers.state_dict()
    read = drafter.session(Call(target, 1, DraftOptions.of(drafter)))._layers.model.layers.state_dict()
    assert own.keys() == read.keys() and all(torch.equal(own[name], read[name]) for name in own)
    drafter.check(torch.compile(target))
    checkpoint = AnyCheckpoint.open(folder)
    assert recognise(checkpoint).fit(checkpoint, TargetInfo.of_model(target), ()).evidence == Evidence.SIZES
    other = tiny_model(LlamaForCausalLM, tiny_config(LlamaConfig))
    with pytest.raises(DraftingRefused, match="these layers are of deepseek_v3, the target is llama: use layers or"):
        other.generate(**inputs, assistant_model=drafter)


@pytest.mark.parametrize(
    "left_out, told",
    [
        (".layers.3.", r"counts 1, but it was saved without .*original checkpoint, or use assistant_model=\"ngrams\""),
        ("eh_proj", r"missing: model\.layers\.3\.eh_proj\.weight$"),
    ],
)
def test_missing_tensors_have_the_names_of_the_files(left_out, told, tmp_path):
    case = next(case for case in mtp_parity.CASES if case.model_type == "deepseek_v3")
    mtp_parity.published(case, tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {name: each.clone() for name, each in load_file(path).items() if left_out not in name}
    save_file(kept, path, metadata={"format": "pt"})
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(DraftingRefused, match=told):
        target.generate(torch.ones(1, 4, dtype=torch.int64), assistant_model="mtp")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm5_next"])
def test_a_target_that_is_given_as_its_own_drafter_is_told_how_to_draft(model_type, tmp_path):
    case = next(case for case in mtp_parity.CASES if case.model_type == model_type)
    target = mtp_parity.published(case, tmp_path).target
    told = r"own prediction heads \(model\.\S*layers\..*load it as the target, and pass assistant_model=\"mtp\""
    with pytest.raises(ValueError, match=told):
        AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=told):
        target.generate(torch.ones(1, 4, dtype=torch.int64), assistant_model=str(tmp_path))
    shown = describe(str(tmp_path))["drafter"]
    assert shown["drafts here"] == "no" and "--drafter mtp" in shown["cannot be loaded"]
    assert shown["format"] == "target with layers for multi-token prediction"


def test_layers_that_nothing_here_computes_are_told_apart():
    config = tiny_config(type(AutoConfig.for_model("deepseek_v4")))
    target = tiny_model(AutoModelForCausalLM._model_mapping[type(config)], config)
    with pytest.raises(DraftingRefused, match="cache cannot be put back"):
        MtpDrafter.for_target(target)


def test_parts_whose_states_are_not_kept_by_node_are_refused(tmp_path):
    mtp_blocks.nemotron(tmp_path)
    path = tmp_path / "config.json"
    for parts in (["linear_attention", "full_attention", "moe"], ["full_attention", "full_attention"], ["moe"]):
        path.write_text(json.dumps({**json.loads(path.read_text()), "mtp_layers_block_type": parts}))
        with pytest.raises(DraftingRefused, match="expected one attention and no Mamba"):
            MtpDrafter.for_target(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_drafter_is_shown_after_its_target_is_gone(tmp_path):
    case = next(case for case in mtp_parity.CASES if case.model_type == "glm4_moe")
    drafter = MtpDrafter.for_target(mtp_parity.published(case, tmp_path).target)
    shown = repr(drafter)
    gc.collect()
    assert drafter._target() is None and repr(drafter) == shown


def test_layers_with_scales_are_read_as_the_numbers_that_they_stand_for(tmp_path):
    """As in DeepSeek's files, in blocks of 128 rows and columns; the target may be loaded quantised."""
    case = next(case for case in mtp_parity.CASES if case.model_type == "deepseek_v3")
    mtp_parity.published(case, tmp_path)
    file, expected = tmp_path / "model.safetensors", {}
    tensors = load_file(file)
    for name in [name for name in tensors if ".layers.3." in name and name.endswith("_proj.weight")]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
        expected[name] = tensors[name].float() * scale
    save_file(tensors, file, metadata={"format": "pt"})
    target = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    target.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    [layer] = MtpDrafter.for_target(target).layers.model.layers
    found = layer.mtp_block.self_attn.o_proj.weight
    torch.testing.assert_close(
        found, expected["model.layers.3.self_attn.o_proj.weight"].to(found), atol=1e-3, rtol=1e-2
    )
