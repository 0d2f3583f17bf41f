"""Published block drafters: read unchanged, drafting what the implementations that they come from draft."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import edited
from family_helpers import drafts_much, make_block_drafter
from format_parity import main as print_formats
from lm_helpers import drafts_of
from oracles import block_parity, block_variants
from oracles.block_parity import CASES, DFLASH2, DRAFTED, MASK, SLIDING, TAPS, BlockReference, parity
from oracles.format_parity import Case, loaded_by_speculators, texts_of, tiny_target
from safetensors.torch import load_file, save_file

from hf_hsdraft import AutoDrafter
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.methods.block.configuration import Sight, default_tap_layers
from hf_hsdraft.methods.block.drafter import BlockDrafter

CLOSE = 1e-4
EVERY = 12  # of the rounds are compared
BY_NAME = {case.name: case for case in CASES}
WITHOUT_SPECULATORS = (
    "z-lab DFlash",
    "z-lab DFlash, target that scales",
    "JetSpec",
    "DeepSpec, Gemma 4 that scales",
    "DeepSpec, Gemma 4 that scales, shared values",
    "transformers DFlash",
    "transformers DFlash, sliding",
)


def needs(case: Case) -> None:
    if case.name not in WITHOUT_SPECULATORS:
        pytest.importorskip("jetspec" if "authors" in case.name else "speculators")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_drafts_are_those_of_the_reference(case):
    needs(case)
    found = parity(case, every=EVERY)
    assert found.difference < CLOSE
    assert found.rounds > 20 and found.rejected > 0 and found.accepted > 0


@pytest.mark.parametrize("case", block_variants.CASES, ids=lambda case: case.name)
def test_drafts_of_variants_are_those_of_the_formulas(case):
    found = parity(case, every=EVERY)
    assert found.difference < CLOSE
    assert found.rounds > 20 and found.rejected > 0


@pytest.mark.parametrize("case", block_variants.REFUSED, ids=lambda case: case.name)
def test_what_cannot_be_drafted_with_is_refused_when_it_is_loaded(case, target):
    with pytest.raises(ValueError, match=r"expected|unknown|not known|contradict|pass mask_token_id"):
        case.make(target).loaded()


def test_the_command_prints_a_line_for_a_format(capsys):
    print_formats(["z-lab DFlash", "z-lab layout, LiLiCorr"])
    header, _, line, other = capsys.readouterr().out.splitlines()
    assert header.startswith("| format |") and line.startswith("| z-lab DFlash | right | MuseGlimmerAssistantModel |")
    assert other.startswith("| z-lab layout, LiLiCorr | refused: ") and "is LiLiCorr" in other


def changed(case: Case, change) -> Case:
    """The same case with its config.json changed after the reference has written it."""

    def make(target) -> BlockReference:
        reference = case.make(target)

        def save(folder: Path) -> None:
            reference.save(folder)
            config = edited(folder)
            change(config)
            (folder / "config.json").write_text(json.dumps(config))

        return replace(reference, save=save)

    return Case(case.name, make, case.target)


def in_layers(**fields):
    return lambda config: config["transformer_layer_config"].update(fields)


def at_top(**fields):
    return lambda config: config.update(fields)


def in_dflash(**fields):
    return lambda config: config["dflash_config"].update(fields)


THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 400.0}}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("speculators dflash", at_top(aux_hidden_state_layer_ids=[tap - 1 for tap in TAPS])),
        ("speculators dflash", at_top(aux_hidden_state_layer_ids=[2, 4, 5])),
        ("speculators dflash", at_top(mask_token_id=MASK + 1)),
        ("speculators dflash", at_top(sample_from_anchor=True)),
        ("speculators dflash, anchor first, biases", at_top(sample_from_anchor=False)),
        ("speculators dflash, anchor first, biases", in_layers(**THETA)),
        ("speculators dflash, sliding", in_layers(sliding_window=SLIDING["sliding_window"] + 1)),
        ("speculators dflash, sliding", at_top(sliding_window_non_causal=True)),
        ("speculators dspark, gated", at_top(sample_from_anchor=False)),
        ("speculators dspark, rnn, fill-in", at_top(sample_from_anchor=True)),
        ("DeepSpec, vanilla", at_top(target_layer_ids=[1, 3, 4])),
        ("z-lab DFlash", in_dflash(target_layer_ids=list(TAPS))),
        ("z-lab DFlash", in_dflash(mask_token_id=MASK - 1)),
        ("z-lab DFlash", at_top(rope_theta=7001.0 * 2)),
        ("z-lab DFlash", in_dflash(causal=True)),
        ("JetSpec", in_dflash(causal_head=False)),
        ("transformers DFlash, sliding", at_top(sliding_window=5)),
    ],
)  # fmt: skip
def test_a_format_that_is_read_wrongly_by_one_drafts_something_else(name, change):
    """So the comparison sees such a mistake; without it, a drafter only accepts less."""
    needs(BY_NAME[name])
    assert parity(changed(BY_NAME[name], change), 6).difference > 10 * CLOSE


def test_positions_and_hidden_states_one_off_are_seen(monkeypatch):
    run, read = BlockDrafter.run, BlockDrafter.read
    with monkeypatch.context() as patch:
        patch.setattr(BlockDrafter, "run", lambda self, x, positions, attend: run(self, x, positions + 1, attend))
        assert parity(BY_NAME["z-lab DFlash"], 6).difference > 10 * CLOSE
    monkeypatch.setattr(BlockDrafter, "read", lambda self, taps: read(self, taps.roll(1, dims=0)))
    assert parity(BY_NAME["z-lab DFlash"], 6).difference > 10 * CLOSE


@pytest.fixture
def saved(tmp_path, target):
    """A function that writes a case's drafter and returns its folder."""

    def write(name: str, change=None, tensors=None) -> Path:
        needs(BY_NAME[name])
        changed(BY_NAME[name], change or (lambda config: None)).make(target).save(tmp_path)
        if tensors is not None:
            kept = load_file(tmp_path / "model.safetensors")
            tensors(kept)
            save_file(kept, tmp_path / "model.safetensors")
        return tmp_path

    return write


