"""`hsdraft make plan`: its arithmetic against rounds that are played out, and what it recommends."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, as_plain, make_drafter, make_target, unloadable
from family_helpers import near
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, CachebackDrafter, CausalLMDrafter
from hf_hsdraft.cli import main as cli
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.methods.cascade import planning
from hf_hsdraft.methods.cascade.estimate_command import estimate_cascade, estimated_levels, needed_acceptance
from hf_hsdraft.methods.cascade.hierarchy import (
    TARGET,
    Acceptance,
    Curve,
    Drafting,
    Levels,
    best_cascade,
    best_single,
    cascades,
    decoding,
)
from hf_hsdraft.methods.cascade.planning import Note, Notes
from hf_hsdraft.methods.estimate.estimates import Device, Forward


def made(middle: float, words: float = 0.5, seconds: float = 0.1, rest: float = 0.0, below: str = "words") -> Levels:
    """N-grams, a middle model of `seconds` a forward, and a target of one second; a token more costs a hundredth."""
    forwards = {"middle": Curve(((1, seconds), (2, 1.01 * seconds))), "target": Curve(((1, 1.0), (2, 1.01)))}
    acceptances = {
        (below, "middle"): Acceptance((words,)),
        (below, "target"): Acceptance((words,)),
        ("middle", "target"): Acceptance((middle,)),
    }
    first = {below: Drafting(Curve(((1, 0.001),))), "middle": Drafting(Curve(((1, seconds), (2, 2 * seconds))))}
    return Levels(first, forwards, acceptances, rest)


def play(levels: Levels, names, tokens, rounds: int = 4000) -> tuple[float, float]:
    """Tokens and seconds of a round, played out: the algorithm written down, with dice for acceptance."""
    dice, emitted, seconds = random.Random(0), 0, 0.0

    def accepted(pair, length: int) -> int:
        count, roll = 0, dice.random()
        while count < length and roll < levels.acceptances[pair].at_least(count + 1):
            count += 1
        return count

    def hand_up(level: int) -> int:
        nonlocal seconds
        if level == 0:
            seconds += levels.first[names[0]].seconds(tokens[0])
            return tokens[0]
        held = 0
        while held < tokens[level]:
            length = hand_up(level - 1)
            seconds += levels.forwards[names[level]](length + 1)
            held += accepted((names[level - 1], names[level]), length) + 1
        return held

    for _ in range(rounds):
        length = hand_up(len(names) - 1)
        seconds += levels.forwards["target"](length + 1) + levels.rest
        emitted += accepted((names[-1], "target"), length) + 1
    return emitted / rounds, seconds / rounds


@pytest.mark.parametrize(
    ("names", "tokens"),
    [(("words",), (4,)), (("middle",), (6,)), (("words", "middle"), (3, 8)), (("words", "middle"), (1, 1)),
     (("words", "small", "middle"), (2, 3, 9))],
)  # fmt: skip
def test_the_arithmetic_is_that_of_rounds_played_out(names, tokens):
    levels = made(0.85, rest=0.03)
    for pair, share in {("small", "middle"): 0.8, ("words", "small"): 0.5, ("small", "target"): 0.7}.items():
        levels.acceptances[pair] = Acceptance((share,))
    levels = replace(levels, forwards={**levels.forwards, "small": Curve(((1, 0.02),))})
    assert {len(each.names) for each in cascades(levels)} == {2, 3}
    plan = decoding(levels, names, tokens)
    emitted, seconds = play(levels, names, tokens)
    assert plan.emitted == pytest.approx(emitted, rel=0.03)
    assert plan.seconds == pytest.approx(seconds, rel=0.03)
    assert plan.speed_up == pytest.approx(plan.emitted * 1.0 / plan.seconds)


def test_curves_and_acceptances_go_on_beyond_what_was_measured():
    curve = Curve(((1, 1.0), (3, 2.0), (5, 4.0)))
    assert [curve(count) for count in (1, 2, 3, 4, 7)] == [1.0, 1.5, 2.0, 3.0, 6.0]
    known = Acceptance(tuple(0.8**count for count in range(1, 9)))
    assert known.at_least(12) == pytest.approx(0.8**12) and known.at_least(0) == 1.0
    assert Acceptance((0.5, 0.6)).at_least(2) == 0.5, "what is accepted further is accepted so far"


def pays(levels: Levels) -> bool:
    cascade = best_cascade(levels)
    return cascade is not None and cascade.speed_up > max(best_single(levels, name).speed_up for name in levels.first)


def test_a_good_middle_model_pays_and_a_bad_or_slow_one_does_not():
    assert pays(made(0.95)) and best_cascade(made(0.95)).names == ("words", "middle")
    assert not pays(made(0.5))
    assert best_cascade(made(0.95, seconds=1.5)) is None, "a model as slow as the target is no middle one"
    needed = needed_acceptance(made(0.9))
    assert 0.5 < needed < 0.95 and pays(made(needed + 0.01)) and not pays(made(needed - 0.01))


def test_no_drafter_is_planned_deeper_than_it_drafts():
    levels = made(0.95, words=0.9)
    levels.first["words"] = Drafting(Curve(((1, 0.001),)), {3: 0.5, 1: 0.5})
    assert max(plan.tokens[0] for plan in cascades(levels) if plan.names[0] == "words") == 3
    assert best_single(levels, "words").tokens == (3,)


def test_what_was_measured_decides_before_what_was_calculated():
    plan = decoding(made(0.9), ("words", "middle"), (3, 6))
    saved, alone = planning.saved_title(plan), {"plain": 1.0, "words, own defaults": plan.speed_up - 0.1}
    assert planning.recommended(alone, plan) == saved
    assert planning.recommended(alone, None) == "words, own defaults"
    assert planning.recommended({**alone, "words, own defaults": plan.speed_up + 0.1}, plan) == "words, own defaults"
    measured = {"plain": 1.0, plan.title: 9.0, saved: 0.9, "words, own defaults": 0.8}
    assert planning.recommended(measured, plan) == "plain", "the plan is decoded as calculated only to be compared"


@pytest.fixture(scope="module")
def target():
    return make_target(seed=3, num_hidden_layers=6)


def inputs_of(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, VOCAB, (1, 9), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]


def test_notes_become_acceptances_lengths_and_seconds(target):
    notes = [Note(3, 3, 3, 1.0, first=True), Note(3, 3, 1, 0.2), Note(3, 1, 1, 0.4), Note(3, 0, 0, 0.3)]
    assert planning.acceptance_of(notes).reached == (1.0, 0.5, 0.5)
    drafting = planning.drafting_of([*notes, Note(1, 1, 0, 0.1)])
    assert drafting.lengths == {0: 0.25, 1: 0.25, 3: 0.5}
    assert drafting.seconds(3) == pytest.approx(0.3) and drafting.seconds(2) == pytest.approx(0.2)
    noted = Notes(target.device)
    drafter = planning.measured_drafter(CausalLMDrafter(copy.deepcopy(target)))  # all its tokens are right
    call = {"do_sample": False, "max_new_tokens": 41, "return_dict_in_generate": True, "streamer": noted}
    for _ in range(2):
        output = target.generate(**inputs_of(1)[0], **call, assistant_model=drafter)
    count = len(output.statistics.accepted_lengths)
    assert [note.accepted for note in noted.drafts] == 2 * output.statistics.accepted_lengths
    assert [note.nodes for note in noted.drafts] == 2 * output.statistics.drafted_nodes
    assert [note.first for note in noted.drafts] == 2 * [True, *[False] * (count - 1)]
    assert planning.acceptance_of(noted.drafts).reached == (1.0,) * 16
    assert all(note.seconds > 0 for note in noted.drafts)


def test_texts_too_short_to_draft_in_are_told(target):
    with pytest.raises(ValueError, match="texts end at once: expected prompts with answers of three tokens or more"):
        planning.plain_texts(target, inputs_of(1), 2)


def test_measured_drafts_learn_nothing(target, tmp_path):
    """What is drafted from past texts would be timed as the drafter's, and would change later drafts."""
    drafter = make_drafter(target)
    drafter.generation_config.history = str(tmp_path)
    call = {"do_sample": False, "max_new_tokens": 21, "assistant_model": planning.measured_drafter(drafter)}
    target.generate(**inputs_of(1)[0], **call)
    assert not list(tmp_path.iterdir()) and drafter.generation_config.history == str(tmp_path)


