"""Drafts of a target with a LoRA adapter for noise rows (Uno), against PEFT with the adapter masked by row."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import as_plain, edited, make_target
from family_helpers import drafts_much
from oracles.format_parity import PROMPTS, texts_of, tiny_target
from safetensors.torch import load_file, save_file
from session_helpers import padded
from transformers import Qwen2MoeConfig

from hf_hsdraft import UnoDrafter
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.methods.uno import UnoConfig, UnoSession

MASK, DEPTH, BASE = 60, 5, "user/base"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(target, folder, **fields):
    """Returns the target with an adapter of random weights, by PEFT, after it was saved."""
    peft = pytest.importorskip("peft")
    known = {"r": 4, "lora_alpha": 8, "target_modules": MODULES}
    model = peft.get_peft_model(make_same(target), peft.LoraConfig(**{**known, **fields})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    edited(folder, "adapter_config.json", base_model_name_or_path=BASE)
    return model


def make_same(target):
    """A copy: PEFT changes the model that it is given."""
    other = type(target)(target.config).eval()
    other.load_state_dict(target.state_dict())
    return other


def masked_logits(model, ids: list[int], clean: int) -> torch.Tensor:
    """Logits `[n, V]` of one causal forward, with the adapter for tokens from `clean` on, as in Uno's training."""
    rows = (torch.arange(len(ids)) >= clean).float()[:, None]
    downs = [each for name, each in model.named_modules() if name.endswith("lora_A.default")]
    hooks = [each.register_forward_hook(lambda module, inputs, output: output * rows) for each in downs]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


# With experts, whose shared one reads the rows of all texts side by side
EXPERTS = {
    "kind": Qwen2MoeConfig, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
def test_drafts_are_those_of_masked_adapters(tmp_path, monkeypatch, sizes):
    target, rounds, logits = tiny_target(**sizes), [], UnoSession.read
    model = adapted(target, tmp_path)

    def noting(self, tokens, depths):
        before = self._runtime.slots.length
        found = logits(self, tokens, depths)
        assert self._runtime.slots.length == before, "the cache holds noise"
        rounds.append((list(self._runtime.rows.kept), tokens.tolist(), depths, found))
        return found

    monkeypatch.setattr(UnoSession, "read", noting)
    drafter = UnoDrafter.from_pretrained(tmp_path, mask_token_id=MASK, num_assistant_tokens=DEPTH, tree_sizing="fixed")
    texts, statistics = texts_of(target, drafter)
    padding, worst = [max(map(len, PROMPTS)) - len(prompt) for prompt in PROMPTS], 0.0
    whole = [each for each in rounds if len(each[0]) == len(PROMPTS)]
    for kept, tokens, depths, found in whole[::2]:
        for row, depth in enumerate(depths):
            read = texts[row][: kept[row] - padding[row] + 1]
            assert depth == 0 or (read[-1] == tokens[row][0] and max(tokens[row][1:], default=1) < MASK)
            wanted = masked_logits(model, read + tokens[row][1:depth], len(read))[len(read) - 1 :]
            worst = max([worst, *(found[row, :depth] - wanted[:depth]).abs().flatten().tolist()])
    assert len(whole) > 5 and worst < 1e-3
    assert statistics.tau > 1.9  # the first drafted token is the target's own


@pytest.mark.parametrize("options", [
    {}, {"beam_width": 1}, {"tree_sizing": "cost", "ngram_length": 4},
    {"tree_builder": "gumbel", "verification": "rejection"},
], ids=str)  # fmt: skip
def test_texts_are_the_targets_own(tmp_path, options):
    target = make_target(num_hidden_layers=4)
    adapted(target, tmp_path)
    drafter = drafts_much(UnoDrafter.from_pretrained(tmp_path), **options)
    before = {name: id(module) for name, module in target.named_modules()}
    output = as_plain(target, drafter, padded(3), max_new_tokens=14)
    assert sum(output.statistics.drafted_nodes) > 0
    assert before == {name: id(module) for name, module in target.named_modules()}
    assert not any("InPlaceOf" in type(module).__name__ for module in target.modules())


@pytest.mark.parametrize(("change", "message"), [
    ({"use_dora": True}, "use_dora=True"),
    ({"use_rslora": True}, "use_rslora=True"),
    ({"peft_type": "IA3"}, "peft_type='IA3'.*LORA"),
    ({"bias": "all"}, "bias='all'"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    ({"r": None}, "no r"),
])  # fmt: skip
def test_other_adapters_are_refused(tmp_path, change, message):
    adapted(tiny_target(), tmp_path)
    edited(tmp_path, "adapter_config.json", **change)
    with pytest.raises(ValueError, match=message):
        UnoDrafter.from_pretrained(tmp_path)


def test_missing_and_unknown_files_and_tensors_are_errors(tmp_path):
    with pytest.raises(OSError, match=r"no adapter_config.json, adapter_model.safetensors: .*as PEFT saves them"):
        UnoDrafter.from_pretrained(tmp_path)
    adapted(tiny_target(), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.ones(2, 2)}, path)
    with pytest.raises(ValueError, match=r"holds base_model.model.lm_head.weight: expected .lora_A.weight"):
        UnoDrafter.from_pretrained(tmp_path)
    save_file({name: each for name, each in tensors.items() if "lora_A" in name or "q_proj" not in name}, path)
    with pytest.raises(ValueError, match=r"holds model.layers.0.self_attn.q_proj"):
        UnoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("mask", [1, -3, 2.0, True, "60"])
def test_wrong_mask_tokens_are_errors(tmp_path, mask):
    adapted(tiny_target(), tmp_path)
    with pytest.raises(ValueError, match=r"mask_token_id=.* is invalid: expected an integer from 2"):
        UnoDrafter.from_pretrained(tmp_path, mask_token_id=mask)


def test_what_does_not_fit_the_target_is_refused_before_any_work(tmp_path):
    target = tiny_target()
    adapted(target, tmp_path)
    size, reads = target.config.vocab_size, []
    target.register_forward_pre_hook(lambda *_: reads.append(None))
    drafter = UnoDrafter.from_pretrained(tmp_path, mask_token_id=size)
    with pytest.raises(DraftingRefused, match=rf"mask_token_id={size} is invalid: the target has {size} tokens"):
        target.generate(**padded(1), assistant_model=drafter)
    routed = {"model.layers.0.mlp.experts.0.up_proj": next(iter(drafter.pairs.values()))}
    with pytest.raises(DraftingRefused, match=r"for experts \(model.layers.0.mlp.experts.0.up_proj\)"):
        target.generate(**padded(1), assistant_model=UnoDrafter(routed, UnoConfig()))
    assert not reads
    UnoDrafter.from_pretrained(tmp_path, mask_token_id=size - 1).check(target)


def test_other_targets_are_refused(tmp_path):
    adapted(tiny_target(), tmp_path)
    drafter = UnoDrafter.from_pretrained(tmp_path)
    with pytest.raises(DraftingRefused, match=r"for user/base: .*the target has"):
        drafter.check(make_target(hidden_size=24))
    drafter = UnoDrafter.from_pretrained(tmp_path, num_assistant_tokens=3, dtype=torch.bfloat16)
    assert drafter.dtype == torch.bfloat16 and drafter.generation_config.num_assistant_tokens == 3
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