def test_d2t_gives_the_token_of_each_column(saved, target):
    drafter = AutoDrafter.from_pretrained(saved("speculators dspark, vanilla"))
    assert drafter.draft_vocab_ids().tolist() == list(DRAFTED)
    head = target.get_output_embeddings().weight
    assert torch.equal(drafter.lm_head.weight, head[list(DRAFTED)])
    rounds = drafts_of(target, drafts_much(drafter, beam_width=3), {"input_ids": torch.tensor([[5, 6, 7]])})
    drafted = {token for trees in rounds for tokens, *_ in trees for token in tokens[1:]}
    assert drafted and drafted <= set(DRAFTED)


def test_nothing_of_the_target_is_kept(saved, target):
    """DeepSpec's files bring copies of its embedding and head."""
    folder = saved("DeepSpec, vanilla")
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    drafter = AutoDrafter.from_pretrained(folder)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    weights = drafter.borrow(embedding, head)
    assert not any("embed_tokens" in name or "lm_head" in name for name in drafter.state_dict())
    assert weights.head.data_ptr() == head.weight.data_ptr()
    assert torch.equal(weights.embed(torch.tensor([3])), embedding.weight[[3]])


@pytest.mark.parametrize("fields", [
    {"num_hidden_layers": 2, "markov_rank": 8},
    {"num_hidden_layers": 1, "markov_rank": 8, "markov_head_type": "rnn", "confidence_head": "markov"},
    {"num_hidden_layers": 2, "markov_rank": 0},
    {"num_hidden_layers": 2, "markov_rank": 0, "sample_from_anchor": False},
    {"num_hidden_layers": 2, "markov_rank": 8, "draft_vocab_ids": DRAFTED},
    {"num_hidden_layers": 2, "markov_rank": 8, "sights": (Sight(6, True, True), Sight())},
    {"num_hidden_layers": 1, "markov_rank": 0, "sample_from_anchor": False, **DFLASH2},
])  # fmt: skip
def test_what_is_saved_here_is_what_the_package_speculators_loads(fields, target, tmp_path):
    pytest.importorskip("speculators")
    drafter = BlockDrafter.for_target(
        target, num_draft_steps=block_parity.SLOTS, target_tap_layers=TAPS, mask_token_id=MASK, **fields
    )
    block_parity.randomise(drafter)
    if drafter.config.has_own_head:
        drafter.take_head(target.get_output_embeddings(), DRAFTED)
    drafter.save_pretrained(tmp_path)
    model = loaded_by_speculators(tmp_path)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        if not drafter.config.has_own_head:
            model.lm_head.weight.copy_(target.get_output_embeddings().weight)
    slots = partial(block_parity.speculators_slots, model)

    def make(target) -> BlockReference:
        return BlockReference("saved here", drafter.save_pretrained, slots, first_slot=drafter.config.first_slot)

    assert parity(Case("saved here", make), every=EVERY).difference < CLOSE