def quick_middle(monkeypatch, is_middle) -> None:
    """Lets a forward of the middle model take a third of a step of the target: how quick tiny models are is chance."""
    decoded = planning.plain_texts
    monkeypatch.setattr(planning, "forward_curve", lambda model, ids: Curve(((1, 0.01 if is_middle(model) else 0.03),)))
    monkeypatch.setattr(planning, "plain_texts", lambda *given: (0.03, decoded(*given)[1]))


def measured(monkeypatch, target, drafters, count: int, new_tokens: int) -> tuple[Levels, str]:
    quick_middle(monkeypatch, lambda model: model is drafters["middle"].model)
    levels, lines = planning.measured_levels(target, drafters, inputs_of(count), new_tokens)
    return levels, "\n".join(lines)


@pytest.mark.slow
def test_what_is_measured_becomes_a_plan_that_decodes_exactly(target, monkeypatch):
    """A drafter for the target fits its copy."""
    middle = near(target, 0.001)
    drafters = {"n-grams": CachebackDrafter(), "middle": CausalLMDrafter(middle), "states": make_drafter(target)}
    levels, remarks = measured(monkeypatch, target, drafters, 2, 24)
    assert set(levels.acceptances) == {("n-grams", "middle"), ("states", "middle"), ("middle", TARGET)}
    assert levels.acceptances["middle", TARGET].at_least(1) > 0.7, "it is nearly the target"
    assert "drafts of middle for target: " in remarks and "so few that figures from these are rough" in remarks
    cascade = best_cascade(levels)
    assert cascade.title in "\n".join(planning.arithmetic(levels, cascade))
    for system in planning.systems_of(drafters, target, cascade):
        assert as_plain(target, system.drafter, inputs_of(1)[0], max_new_tokens=24).statistics.rounds > 0
    names = [system.name for system in planning.systems_of(drafters, target, cascade)]
    alone = [f"{name}, own defaults" for name in drafters]
    assert names == [*alone, cascade.title, f"{cascade.title}, as saved"]
    made = planning.cascade_of(cascade, drafters)
    assert made.tokens == cascade.tokens and made.generation_config.tree_sizing == "cost"


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"num_hidden_layers": 2}, {"hidden_size": 16}])
def test_a_drafter_of_a_middle_model_is_planned_below_it(target, other, monkeypatch):
    """The middle model has fewer layers or another width than the target, so the drafter fits only that model."""
    middle = make_target(seed=5, **other)
    drafters = {"n-grams": CachebackDrafter(), "middle": CausalLMDrafter(middle), "states": make_drafter(middle)}
    levels, remarks = measured(monkeypatch, target, drafters, 1, 16)
    assert f"left out: states for target: the target has {next(iter(other))}=" in remarks
    assert {plan.names for plan in cascades(levels)} == {("n-grams", "middle"), ("states", "middle")}
    assert {system.name for system in planning.systems_of(drafters, target)} == {
        "n-grams, own defaults", "middle, own defaults",
    }  # fmt: skip
    cascade = planning.cascade_of(decoding(levels, ("states", "middle"), (3, 5)), drafters)
    assert sum(as_plain(target, cascade, inputs_of(1)[0], max_new_tokens=16).statistics.drafted_nodes) > 0
    monkeypatch.setattr(planning, "forward_curve", lambda *given: Curve(((1, 0.03),)))
    levels, lines = planning.measured_levels(target, drafters, inputs_of(1), 16)
    assert best_cascade(levels) is None and not levels.acceptances
    assert "left out: n-grams for middle: a forward of middle takes as long as a plain step of the target" in lines
    lonely = {name: drafters[name] for name in ("n-grams", "states")}
    with pytest.raises(DraftingRefused, match=r"states fits no model here. target: the target has"):
        planning.measured_levels(target, lonely, inputs_of(1), 16)


