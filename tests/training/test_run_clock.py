"""A whole run by the clock: prompts, answers and training."""

from __future__ import annotations

import copy
import json
import time
from types import SimpleNamespace

import pytest
from conftest import write_prompts
from training_helpers import decodes_as_plain, end_briefly, planned, run

from hf_hsdraft.cli.train import quick_run as quick
from hf_hsdraft.training.files import RowFolder
from hf_hsdraft.training.loop import budget
from hf_hsdraft.training.loop import run as run_module
from hf_hsdraft.training.loop.budget import TimeBudget
from hf_hsdraft.training.loop.results import untrained, what_is_needed
from hf_hsdraft.training.loop.run import train
from hf_hsdraft.training.loop.run_folder import callback_of, finish, last_checkpoint, steps_done


@pytest.fixture
def clock(monkeypatch):
    """Lets each look at a run's clocks take a second."""
    now = iter(range(10**6))
    for module in (budget, run_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(now)), perf_counter=time.time))


@pytest.mark.parametrize("stream", [False, True], ids=["answers first", "stream"])
def test_a_whole_run_ends_in_its_minutes_and_goes_on_with_more(chatty, tokenizer, tmp_path, clock, stream):
    many = write_prompts(tmp_path / "many.jsonl", 300)
    plan = planned(tmp_path, "hidden-state", prompts=[str(many)], answer_batch_size=2, stream=stream)
    fields = {"eval_steps": 4, "eval_new_tokens": 6, "logging_steps": 1, "disable_tqdm": True}
    answers = lambda: list(RowFolder(tmp_path / "out" / "data").rows())  # noqa: E731
    drafter = train(chatty, tokenizer, plan, {**fields, "max_minutes": 0.5}, report=lambda _: None)
    stored = json.loads((tmp_path / "out" / "clock.json").read_text())
    assert 3 < stored["first"] < 300 and stored["seconds"] < 15  # not all could be answered
    training = callback_of(last_checkpoint(tmp_path / "out"), TimeBudget)
    assert 15 < stored["seconds"] + training["spent"] < 35 and training["ended"]
    assert decodes_as_plain(chatty, drafter)
    steps, answered, said = steps_done(tmp_path / "out"), len(answers()), []
    train(chatty, tokenizer, plan, {**fields, "max_minutes": 0.5}, report=said.append)
    assert said == ["already finished: max_minutes 0.5"]
    held_out = held_out_of(tmp_path / "out")
    drafter = train(chatty, tokenizer, plan, {**fields, "max_minutes": 1.5}, report=lambda _: None)
    assert steps_done(tmp_path / "out") > steps and held_out_of(tmp_path / "out") == held_out
    later = json.loads((tmp_path / "out" / "clock.json").read_text())
    assert later["first"] == stored["first"] and len(answers()) > answered
    assert stream or 20 < later["seconds"] < 40  # 30% of the time
    assert decodes_as_plain(chatty, drafter)


def held_out_of(out):
    return json.loads((out / "figures.json").read_text())["training"]["held_out"]


def test_two_limits_of_minutes_contradict_each_other(chatty, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="max_training_minutes would have no effect with max_minutes"):
        train(chatty, tokenizer, planned(tmp_path, "hidden-state"), {"max_minutes": 1.0, "max_training_minutes": 1.0})
    assert not (tmp_path / "out").exists()


def test_a_quick_run_keeps_what_is_given():
    plan, arguments = quick({"out": "o", "max_length": 512, "drafter": {"num_draft_steps": 3}}, {"max_minutes": 2.0})
    assert plan.max_length == 512 and plan.max_new_tokens < 256 and plan.kinds
    assert plan.drafter == {"num_draft_steps": 3, "draft_vocab_size": 8192}
    assert arguments["max_minutes"] == 2.0 and "candidates" not in arguments
    assert plan.drafter["draft_vocab_size"] >= run_module._LARGE_VOCABULARY, "candidates are compared by default"
    plan, arguments = quick({"out": "o", "prompts": ["p.jsonl"], "family": "block"}, {})
    assert not plan.kinds and plan.drafter == {} and "candidates" not in arguments and arguments["max_minutes"] < 5


def test_a_slow_machine_makes_less_and_ends_in_time(chatty, tokenizer, tmp_path):
    """Inventing and answering all at this pace would take minutes."""
    slow = copy.deepcopy(chatty)
    slow.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    fields = {"kinds": {"question": 1.0, "code": 1.0}, "max_new_tokens": 90, "eval_conversations": 16}
    plan = planned(tmp_path, "hidden-state", prompts=[], **fields)
    arguments = {"max_minutes": 0.5, "eval_steps": 10**6, "eval_new_tokens": 4, "disable_tqdm": True}
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        end_briefly(patch)
        drafter = train(slow, tokenizer, plan, arguments, report=lambda _: None)
    assert time.monotonic() - begin < 55
    assert decodes_as_plain(chatty, drafter)


def test_an_untrained_drafter_is_called_so_and_the_same_command_goes_on(chatty, tokenizer, tmp_path):
    plan, limits = planned(tmp_path, "hidden-state"), {"max_minutes": 4.75}
    run(chatty, tokenizer, plan)
    out = tmp_path / "out"
    finish(out, 8, limits, untrained([{"eval_accuracy_1": 0.02}], 8))
    assert "untrained" in what_is_needed(out, True) and "the machine made 8 steps in its time" in what_is_needed(
        out, True
    )
    assert "same command trains on" in what_is_needed(out, True)
    assert quick({"out": str(out)}, {})[1]["max_minutes"] == pytest.approx(9.5)
    assert quick({"out": str(out)}, {"max_minutes": 6.0})[1]["max_minutes"] == 6.0
    finish(out, 1, {"max_steps": 1.0}, True)
    assert "it was trained for 1 step, " in what_is_needed(out, False) and "wider limit" in what_is_needed(out, False)
    finish(out, 636, limits, True, {"chats": 19, "answers": 227})
    assert "only 227 answer tokens from 19 chats" in (said := what_is_needed(out, True)) and "636" not in said
    assert said.endswith("trains on for as long again and makes more answers")
    finish(out, 636, {"max_steps": 636.0}, True, {"chats": 19, "answers": 227})
    assert what_is_needed(out, True).endswith("start a new run with more prompts")
    finish(out, 636, limits, True, {"chats": 300, "answers": 24_000})
    assert "hundreds" not in what_is_needed(out, True)
    finish(out, 800, limits, untrained([{"eval_accuracy_1": 0.02}, {"eval_accuracy_1": 0.5}, {"loss": 1.0}], 800))
    assert not what_is_needed(out, True) and quick({"out": str(out)}, {})[1]["max_minutes"] == 4.75