def test_a_loose_embedding_of_masks_is_applied(saved, target):
    folder = saved("z-lab DFlash")
    row = target.get_input_embeddings().weight[MASK + 1].detach().clone()
    torch.save(row[None], folder / "mask_embedding.pt")
    other = AutoDrafter.from_pretrained(folder)
    assert torch.equal(other.mask_embedding, row)
    (folder / "mask_embedding.pt").unlink()
    edited(folder, dflash_config={**edited(folder)["dflash_config"], "mask_token_id": MASK + 1})
    same = AutoDrafter.from_pretrained(folder)
    weights = same.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    anchors, mask = torch.randn(2, 32), weights.embed(torch.tensor(MASK + 1))
    assert torch.equal(other.block_embeds(anchors, torch.zeros(32)), same.block_embeds(anchors, mask))
    torch.save(row[:5].clone(), folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"mask_embedding.pt .* expected 32 floating numbers"):
        AutoDrafter.from_pretrained(folder)


def test_windows_of_zlab_are_causal_unless_it_says_otherwise(saved):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    folder = saved("z-lab DFlash", at_top(**sliding))
    assert AutoDrafter.from_pretrained(folder).config.sights == (Sight(5, False, True), Sight())
    saved("z-lab DFlash", lambda config: (config.update(sliding), config["dflash_config"].update(causal=False)))
    drafter = AutoDrafter.from_pretrained(folder)
    assert drafter.config.sights == (Sight(5), Sight())
    with pytest.raises(ValueError, match="each slot counts by itself"):
        drafter.save_pretrained(folder / "other")


def test_embeddings_and_logits_are_scaled_as_zlab_says(saved, target):
    scales = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    drafter = AutoDrafter.from_pretrained(saved("z-lab DFlash", in_dflash(**scales)))
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    weights = drafter.borrow(embedding, head)
    assert torch.allclose(weights.embed(torch.tensor([4])), 2.0 * embedding.weight[[4]])
    hidden = torch.randn(3, 32)
    wanted = 3.0 * torch.tanh(0.5 * (hidden @ head.weight.T) / 3.0)
    assert torch.allclose(drafter.logits(hidden, weights), wanted, atol=1e-5)


