"""EAGLE-3 drafters of other projects: loaded unchanged, and in every draft step what their own code computes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import edited
from oracles.eagle_by_hand import REASONS
from oracles.eagle_parity import (
    CASES,
    DRAFTED,
    MASK,
    REFUSED,
    TAPS,
    TOKENS,
    authors_config,
    eagle_target,
    in_parallel,
    parity,
    parity_of,
    speculators_model,
    unrolled,
)
from oracles.format_parity import HIDDEN, OF_TARGET, Reference, loaded_by_speculators, taps_of, without, write
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, EagleConfig, EagleDrafter
from hf_hsdraft.cli._describe import describe
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base.registry import Evidence, TargetInfo
from hf_hsdraft.methods.eagle import drafter as session
from hf_hsdraft.methods.published.checkpoint import AnyCheckpoint
from hf_hsdraft.methods.published.decoder_layer import rotary_of
from hf_hsdraft.methods.published.formats import recognise

pytest.importorskip("speculators")

EVERY = 12  # of the rounds are compared


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_draft_is_the_references_own(case):
    if "authors" in case.name:
        pytest.importorskip("economize")
    if "by its class" in case.name:
        pytest.importorskip("deepspec.modeling")
    found = parity(case, EVERY)
    assert found.difference < 1e-4, found
    least = 1 if "quantised" in case.name else 2  # rounds: random integers leave little of the text in a state
    assert found.accepted >= least and found.rejected > 1, found


@pytest.fixture
def files(tmp_path):
    """A drafter of speculators in a folder."""
    speculators_model().save_pretrained(tmp_path)
    return tmp_path


def other_theta(drafter, monkeypatch):
    drafter.rotary = rotary_of({"rope_theta": 9000.0}, drafter.config.sizes)


def other_residual(drafter, monkeypatch):
    drafter.layers[0].norm_before_residual = True


def swapped_norms(drafter, monkeypatch):
    layer = drafter.layers[0]
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm


def normed_output(drafter, monkeypatch):
    drafter.config = replace(drafter.config, norm_output=True)


def shifted_positions(drafter, monkeypatch):
    """Of drafted rows alone; shifting all of them would change nothing."""
    extend = session.DraftedRows.extend
    monkeypatch.setattr(
        session.DraftedRows,
        "extend",
        lambda self, states, embeds, parents, depths: extend(self, states, embeds, parents, depths + 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("misread", [other_theta, other_residual, swapped_norms, normed_output, shifted_positions])
def test_what_is_misread_is_found_by_the_comparison(files, misread, monkeypatch):
    """The comparison would be worth nothing if it missed one of these."""
    model, drafter = speculators_model(), AutoDrafter.from_pretrained(files)
    reference = Reference("Eagle3DraftModel", model.save_pretrained, lambda *path: unrolled(model, *path), TAPS)
    misread(drafter, monkeypatch)
    assert parity_of("misread", drafter, eagle_target(), reference, EVERY).difference > 1e-3


@pytest.mark.parametrize("ids", [[0, 2, 5], [2, 3, 7]], ids=["as written", "plus one"])
def test_numbers_of_layers_are_those_that_the_project_means(tmp_path, ids):
    """Each way to write them, by the hidden states that come of it; the parity cases compare what those give."""
    as_written, plus_one = tuple(ids), tuple(each + 1 for each in ids)
    ways = {
        "eagle_aux_hidden_state_layer_ids": (ids, as_written),
        "eagle_config": ({"eagle_aux_hidden_state_layer_ids": ids}, plus_one),
        "target_layer_ids": (ids, plus_one),
    }
    state = midlayer_state()
    for name, (value, expected) in ways.items():
        write(tmp_path, authors_config(**{name: value}), state)
        assert AutoDrafter.from_pretrained(tmp_path).taps == expected, name


def midlayer_state():
    state = without(speculators_model(), OF_TARGET[2:])
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}


def saved(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def retyped(name: str, tensor):
    return lambda state: state.__setitem__(name, tensor)


BAD_TENSORS = {
    "missing": (lambda state: state.pop("fc.weight"), r"missing: fc\.weight"),
    "renamed": (
        lambda state: state.__setitem__("layers.0.mlp.up.weight", state.pop("layers.0.mlp.up_proj.weight")),
        r"missing: layers\.0\.mlp\.up_proj\.weight; unknown: layers\.0\.mlp\.up\.weight",
    ),
    "reshaped": (retyped("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN)), r"fc\.weight \[32, 64\] instead of \[32, 96\]"),
    "no map": (lambda state: state.pop("d2t"), r"missing: d2t"),
    "beyond": (
        retyped("d2t", torch.full((len(DRAFTED),), TOKENS - len(DRAFTED) + 1)),
        rf"d2t .* leads to tokens .* to {TOKENS}",
    ),
    "twice": (retyped("d2t", -torch.arange(len(DRAFTED))), rf"d2t .*{len(DRAFTED) - 1} of them twice"),
    "negative": (retyped("d2t", torch.full((len(DRAFTED),), -1)), r"d2t .* leads to tokens -1"),
    "no integers": (retyped("d2t", torch.zeros(len(DRAFTED))), r"d2t .*dtype torch\.float32"),
}


@pytest.mark.parametrize(("change_of", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_wrong_tensors_are_told_before_any_is_read(files, monkeypatch, change_of, message):
    state = load_file(files / "model.safetensors")
    change_of(state)
    save_file(state, files / "model.safetensors", metadata={"format": "pt"})
    if "d2t" not in message or "missing" in message:  # else the values of the map are wrong
        monkeypatch.setattr(AnyCheckpoint, "tensors", None)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(files)


LAYER = {"model_type": "llama", "hidden_size": HIDDEN, "vocab_size": TOKENS, "num_attention_heads": 4}
BAD_FIELDS = {
    "theta": ({"transformer_layer_config": {**LAYER, "rope_theta": 0}}, r"rope_theta=0 in config.json, transformer_la"),
    "negative": ({"transformer_layer_config": {**LAYER, "sliding_window": -4}}, r"sliding_window=-4"),
    "kind": ({"speculators_model_type": "eagle"}, r"fc\.weight \[32, 96\] instead of \[32, 64\]"),
    "mtp": ({"speculators_model_type": "mtp"}, r"prediction heads \(speculators_model_type=mtp\): those are not"),
    "lossy": (
        {"speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "verifier_accept_k": 3}]}},
        r"verifier_accept_k=3",
    ),
    "unsorted": ({"eagle_aux_hidden_state_layer_ids": [6, 1, 4]}, r"layer_ids=\[6, 1, 4\].*ascending"),
    "unknown switch": ({"use_gates": True}, r"use_gates=true: this is not known here"),
    "flag": ({"norm_output": "yes"}, r"norm_output='yes' in config.json"),
    "two norms": ({"norm_before_fc": True, "fc_norm": True}, r"norm_before_fc=True is invalid with fc_norm=True"),
    "layer": ({"transformer_layer_config": None}, r"has no transformer_layer_config"),
    "type": ({"transformer_layer_config": {"model_type": "gpt2"}}, r"model_type='gpt2' in config.json, transformer_"),
    "partial": (
        {"transformer_layer_config": {**LAYER, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 1.5}}},
        r"partial_rotary_factor=1.5",
    ),
    "smaller": ({"draft_vocab_size": len(DRAFTED) - 1}, "of other shapes: d2t"),
    "huge": ({"transformer_layer_config": {**LAYER, "hidden_size": 2**40}}, r"hidden_size=1099511627776"),
}  # fmt: skip


BAD_LAYERS = {
    "a name": ({"rope_scaling": "yarn"}, "rope_scaling='yarn' in config.json is invalid: expected an object"),
    "kind": ({"rope_scaling": {"type": 5}}, "rope_type=.*5.* is invalid: expected a name"),
    "unknown kind": ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral.*expected rope_parameters"),
    "no factor": ({"rope_scaling": {"type": "yarn"}}, "factor.*expected rope_parameters as transformers"),
    "factor": ({"rope_scaling": {"type": "linear", "factor": -2.0}}, r"factor=-2.0 in config.json, rope_scaling"),
    "theta": ({"rope_theta": 0}, "rope_theta=0 in config.json is invalid: expected a number above 0"),
    "theta within": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
        "rope_theta=-1 in config.json, ro",
    ),
    "positions": ({"max_position_embeddings": -4}, "max_position_embeddings=-4"),
    "layers": ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    "kinds": ({"layer_types": "full"}, "layer_types='full'"),
}


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_wrong_fields_are_told_by_name(files, fields, message):
    edited(files, **fields)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(files)


@pytest.mark.parametrize(("fields", "message"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_malformed_layers_are_told_by_name(tmp_path, fields, message):
    write(tmp_path, authors_config(**fields), midlayer_state())
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_mask_that_the_files_do_not_name_is_given(tmp_path):
    kept = without(speculators_model("peagle", ids=None, mask_token_id=MASK), OF_TARGET[2:])
    write(tmp_path, authors_config(architectures=["PEagleDraftModel"], draft_vocab_size=TOKENS), kept)
    with pytest.raises(ValueError, match=r"names no mask_token_id.*pass mask_token_id=.*len\(tokenizer\)"):
        AutoDrafter.from_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path, mask_token_id=MASK).config.mask_token_id == MASK


def test_a_parallel_drafter_needs_its_mask(tmp_path):
    folder = saved(speculators_model("peagle", mask_token_id=MASK), tmp_path)
    edited(folder, mask_token_id=None)
    with pytest.raises(ValueError, match="has no mask_token_id"):
        AutoDrafter.from_pretrained(folder)
    edited(folder, mask_token_id=TOKENS)
    with pytest.raises(ValueError, match=f"mask_token_id={TOKENS} is invalid"):
        AutoDrafter.from_pretrained(folder)


def test_ids_that_contradict_each_other_are_refused(tmp_path):
    folder, fields = tmp_path, {"target_layer_ids": [1, 2, 3], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    write(folder, authors_config(**fields), midlayer_state())
    with pytest.raises(ValueError, match=re.escape("different hidden states ((1, 2, 3) and (2, 3, 4))")):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_what_cannot_be_computed_is_refused_with_the_reason(case):
    with pytest.raises((ValueError, DraftingRefused), match=REASONS[case.name]):
        parity(case, EVERY)


@pytest.mark.parametrize("name", ["attn_temperature_tuning", "embed_requires_grad", "use_rotary_pos_emb"])
def test_switches_that_change_nothing_are_ignored(tmp_path, name):
    write(tmp_path, authors_config(), midlayer_state())
    expected = AutoDrafter.from_pretrained(tmp_path).config
    edited(tmp_path, **{name: True})
    assert AutoDrafter.from_pretrained(tmp_path).config == expected


def test_lists_of_frequent_tokens_are_chosen(tmp_path):
    """FR-Spec: of several lists that of its authors' script, or the one that is named, or the tokens themselves."""
    [case] = [case for case in CASES if case.name == "FR-Spec"]
    case.make(eagle_target()).save(tmp_path)
    torch.save([5, 4], tmp_path / "freq_32768.pt")

    def drafted(**given):
        return AutoDrafter.from_pretrained(tmp_path, **given).draft_vocab_ids().tolist()

    assert drafted() == [5, 4] and drafted(frequent_tokens=[9, 2, 8]) == [9, 2, 8]
    assert len(drafted(frequent_tokens="freq_16.pt")) == 16
    for given, message in (
        ("nowhere.pt", "frequent_tokens='nowhere.pt' cannot be read"),
        ([3, 3], "draft_vocab_ids=.* is invalid"),
        ([TOKENS], "draft_vocab_ids=.* is invalid"),
        ([1.5], "frequent_tokens=.* is invalid: expected a list of token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            drafted(frequent_tokens=given)


def test_what_the_format_cannot_say_is_not_saved(tmp_path):
    for name in ("EAGLE-1, bias", "vLLM, factor of logits", "vLLM, DeepSeek's attention (MLA)"):
        [case] = [case for case in CASES if case.name == name]
        drafter = case.make(eagle_target()).loaded()
        with pytest.raises(ValueError, match="which the format of speculators cannot say: keep the files"):
            drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_info_tells_older_drafters(tmp_path):
    [case] = [case for case in CASES if case.name == "HASS"]
    case.make(eagle_target()).save(tmp_path)
    assert "EAGLE-1" in describe(str(tmp_path))["drafter"]["reads"]
    checkpoint = AnyCheckpoint.open(tmp_path)
    form = recognise(checkpoint)
    assert form.name == "EAGLE-1, EAGLE-2, HASS, FR-Spec"
    fit = form.fit(checkpoint, TargetInfo.of_model(eagle_target()), ())
    assert fit is not None and fit.evidence == Evidence.SIZES
    assert form.fit(checkpoint, TargetInfo.of_model(eagle_target(hidden_size=48)), ()) is None


def test_heads_inside_targets_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(authors_config()))
    save_file({"model.layers.61.eh_proj.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"own prediction heads .*eh_proj"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_target_too_small_for_the_authors_layers_is_refused(tmp_path):
    write(tmp_path, authors_config(), midlayer_state())
    drafter = AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="depends on its target"):
        drafter.taps  # noqa: B018
    told = r"num_hidden_layers=4, the drafter reads its hidden states \[2, 2, 1\], the default, .* in its config.json"
    with pytest.raises(DraftingRefused, match=told):
        drafter.check(eagle_target(num_hidden_layers=4))


SAVED = {
    "plain": {},
    "layers of Qwen3": {"qwen": True},
    "norm_output": {"norm_output": True, "norm_before_residual": True},
    "fc_norm": {"fc_norm": True},
    "several layers": {"layer": {"num_hidden_layers": 3, "attention_bias": True}},
    "whole vocabulary": {"ids": None},
    "parallel": {"kind": "peagle", "mask_token_id": MASK},
}


def test_a_new_drafter_is_loaded_by_speculators(tmp_path):
    """As training begins with it and saves it, in the sizes of its target."""
    target = eagle_target()
    drafter = EagleDrafter(EagleConfig.for_target(target, num_draft_steps=4, draft_vocab_ids=DRAFTED)).eval()
    drafter.reset_parameters(std=0.3)
    drafter.save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path).draft_vocab_ids().tolist() == list(DRAFTED)
    model = loaded_by_speculators(tmp_path)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    reference = Reference("new", model.save_pretrained, lambda *path: unrolled(model, *path), drafter.taps)
    assert parity_of("new", drafter, target, reference, EVERY).difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("variant", SAVED)
def test_what_is_saved_is_loaded_by_speculators_and_by_us(tmp_path, variant):
    drafter = AutoDrafter.from_pretrained(saved(speculators_model(**SAVED[variant]), tmp_path / "theirs"))
    drafter.generation_config.tree_size = 17
    drafter.save_pretrained(tmp_path / "ours")
    document, theirs = (edited(tmp_path / place) for place in ("ours", "theirs"))
    assert "model_type" not in document and "model_type" not in theirs  # vLLM knows the format by that
    assert document["norm_before_residual"] is drafter.config.norm_before_residual
    again = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert again.generation_config.tree_size == 17 and again.config == drafter.config
    model = loaded_by_speculators(tmp_path / "ours")
    logits = in_parallel if variant == "parallel" else unrolled
    if variant == "parallel":  # the loss of its forward wants an output layer of the target
        model.verifier_lm_head.load_state_dict({"weight": torch.zeros_like(model.lm_head.weight)})
    reference = Reference(variant, model.save_pretrained, lambda *path: logits(model, *path), drafter.taps)
    assert parity_of("saved", again, eagle_target(), reference, EVERY).difference < 1e-4


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """By reading of `norm_output`: files that do not tell it, of a drafter that has learned a text by it."""
    torch.manual_seed(0)
    target, prompt, depth = eagle_target(), torch.tensor([[5, 9, 11, 3, 40, 41, 42]]), 4
    text = target.generate(prompt, max_new_tokens=64, do_sample=False)[0]
    taps, following = taps_of(target, text.tolist(), (2, 4, 5))[:-1], text[1:]
    embeds = target.get_input_embeddings()(following).detach()
    starts = torch.arange(len(taps) - depth)
    places, folders = starts[:, None] + torch.arange(depth), {}
    for normed in (False, True):
        config = EagleConfig.for_target(target, target_tap_layers=(2, 4, 5), norm_output=normed)
        drafter = EagleDrafter(config)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
        for _ in range(60):
            states = drafter(taps, embeds, torch.arange(len(taps)), starts, None, depth, None, embeds[places])
            logits = torch.stack([drafter.logits(state) for state in states.hidden_states], dim=1)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following[places + 1].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {name.replace("layers.0.", "midlayer."): each for name, each in drafter.state_dict().items()}
        folders[normed] = tmp_path_factory.mktemp("learned")
        ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "draft_vocab_size": TOKENS}
        write(folders[normed], authors_config(norm_output=True, intermediate_size=64, **ids), state)
    return target, prompt, text, folders


