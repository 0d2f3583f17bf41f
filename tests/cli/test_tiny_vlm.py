"""The examples around a small vision-language model: each family that is offered trains and drafts for a tiny LLaVA."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from hf_hsdraft.training.data.features import read_features

pytest.importorskip("PIL")


@pytest.fixture
def drafting(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    drafting = importlib.import_module("tiny_vlm_drafting")
    monkeypatch.setattr(drafting, "NEW_TOKENS", 8)
    return drafting


@pytest.fixture
def folder(drafting, own_tokenizer, tmp_path):
    """A LLaVA that was not trained, and its tokenizer."""
    own_tokenizer.add_tokens([drafting.tiny_vlm.IMAGE_TOKEN], special_tokens=True)
    text = LlamaConfig(
        vocab_size=len(own_tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
        eos_token_id=own_tokenizer.eos_token_id, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=16,
        vision_use_head=False,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_seq_length=16, vision_feature_select_strategy="full",
        vision_feature_layer=-1, image_token_id=own_tokenizer.convert_tokens_to_ids(drafting.tiny_vlm.IMAGE_TOKEN),
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    model.generation_config.suppress_tokens = [config.image_token_id]
    for part in (model, own_tokenizer):
        part.save_pretrained(tmp_path / "vlm")
    return tmp_path / "vlm"


def test_what_training_reads_has_seen_the_picture(drafting, folder):
    model, tokenizer = drafting.tiny_vlm.load(folder)
    pixels, ids, prompt = drafting.answered(model, tokenizer, 1)[0]
    text = drafting.conversation(ids, prompt)
    assert not text.answer_mask[:prompt].any() and text.answer_mask[prompt:].all() and len(ids) > prompt
    found, blank = (
        read_features(model, (1,), [text], dtype=torch.float32, inputs={"pixel_values": shown[None]})[0]
        for shown in (pixels, 0 * pixels)
    )
    with torch.no_grad():
        states = model(input_ids=ids[None], pixel_values=pixels[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(found.taps, states[1][0])
    torch.testing.assert_close(found.final, states[3][0])
    assert not torch.allclose(found.final[-1], blank.final[-1])


def test_families_that_would_not_see_the_picture_are_not_offered(drafting):
    assert {"self", "hidden-state"} <= set(drafting.FAMILIES) and not {"lm", "steered-lm"} & set(drafting.FAMILIES)


@pytest.mark.parametrize("family", ["block", "eagle3", "hidden-state", "self", "specformer"])
def test_each_family_that_is_offered_trains_and_drafts(drafting, folder, tmp_path, capsys, family):
    assert family in drafting.FAMILIES
    fields = {"num_draft_steps": 3, "draft_vocab_size": 40, "tree_size": 16}
    drafting.train(folder, tmp_path / "out", family, fields, pictures=16, minutes=0.01)
    options = {"beam_width": 1, "tree_sizing": "fixed", "ngram_length": 0}
    [found] = drafting.measure(folder, [str(tmp_path / "out")], 2, options)
    assert "2 and 2 of 2" in capsys.readouterr().out
    for way in ("reuse", "anew"):
        assert sum(sum(call.drafted_nodes) for call in found.calls[way]) > 0, (
            "a drafter that drafts nothing is exact too"
        )
    assert (found.reused > 0) == (family == "self")