def test_scaled_embeddings_are_kept_when_a_drafter_is_saved(saved, tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr("hf_hsdraft.methods.block.drafter.logger.warning", warned.append)
    drafter = AutoDrafter.from_pretrained(saved("z-lab DFlash"))
    drafter.save_pretrained(tmp_path / "again")
    assert not warned
    scaling = tiny_target(**BY_NAME["z-lab DFlash, target that scales"].target)
    embedding, tokens = scaling.get_input_embeddings(), torch.tensor([4, 7])
    for each in (drafter, AutoDrafter.from_pretrained(tmp_path / "again")):
        found = each.borrow(embedding, scaling.get_output_embeddings()).embed(tokens)
        assert torch.allclose(found, embedding(tokens)) and not torch.allclose(found, embedding.weight[tokens])
    drafter.export("speculators", tmp_path / "exported")
    assert "embedding rows as they are" in warned[0]


def test_default_layers_are_those_of_the_formats():
    """As ids that count from 0: 1, 14, 27 and 1, 8, 14, 20, 27 of 30 layers; DSpark's 1, 9, 17, 25, 33 of 36."""
    assert [tap - 1 for tap in default_tap_layers(30, 3)] == [1, 14, 27]
    assert [tap - 1 for tap in default_tap_layers(30, 5)] == [1, 8, 14, 20, 27]
    assert [tap - 1 for tap in default_tap_layers(36, 5)] == [1, 9, 17, 25, 33]
    assert default_tap_layers(30, 1) == [16]


def drop(name):
    return lambda tensors: tensors.pop(name)


def rename(name, other):
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def reshape(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


@pytest.mark.parametrize(
    ("name", "change", "tensors", "message"),
    [
        ("z-lab DFlash", None, drop("layers.1.self_attn.q_norm.weight"), "missing: layers.1.self_attn.q_norm.weight"),
        ("z-lab DFlash", None, rename("norm.weight", "final.weight"), "missing: norm.weight; unknown: final.weight"),
        ("z-lab DFlash", None, reshape("fc.weight"), r"fc.weight \[31, 96\] instead of \[32, 96\]"),
        ("z-lab DFlash", in_dflash(target_layer_ids=[0, 2]), None, r"fc.weight \[32, 96\] instead of \[32, 64\]"),
        ("z-lab DFlash", in_dflash(target_layer_ids=[2, 0, 4]), None, r"target_layer_ids=\[2, 0, 4\].*ascending"),
        ("z-lab DFlash", lambda config: (config.pop("num_target_layers"), config["dflash_config"].pop(
            "target_layer_ids")), None, "no target_layer_ids"),
        ("z-lab DFlash", in_dflash(mask_token_id=None), None, r"no mask_token_id: pass mask_token_id=\.\.\."),
        ("z-lab DFlash", in_dflash(mask_token_id=97), None, "mask_token_id=97 is invalid.*below vocab_size=97"),
        ("z-lab DFlash", in_dflash(embed_norm=True), None, "embed_norm=true"),
        ("z-lab DFlash", in_dflash(residual_scale=0.5), None, "dflash_config has residual_scale=0.5: this is not"),
        ("z-lab DFlash", in_dflash(lilicorr_num_layers=2), None, "is LiLiCorr, .*not drafted with here"),
        ("z-lab DFlash", at_top(architectures=["K3DSparkModel"]), None, "is Kimi K3's DSpark, .*latent"),
        ("z-lab DFlash", in_dflash(attention_sink_bias=True), None, "missing: layers.0.self_attn.attention_sink_bias"),
        ("z-lab DFlash", at_top(layer_types=["sliding_attention"] * 2, sliding_window=6, dflash_config={
            "swa_window_size": 5, "mask_token_id": MASK, "target_layer_ids": [0, 2, 4]}), None,
         "swa_window_size=5 in dflash_config and sliding_window=6 in config.json contradict"),
        ("z-lab DFlash", at_top(rope_scaling={"rope_type": "default", "rope_dim": 5}), None, "rope_dim=5.*even number"),
        ("z-lab DFlash", at_top(rope_scaling={"rope_type": "proportional", "rope_dim": 4}), None, "rope_dim=4.*ted 8"),
        ("z-lab DFlash", in_dflash(projector_type="domino"), None, "no emb_dim"),
        ("SpecForge Domino", in_dflash(emb_dim=9), None, r"embed_proj.0.weight \[8, 44\] instead of \[9, 44\]"),
        ("SpecForge Domino", None, drop("prefix_gru.weight_hh_l0"), "missing: prefix_gru.weight_hh_l0"),
        ("z-lab DFlash", at_top(hidden_size=2**40), None, "hidden_size=1099511627776"),
        ("z-lab DFlash", at_top(num_attention_heads=3), None, "num_key_value_heads=2 is invalid"),
        ("z-lab DFlash", at_top(head_dim=7), None, "head_dim=7 is invalid"),
        ("z-lab DFlash", at_top(partial_rotary_factor=1.5), None, "partial_rotary_factor=1.5"),
        ("z-lab DFlash", at_top(block_size=1), None, "block_size=1 is invalid"),
        ("z-lab DFlash", at_top(rope_theta=0), None, "rope_theta=0 in config.json is invalid"),
        ("z-lab DFlash", at_top(rope_scaling="yarn"), None, "rope_scaling='yarn' in config.json is invalid"),
        ("z-lab DFlash", at_top(rope_scaling={"type": "spiral"}), None, "spiral.*expected rope_parameters"),
        ("z-lab DFlash", at_top(target_hidden_size=-32), None, "target_hidden_size=-32"),
        ("z-lab DFlash", None, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.int8)}),
         r"quantised by an unknown method \(fc.weight\).*before quantisation"),
        ("SpecForge DSpark", in_dflash(projector_type="lilicorr"), None, "projector_type='lilicorr'.*dspark"),
        ("z-lab DFlash", at_top(is_causal=True, dflash_config={
            "causal": False, "mask_token_id": MASK, "target_layer_ids": [0, 2, 4]}), None, "contradict"),
        ("JetSpec", in_dflash(causal=False), None, "causal=False and causal_head=True in config.json contradict"),
        ("JetSpec", in_dflash(causal_head="yes"), None, "causal_head='yes'.*true or false"),
        ("z-lab DFlash", None, lambda tensors: tensors.update({"aux_hidden_norms.0.weight": torch.ones(32)}),
         "unknown: aux_hidden_norms.0"),
        ("z-lab DFlash", None, lambda tensors: tensors.update({"prefix_gru.w": torch.ones(2)}), "prefix_gru.w"),
        ("z-lab DFlash", None, lambda tensors: tensors.update({"mtp.0.markov_head.w": torch.ones(2)}),
         "unknown: mtp.0.markov_head.w"),
        ("DeepSpec, vanilla", at_top(model_type="llama"), None, "model_type='llama'"),
        ("DeepSpec, vanilla", at_top(embed_requires_grad=True), None, "embed_requires_grad=true"),
        ("DeepSpec, vanilla", at_top(markov_head_type="lstm"), None, "markov_head_type='lstm'.*vanilla, gated, rnn"),
        ("DeepSpec, vanilla", at_top(markov_rank=9), None, r"markov_w1.weight \[97, 8\] instead of \[97, 9\]"),
        ("speculators dspark, vanilla", None, lambda tensors: tensors["d2t"].add_(50), "d2t.*expected 0 to 96"),
        ("speculators dspark, vanilla", at_top(speculators_config={"proposal_methods": [
            {"proposal_type": "greedy", "verifier_accept_k": 3}]}), None, "verifier_accept_k=3"),
        ("speculators dspark, vanilla", at_top(some_new_switch=True), None, "some_new_switch=true"),
        ("speculators dspark, vanilla", in_layers(layer_types=["linear_attention"] * 2), None, "layer_types"),
        ("speculators dspark, vanilla", in_layers(model_type="nothing"), None, "model_type='nothing'"),
        ("speculators dspark, vanilla", at_top(draft_vocab_size=98), None, "draft_vocab_size=98 is invalid"),
    ],
)  # fmt: skip
def test_wrong_files_are_errors_that_say_what_is_wrong(name, change, tensors, message, saved):
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(saved(name, change, tensors))