@pytest.mark.parametrize("normed", [False, True])
def test_which_state_is_fed_back_is_tried_where_the_files_do_not_tell(learned, normed, tmp_path):
    target, prompt, text, folders = learned
    chain = {"beam_width": 1, "tree_size": 5, "num_assistant_tokens": 4, "ngram_length": 0, "tree_sizing": "fixed"}

    def rounds(drafter):
        call = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}
        output = target.generate(prompt, assistant_model=drafter, **call)
        assert torch.equal(output.sequences[0], text)
        return output.statistics.rounds

    needed = {}
    for reading in (False, True):
        drafter = AutoDrafter.from_pretrained(folders[normed], **chain)
        drafter.config = replace(drafter.config, norm_output=reading, untold=())
        needed[reading] = rounds(drafter)
    assert needed[normed] < needed[not normed]
    drafter = AutoDrafter.from_pretrained(folders[normed], **chain)
    assert drafter.config.untold == ("norm_output",)
    drafter.save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path).config.untold == ("norm_output",)
    assert needed[normed] <= rounds(drafter) < needed[not normed]
    assert drafter.config.norm_output is normed and drafter.config.untold == ()
    assert drafter.tried["norm_output"].startswith("after the norm" if normed else "before the norm")
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path).config
    assert again.norm_output is normed and again.untold == ()
    given = AutoDrafter.from_pretrained(folders[normed], norm_output=not normed).config
    assert given.norm_output is not normed and given.untold == ()