@pytest.fixture
def arguments(target, tokenizer, tmp_path) -> list[str]:
    """Those of `hsdraft make plan` for a target and a middle model that were saved."""
    for name, model in (("middle", near(target, 0.001, layers=4)), ("target", target)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    names = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "middle")]
    return ["make", "plan", *names, "--limit", "1", "--max-new-tokens", "16"]


@pytest.mark.slow
def test_the_command_prints_its_arithmetic(arguments, tmp_path, monkeypatch):
    quick_middle(monkeypatch, lambda model: model.config.num_hidden_layers == 4)
    result = CliRunner().invoke(cli.app, [*arguments, "--measure"])
    assert result.exit_code == 0, result.output
    for words in ("forward of middle, ms by tokens", "speed-up: ", "recommended: ", "expected and measured"):
        assert words in result.output
    assert "middle, own defaults" in result.output and "no --drafter is named" not in result.output
    assert str(tmp_path) not in result.stdout  # a status line on standard error names what it loads
    alone = CliRunner().invoke(cli.app, ["make", "plan", "--target", str(unloadable(tmp_path / "nothing"))])
    assert alone.output.startswith("no --drafter is named: only n-grams are planned")
    twice = CliRunner().invoke(cli.app, [*arguments, "--drafter", str(tmp_path / "middle")])
    assert "two drafters have one name" in str(twice.exception)


