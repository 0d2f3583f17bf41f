"""Drafting of other projects as variants of `hsdraft bench`: `benchmarks/peers.py`."""

from __future__ import annotations

import importlib.util
import json

import peers
import pytest
import torch
from conftest import VOCAB, make_target, write_prompts
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from transformers.modeling_layers import MtpModel

from hf_hsdraft.bench.calls import Settings, measure
from hf_hsdraft.bench.report import summarise
from hf_hsdraft.bench.systems import PLAIN, make_systems, parse_variants
from hf_hsdraft.runtime.prompt_inputs import encode_prompt


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr("hf_hsdraft.bench.systems.OTHERS", {})
    peers.register()


@pytest.fixture
def inputs(tokenizer):
    return [encode_prompt(tokenizer, f"w{index} w{index + 3} w7") for index in range(3)]


def compared(variant: str, target, inputs):
    """Figures of a variant beside plain decoding, and its calls."""
    systems = make_systems(parse_variants(variant), target, {})
    measured = measure(target, systems, inputs, Settings(16))
    assert not measured.left_out
    [name] = [name for name in measured.runs if name != PLAIN]
    return name, summarise(measured.runs[name], measured.plain), measured.runs[name]


def rounds_add_up(runs, later: bool) -> bool:
    """Whether accepted drafts and forwards make all tokens; later: the prompt's forward verifies no draft."""
    return all(sum(run.accepted) + len(run.accepted) + later == run.tokens for run in runs) and all(
        len(run.accepted) + later == run.forwards for run in runs
    )


def test_a_draft_model_decodes_plains_text(target, inputs, tmp_path):
    target.save_pretrained(tmp_path / "small")  # as good as a draft model can be
    name, row, runs = compared(f"draft-model={tmp_path / 'small'}", target, inputs)
    assert name == "draft model small (transformers)"
    assert row.identical == 3 and row.tau > 1.5 and rounds_add_up(runs, later=False)


def test_multi_token_prediction_is_the_targets_own(inputs, tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 256}
    config = Glm4MoeConfig(vocab_size=VOCAB, **sizes, num_mtp_layers=1, initializer_range=0.3, pad_token_id=0)
    # Of this type the layers are known by the numbers that they have in the published models.
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    made = Glm4MoeForCausalLM(config).eval()
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    without = load_file(file)
    layers = MtpModel(made, 1).state_dict()
    own = {
        f"model.layers.2.{key.removeprefix('layers.0.').removeprefix('mtp_block.')}": value.clone()
        for key, value in layers.items()
        if key.startswith("layers.")
    }
    with pytest.raises(ValueError, match=r"variant 'mtp': the target's layers for it cannot be read: .*missing"):
        compared("mtp", AutoModelForCausalLM.from_pretrained(tmp_path).eval(), inputs)
    save_file(without | own, file, metadata={"format": "pt"})
    name, row, runs = compared("mtp", AutoModelForCausalLM.from_pretrained(tmp_path).eval(), inputs)
    assert name == "multi-token prediction (transformers)"
    assert row.identical == 3 and rounds_add_up(runs, later=True)


def dflash(folder, **changes):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "block_size": 4, "mask_token_id": 5, "target_layer_ids": [0, 2]}
    torch.manual_seed(0)
    MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**sizes, **changes})).save_pretrained(folder)
    return f"dflash={folder}"


def test_dflash_drafts_for_a_target_of_its_sizes(target, inputs, tmp_path):
    name, row, runs = compared(dflash(tmp_path / "block"), target, inputs)
    assert name == "DFlash block (transformers)"
    assert row.identical == 3 and rounds_add_up(runs, later=True)


def test_what_is_missing_is_named_before_anything_is_measured(target, tmp_path):
    for wrong, message in (
        ("draft-model", "write draft-model=FOLDER"),
        ("dflash", "write dflash=FOLDER"),
        ("mtp=folder", "its layers are the target's own"),
        (f"draft-model={tmp_path}/no/folder", "no such folder"),
        ("economize-eagle3", "write economize-eagle3=FOLDER"),
        ("economize-hybrid=/nowhere/at/all", "no such folder"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_variants(wrong)
    make_target(vocab_size=50).save_pretrained(tmp_path / "other")
    target.save_pretrained(tmp_path / "same")
    for wrong, message in (
        ("mtp", "no `num_mtp_layers`"),
        (f"draft-model={tmp_path / 'other'}", "a vocabulary of 50 tokens, the target one of 97"),
        (f"dflash={tmp_path / 'same'}", "no target_layer_ids, block_size, mask_token_id"),
        (dflash(tmp_path / "wide", hidden_size=64), "hidden_size 64 instead of 32"),
        (dflash(tmp_path / "deep", target_layer_ids=[1, 3]), "layer 3 of 3"),
        (dflash(tmp_path / "mask", mask_token_id=97), "mask_token_id 97 beyond the vocabulary of 97"),
    ):
        with pytest.raises(ValueError, match=message):
            make_systems(parse_variants(wrong), target, {})


def test_economize_that_is_not_installed_is_said_at_once(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "economize" else find(name))
    with pytest.raises(ImportError, match="pip install --no-deps economize"):
        parse_variants("economize-lookup")


def test_economize_decodes_plains_text_and_draws_its_own(target, drafter, inputs):
    pytest.importorskip("economize")
    systems = make_systems(parse_variants("economize-lookup:6,chain"), target, {"d": drafter})
    greedy = measure(target, systems, inputs[:2], Settings(10))
    [name] = [system.name for system in systems if "economize" in system.name]
    assert not greedy.left_out and summarise(greedy.runs[name], greedy.plain).identical == 2
    assert all(0 < one.first_seconds < one.seconds for one in greedy.runs[name])
    sampled = measure(target, systems, inputs[:2], Settings(10, 1.0))
    assert not sampled.left_out and summarise(sampled.runs[name], sampled.plain).identical is None


def test_the_command_takes_a_draft_model_and_tells_no_places(chatty, tokenizer, tmp_path):
    for folder in ("target", "small"):
        chatty.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    prompts, report = write_prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "report.json"
    arguments = ["--prompts", str(prompts), "--target", str(tmp_path / "target"), "--max-new-tokens", "6"]
    with pytest.raises(SystemExit) as ended:
        peers.main([*arguments, "--variants", f"draft-model={tmp_path / 'small'}", "--json", str(report)])
    assert not ended.value.code
    document = json.loads(report.read_text())
    assert document["summary"]["draft model small (transformers)"]["identical"] == 2
    assert str(tmp_path) not in json.dumps(document) and "draft-model=small" in document["settings"]["command"]
