"""Drafting by the target's own first layers: exact texts, what is reused, training, files; with images too."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, each_with_its_seed, make_target
from session_helpers import padded
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_hsdraft import AutoDrafter, SelfDraftConfig, SelfDrafter
from hf_hsdraft.bench.format_parity import randomise
from hf_hsdraft.target.first_layers import FirstLayers

LAYERS, NEW = 4, 24
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
SIZES |= {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
TARGETS = {
    "llama": {"model_type": "llama"},
    "eager": {"model_type": "llama", "attn_implementation": "eager"},
    "qwen2": {"model_type": "qwen2"},
    "windows": {"model_type": "gemma3_text", **WINDOWS},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 256},
}


def target_of(kind: str):
    torch.manual_seed(0)
    fields = {**SIZES, **TARGETS[kind]}
    attention = fields.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def with_images():
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    text = {"model_type": "llama", **SIZES}
    config = AutoConfig.for_model("llava", vision_config=vision, text_config=text, image_token_id=96)
    return AutoModelForImageTextToText.from_config(config).eval()


def pictures(rows: int) -> dict[str, torch.Tensor]:
    inputs = padded(rows)
    inputs["input_ids"].clamp_(max=90)
    inputs["input_ids"][:, 7:11] = 96
    return inputs | {"pixel_values": torch.randn(rows, 3, 28, 28, generator=torch.Generator().manual_seed(1))}


def make_self(target, layers: int = 2, right: bool = True, **overrides) -> SelfDrafter:
    """A drafter whose drafts cost nothing. It passes early states on as they are, and so is `right` after `early`."""
    fields = {"num_draft_steps": 4, "draft_vocab_size": VOCAB, "tree_size": 14, "draft_layers": layers}
    drafter = SelfDrafter(SelfDraftConfig.for_target(target, **{**fields, **overrides})).eval()
    randomise(drafter)
    if right:
        final = target.get_decoder().norm if hasattr(target.get_decoder(), "norm") else target.get_decoder().ln_f
        offset = 1.0 if "Gemma" in type(final).__name__ else 0.0
        for module in (drafter.turn, *(layer.down_proj for layer in drafter.layers)):
            torch.nn.init.zeros_(module.weight)
        torch.nn.init.ones_(drafter.tap_norm.weight)
        drafter.norm.weight.data.copy_(final.weight.data + offset)
    options = drafter.generation_config
    options.node_cost = options.depth_cost = 0.0
    options.tree_sizing = "fixed"
    return drafter


@torch.no_grad()
def early(target, layers: int = 2):
    """The target with other layers that say little: its first ones often know the next token."""
    decoder = target.get_decoder()
    for layer in (decoder.layers if hasattr(decoder, "layers") else decoder.h)[layers:]:
        for name, weight in layer.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "c_proj", "post_")):
                weight.mul_(0.1)
    return target


def both(target, drafter, inputs, **call):
    call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **call}
    plain = target.generate(**inputs, **call)
    return plain, target.generate(**inputs, **call, assistant_model=drafter)


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", TARGETS)
def test_texts_are_the_targets_own(kind, rows, right):
    target = early(target_of(kind))
    drafter = make_self(target, right=right)
    plain, drafted = both(target, drafter, padded(rows))
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    statistics = drafted.statistics
    assert statistics.draft_kind == "tree" and max(statistics.drafted_nodes) > 1
    assert statistics.reused_share > 0.1
    assert not right or sum(statistics.accepted_lengths) > statistics.rounds * 0.5