@pytest.mark.parametrize("pays", [True, False])
def test_a_hierarchy_is_saved_only_where_it_is_recommended(arguments, tmp_path, monkeypatch, pays):
    levels = replace(made(0.9, below="n-grams"), plain=1000.0 if pays else 0.001)
    if not pays:
        levels = replace(levels, forwards={name: Curve(((1, 0.0001),)) for name in levels.forwards}, rest=100.0)
    monkeypatch.setattr(planning, "measured_levels", lambda *given: (levels, []))
    out = tmp_path / "out"
    command = [*arguments, "--out", str(out)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert out.exists() == pays == ("saved: " in result.output and "not saved" not in result.output)
    assert ("--measure decodes with it" in result.output) == pays
    if pays:
        assert AutoDrafter.from_pretrained(out).generation_config.tree_sizing == "cost"
    out.mkdir(exist_ok=True)
    (out / "mine.txt").write_text("mine")
    monkeypatch.setattr(planning, "measured_levels", None)  # nothing is measured for a folder that is full
    refused = CliRunner().invoke(cli.app, command)
    assert isinstance(refused.exception, FileExistsError) and "is not empty" in str(refused.exception)


DEVICE = Device(bytes_per_second=1e9, flops_per_second=1e11)


def test_forwards_are_estimated_by_reading_or_by_products(target):
    """Whichever takes longer, written down."""
    forward, config = Forward.of(target.config), target.config
    weights = sum(p.numel() for p in target.parameters()) - target.model.embed_tokens.weight.numel()
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 100
    for count in (1, 20, 100, 400):
        longer = max((weights + keys) * 2 / 1e9, 2 * weights * count / 1e11)
        assert forward.seconds(count, DEVICE, 100) == pytest.approx(longer)


def test_the_documented_hierarchy_pays_as_documented():
    """The shapes of Llama-3.1-8B and Llama-3.2-1B on an H100, at shares of 0.4, 0.4 and 0.8; see docs/drafters.md."""
    shape = {"vocab_size": 128256, "num_key_value_heads": 8}
    large = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **shape
    )
    small = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64,
        tie_word_embeddings=True, **shape,
    )  # fmt: skip
    lines = estimate_cascade(estimated_levels(large, small, (0.4, 0.4, 0.8), Device(3.35e12, 0.99e15), 1024))
    assert any(line.startswith("the hierarchy pays: 2.331 against 2.023 ") for line in lines), lines


def test_a_hierarchy_is_estimated_by_sizes(target, tmp_path):
    small = near(target, 0.0, layers=1).config
    levels = estimated_levels(target.config, small, (0.4, 0.4, 0.9), DEVICE, 100)
    assert "does not pay" in " ".join(estimate_cascade(levels, other=50.0))
    with pytest.raises(ValueError, match="expected three numbers of 0 or more and below 1"):
        estimated_levels(target.config, small, (0.4, 1.0, 0.9), DEVICE, 100)
    target.config.save_pretrained(tmp_path / "target")
    small.save_pretrained(tmp_path / "small")
    arguments = ["estimate", "hierarchy", str(tmp_path / "target"), str(tmp_path / "small")]
    result = CliRunner().invoke(cli.app, [*arguments, "--speed-up", "2"])
    assert result.exit_code == 0 and "of the best drafter alone" in result.output
    assert "a vocabulary of equal size does not say so" in result.output
    AutoConfig.from_pretrained(tmp_path / "small", vocab_size=VOCAB + 600).save_pretrained(tmp_path / "other")
    misfit = CliRunner().invoke(cli.app, [*arguments[:3], str(tmp_path / "other")])
    assert misfit.exit_code == 1 and "vocab_size=697" in str(misfit.exception)
    for shares, told in (("0.4,x", "found '0.4,x'"), ("0.4,0.4,1.0", "below 1"), ("0.4,0.4", "three numbers")):
        refused = CliRunner().invoke(cli.app, [*arguments, "--shares", shares])
        assert refused.exit_code == 2 and "--shares" in refused.output and told in refused.output, refused.output
