"""Questions that files leave open: the trial on the target finds the reading that a drafter has learned."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import edited
from oracles import mtp_alone_parity, mtp_parity
from oracles.block_parity import CASES as BLOCK_CASES
from oracles.block_variants import Variant, of_variant
from oracles.eagle_parity import eagle_target
from oracles.format_parity import taps_of, texts_of, tiny_target
from oracles.tiny import tiny_config, tiny_model
from transformers import LlamaForCausalLM, MambaForCausalLM, Qwen3VLForConditionalGeneration

from hf_hsdraft import AutoDrafter
from hf_hsdraft.cli._describe import describe
from hf_hsdraft.methods.block.drafter import BlockDrafter
from hf_hsdraft.methods.eagle.drafter import EagleConfig, EagleDrafter
from hf_hsdraft.methods.mtp.drafter import MtpDrafter
from hf_hsdraft.methods.published import readings
from hf_hsdraft.methods.published.readings import QUESTIONS

PROMPT = torch.tensor([[5, 9, 11, 3, 40, 41, 42]])
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}}
SCALING = next(case.target for case in BLOCK_CASES if "target that scales" in case.name)


def block(target, **fields):
    taps = {"target_tap_layers": (1, 3, 6), "num_draft_steps": 5, "num_hidden_layers": 1, "markov_rank": 0}
    drafter = BlockDrafter.for_target(target, **{**taps, **fields})
    return drafter


def eagle(target, **fields):
    return EagleDrafter(EagleConfig.for_target(target, target_tap_layers=(1, 3, 5), **fields))


def uneven_eagle(target, **fields):
    drafter = eagle(target, **fields)
    torch.nn.init.uniform_(drafter.layers[0].input_layernorm.weight, -2, 2)  # else norming twice is norming once
    return drafter


OPEN = {
    "norm_output": (eagle, {}, {}),
    "norm_before_residual": (eagle, {}, {}),
    "norms_state_twice": (uneven_eagle, {}, {}),
    "sample_from_anchor": (block, {}, {}),
    "embedding_scale": (block, {}, SCALING),
    "last_tap_is_normed": (block, {}, {}),
    "rotates_whole_heads": (block, {"rope": PARTIAL}, {}),
}


def learn(target, drafter, text: list[int], steps: int = 60, lr: float = 3e-3) -> None:
    """Trains a drafter on a text, as it reads it."""
    tokens, depth = torch.tensor(text), 4
    taps = taps_of(target, text, drafter.taps_of(target))[:-1]
    starts = torch.arange(len(taps) - depth)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    optimizer = torch.optim.AdamW([each for each in drafter.parameters() if each.requires_grad], lr=lr)
    for _ in range(steps):
        states = drafter.trial_states(taps, tokens, starts, depth, weights)[:depth]
        logits = torch.stack([drafter.logits(state, weights) for state in states], dim=1)
        wanted = tokens[starts[:, None] + 2 + torch.arange(depth)]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["norm_before_residual", "norms_state_twice"])
@torch.no_grad()
def test_a_drafter_read_otherwise_is_one_that_was_made_so(name):
    """In each of its layers, where all of them read embeddings."""
    target = tiny_target()
    fields = {"num_hidden_layers": 2, "windows": (None, None), "all_read_embeddings": True}
    reread, made = (uneven_eagle(target, **fields, **{name: value}) for value in (False, True))
    made.load_state_dict(reread.state_dict())
    weights = made.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    tokens = torch.arange(5, 17)
    taps = taps_of(target, tokens.tolist(), made.taps)[:-1]
    expected, before = (each.trial_states(taps, tokens, torch.arange(8), 3, weights) for each in (made, reread))
    reread.reread(**{name: True})
    found = reread.trial_states(taps, tokens, torch.arange(8), 3, weights)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not torch.allclose(before[0], expected[0])


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OPEN for value in QUESTIONS[name].readings])
def test_a_trial_finds_what_a_drafter_has_learned(name, value):
    make, fields, kind = OPEN[name]
    torch.manual_seed(0)
    target = tiny_target(**kind)
    text = target.generate(PROMPT, max_new_tokens=64, do_sample=False)[0].tolist()
    drafter = make(target, **fields, **({name: value} if name != "sample_from_anchor" else {}))
    drafter.reread(**{name: value})
    learn(target, drafter, text, *((150, 1e-2) if name == "embedding_scale" else ()))  # layers undo a factor first
    drafter.reread(**{name: next(iter(QUESTIONS[name].readings))}, untold=(name,))
    drafter.generation_config.num_assistant_tokens = 4
    drafted = target.generate(PROMPT, max_new_tokens=64, do_sample=False, assistant_model=drafter)
    assert drafted[0].tolist() == text
    assert getattr(drafter.config, name) == value and drafter.config.untold == ()
    assert drafter.tried[name].startswith(QUESTIONS[name].readings[value])


@pytest.mark.parametrize("value", [True, False])
def test_a_trial_finds_the_state_that_a_layer_for_multi_token_prediction_has_learned(value, tmp_path):
    pytest.importorskip("speculators")
    target = mtp_alone_parity.target_of.__wrapped__("qwen3")
    torch.nn.init.uniform_(target.model.norm.weight, -2, 2)  # else both states are almost the same to the layer's norm
    model = mtp_alone_parity.model_of(target)
    model.save_pretrained(tmp_path)
    drafter = AutoDrafter.from_pretrained(tmp_path, last_tap_is_normed=value)
    assert drafter.config.untold == () and drafter.config.last_tap_is_normed is value
    text = target.generate(PROMPT, max_new_tokens=96, do_sample=False)[0].tolist()
    inner = drafter.of_target(target)
    for part in inner.layers.own_parts():
        part.requires_grad_(True)
    inner.parameters = lambda: [each for part in inner.layers.own_parts() for each in part.parameters()]
    learn(target, inner, text, 40)
    inner.reread(last_tap_is_normed=True, untold=("last_tap_is_normed",))
    drafted = target.generate(PROMPT, max_new_tokens=96, do_sample=False, assistant_model=drafter)
    assert drafted[0].tolist() == text
    assert inner.config.last_tap_is_normed is value and inner.config.untold == ()
    assert drafter.tried["last_tap_is_normed"].startswith(QUESTIONS["last_tap_is_normed"].readings[value])
    assert drafter.taps_of(target) == ((4,) if value else (5,))
    lines = describe(str(tmp_path))["drafter"]
    assert "not told by the files" in lines["last layer's output"]


@pytest.mark.parametrize("value", [True, False])
def test_a_trial_finds_the_output_that_layers_for_multi_token_prediction_hand_on(value, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case = next(case for case in mtp_parity.CASES if case.model_type == "glm4_moe")
    target = mtp_parity.published(case, tmp_path).target
    text = target.generate(PROMPT, max_new_tokens=96, do_sample=False)[0].tolist()
    drafter = MtpDrafter.for_target(target, hands_on_normed=value)
    assert drafter.config.untold == () and drafter.config.hands_on_normed is value
    norm = drafter.layers.model.layers[0].post_norm.weight
    torch.nn.init.uniform_(norm, -2, 2)  # else both outputs are almost the same to the next layer's norm
    for part in drafter.layers.own_parts():
        part.requires_grad_(True)
    drafter.parameters = lambda: [each for part in drafter.layers.own_parts() for each in part.parameters()]
    learn(target, drafter, text, 40)
    asked = MtpDrafter.for_target(target)
    assert asked.config.untold == ("hands_on_normed",) and asked.layers.model is drafter.layers.model
    drafted = target.generate(PROMPT, max_new_tokens=96, do_sample=False, assistant_model=asked)
    assert drafted[0].tolist() == text
    assert asked.config.hands_on_normed is value and asked.config.untold == ()
    assert asked.tried["hands_on_normed"].startswith(QUESTIONS["hands_on_normed"].readings[value])
    again = MtpDrafter.for_target(target)
    again.settle(target, text)
    assert again.config.hands_on_normed is value and again.trials == 0  # found by the earlier one


def files(tmp_path, target, **variant):
    of_variant(Variant(**variant), target).save(tmp_path)
    return tmp_path


def test_what_the_files_tell_is_not_asked(tmp_path):
    target = tiny_target()
    assert AutoDrafter.from_pretrained(files(tmp_path, target)).config.untold == ("embedding_scale",)
    told = {"input_embedding_scale": 1.0}
    assert AutoDrafter.from_pretrained(files(tmp_path, target, own=told)).config.untold == ()
    last = files(tmp_path, target, own=told, taps=(1, 3, 6))
    assert AutoDrafter.from_pretrained(last).config.untold == ("last_tap_is_normed",)
    part = files(tmp_path, target, own=told, top={"partial_rotary_factor": 0.5})
    assert AutoDrafter.from_pretrained(part).config.untold == ("rotates_whole_heads",)


def test_an_argument_decides(tmp_path):
    folder = files(tmp_path, tiny_target())
    for value in QUESTIONS["embedding_scale"].readings:
        config = AutoDrafter.from_pretrained(folder, embedding_scale=value).config
        assert config.embedding_scale == value and config.untold == ()
    with pytest.raises(ValueError, match=r"embedding_scale=3.0 is invalid: expected None or 1.0"):
        AutoDrafter.from_pretrained(folder, embedding_scale=3.0)


def test_a_result_is_kept_for_later_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = tiny_target(**SCALING)
    target.config._name_or_path = target.name_or_path = "some/target"
    (tmp_path / "drafter").mkdir()
    monkeypatch.setattr(readings, "_loss", lambda drafter, *_: 1.0 if drafter.config.embedding_scale else 2.0)
    folder, ran = files(tmp_path / "drafter", target), []
    target.register_forward_pre_hook(lambda *_: ran.append(1))
    first, second = (AutoDrafter.from_pretrained(folder) for _ in range(2))
    first.settle(target, PROMPT[0].tolist())
    assert ran and first.tried["embedding_scale"]
    ran.clear()
    second.settle(target, PROMPT[0].tolist())
    assert not ran and second.tried == first.tried and not second.trials
    assert second.config.embedding_scale == first.config.embedding_scale == 1.0
    stored = json.loads((tmp_path / "cache" / "hf_hsdraft" / "readings.json").read_text())
    assert len(stored) == 1
    lines = describe(str(folder))["drafter"]
    assert lines["embeddings of a target that scales them, for some/target"].endswith(
        "1.00 nats a token, otherwise 2.00"
    )
    edited(folder, block_size=4)  # other files
    AutoDrafter.from_pretrained(folder).settle(target, PROMPT[0].tolist())
    assert ran


def test_a_question_that_the_target_cannot_answer_is_left_open(tmp_path):
    target = tiny_target()
    drafter = AutoDrafter.from_pretrained(files(tmp_path, target))
    texts_of(target, drafter)
    assert drafter.config.untold == ("embedding_scale",) and not drafter.tried
    drafter.settle(target, [])
    assert not drafter.trials


def test_a_drafter_that_knows_nothing_of_the_target_keeps_the_usual_reading(tmp_path):
    target = tiny_target(**SCALING)
    drafter = AutoDrafter.from_pretrained(files(tmp_path, target))
    for _ in range(5):
        drafter.settle(target, PROMPT[0].tolist())
    assert drafter.config.embedding_scale is None and drafter.config.untold == ("embedding_scale",)
    assert drafter.trials == 3 and "a trial does not decide" in drafter.tried["embedding_scale"]


def test_a_layout_that_is_not_told_is_drafted_as_deep_as_both_allow():
    drafter = block(eagle_target(), target_tap_layers=(1, 3, 5))
    drafter.reread(untold=("sample_from_anchor",))
    assert drafter.num_draft_steps == 4
    drafter.reread(untold=())
    assert drafter.num_draft_steps == 5


@pytest.mark.parametrize("kind", [LlamaForCausalLM, MambaForCausalLM, Qwen3VLForConditionalGeneration])
def test_a_trials_text_is_continued_as_by_plain_decoding(kind):
    target = tiny_model(kind, tiny_config(kind.config_class))
    plain = target.generate(PROMPT, max_new_tokens=33, do_sample=False, eos_token_id=None)[0].tolist()
    keeping, deltas = [each for each in target.modules() if hasattr(each, "rope_deltas")], torch.tensor([[-9], [-7]])
    for module in keeping:
        module.rope_deltas = deltas  # of an earlier call's images
    assert readings._continued(target, PROMPT[0].tolist(), 40) == plain
    assert all(module.rope_deltas is deltas for module in keeping)