def test_a_truncated_file_is_an_error(saved):
    path = saved("z-lab DFlash") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"is damaged.*copy it again"):
        AutoDrafter.from_pretrained(path.parent)


def test_large_sizes_are_refused_before_anything_is_allocated(saved):
    """Each layer would have 2**35 weights; the files hold none of that size."""
    huge = at_top(hidden_size=2**17, intermediate_size=2**18, num_hidden_layers=64, head_dim=2**13)
    with pytest.raises(ValueError, match=r"do not match its config\.json"):
        AutoDrafter.from_pretrained(saved("z-lab DFlash", huge))


def test_the_last_layer_is_read_before_the_norm(saved, target, monkeypatch):
    drafter = AutoDrafter.from_pretrained(saved("DeepSpec, vanilla", at_top(target_layer_ids=[0, 2, 5])))
    drafter.check(target)
    assert tuple(drafter.taps_of(target)) == (1, 3, 7)
    heads, hooks = target.model.norm._forward_pre_hooks, len(target.model.norm._forward_pre_hooks)
    texts_of(target, drafter)  # checks the texts
    assert len(heads) == hooks
    monkeypatch.setattr("hf_hsdraft.runtime.target_parts._NAMES", ())
    with pytest.raises(DraftingRefused, match="before the target's final norm"):
        drafter.check(target)
    AutoDrafter.from_pretrained(saved("z-lab DFlash", in_dflash(target_layer_ids=[0, 2, 5]))).check(target)


def test_a_drafter_of_any_vocabulary_takes_that_of_its_target(saved):
    drafter = AutoDrafter.from_pretrained(saved("transformers DFlash"))
    assert drafter.config.vocab_size is None
    small = tiny_target(vocab_size=MASK)
    with pytest.raises(DraftingRefused, match=f"token {MASK} as its mask"):
        drafter.check(small)


def test_what_the_format_of_speculators_cannot_say_is_not_written(target, tmp_path):
    """It takes the output of the last layer before the norm, transformers gives it after."""
    drafter = make_block_drafter(target, target_tap_layers=[1, 6])
    drafter.config = replace(drafter.config, last_tap_is_normed=True)
    with pytest.raises(ValueError, match="last layer after its norm"):
        drafter.save_pretrained(tmp_path / "drafter")
    assert not (tmp_path / "drafter" / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("partial_rotary_factor, told to be applied", "heads that are rotated in part"),
        ("rope_dim of half a head, neighbours", "heads that are rotated in part"),
        ("own embed_tokens, mask beyond the target's", "tables of more or fewer tokens than the vocabulary"),
        ("own embed_tokens with more rows than vocab_size", "tables of more or fewer tokens than the vocabulary"),
        ("DSpark, draft_vocab_size padded, own lm_head", "tables of more or fewer tokens than the vocabulary"),
    ],
)
def test_variants_that_the_format_of_speculators_cannot_say_are_not_written(name, told, target, tmp_path):
    [case] = [case for case in block_variants.CASES if case.name == f"z-lab layout, {name}"]
    with pytest.raises(ValueError, match=f"{told}, which the format of speculators cannot say: keep the files"):
        case.make(target).loaded().save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_masks_with_an_embedding_of_their_own_are_kept_here_and_not_exported(target, tmp_path):
    drafter = make_block_drafter(target, "own mask")
    with pytest.raises(ValueError, match="its masks have a learned embedding, for which that format has no"):
        drafter.export("speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    drafter.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoDrafter.from_pretrained(tmp_path / "saved").mask_embedding, drafter.mask_embedding)