def test_info_says_which_state_is_fed_back(learned, own_tokenizer, tmp_path):
    target, _, _, folders = learned
    told = describe(str(folders[True]))["drafter"]["state fed back"]
    assert "not told" in told and "--target" in told
    target.save_pretrained(tmp_path)
    own_tokenizer.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["info", str(folders[True]), "--target", str(tmp_path)], catch_exceptions=False)
    assert re.search(r"state fed back: (after|before) the norm.*; (at best )?the target's text has", done.output)
    for flag, expected in ((True, "after the norm"), (False, "before the norm")):
        speculators_model(norm_output=flag).save_pretrained(tmp_path)
        assert expected in describe(str(tmp_path))["drafter"]["state fed back"]
    write(tmp_path, authors_config(hidden_size=-1), midlayer_state())
    assert "hidden_size=-1" in describe(str(tmp_path))["drafter"]["cannot be loaded"]


def test_eagle4_is_not_taken_for_eagle3(tmp_path):
    write(tmp_path, authors_config(architectures=["LlamaForCausalLMEagle4"]), midlayer_state())
    with pytest.raises(ValueError, match="is an EAGLE-4 drafter, whose licence lets no other program read it"):
        AutoDrafter.from_pretrained(tmp_path)


def test_messages_name_the_drafter_what_was_found_and_what_to_do(tmp_path):
    write(tmp_path, authors_config(use_gated_residual=True), midlayer_state())
    with pytest.raises(
        ValueError, match=rf"{tmp_path}.* EAGLE-3: config.json has use_gated_residual=true.*A later version"
    ):
        AutoDrafter.from_pretrained(tmp_path)
    state = {name: each for name, each in midlayer_state().items() if name != "lm_head.weight"}
    write(tmp_path, authors_config(), state)
    told = rf"{tmp_path} drafts {len(DRAFTED)} of {TOKENS} tokens \(draft_vocab_size, vocab_size .*set draft_vocab_size"
    with pytest.raises(ValueError, match=told):
        AutoDrafter.from_pretrained(tmp_path)


def test_files_without_weights_say_which_were_looked_for(tmp_path):
    write(tmp_path, authors_config(), midlayer_state())
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(OSError, match=r"has no model.safetensors, nor pytorch_model.bin, medusa_lm_head.pt"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["mtp2", "jetspec"])
def test_other_types_of_speculators_are_named(kind, tmp_path):
    write(tmp_path, {"speculators_model_type": kind, "block_size": 8}, {"fc.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=rf"no drafter of a known format \(speculators_model_type={kind}.*speculators"):
        AutoDrafter.from_pretrained(tmp_path)
