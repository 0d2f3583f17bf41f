"""Runs that were killed, and runs whose files were damaged."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from training_helpers import decodes_as_plain, interrupted, planned, run

from hf_hsdraft.training.loop.budget import TimeBudget, TrainingProgress
from hf_hsdraft.training.loop.run_folder import steps_done
from hf_hsdraft.training.loop.trainer import DrafterTrainer


def _killed(target, tokenizer, plan, arguments) -> None:
    """Runs until the drafter is to be saved, and dies without any clearing up."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        patch.setattr("hf_hsdraft.training.loop.run.save", die)
        run(target, tokenizer, plan, **arguments)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [False, True], ids=["computed", "kept"])
def test_a_run_killed_after_its_last_checkpoint_saves_its_drafter(chatty, tokenizer, tmp_path, monkeypatch, bf16, kept):
    target = copy.deepcopy(chatty).to(torch.bfloat16 if bf16 else torch.float32)
    plan = planned(tmp_path, "hidden-state", cache_taps=kept)
    with monkeypatch.context() as patch:
        patch.setattr("hf_hsdraft.training.loop.run.save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(target, tokenizer, plan, bf16=bf16)
    assert steps_done(tmp_path / "out") == 4 and not (tmp_path / "out" / "model.safetensors").exists()
    for _ in range(2):
        assert decodes_as_plain(target, run(target, tokenizer, plan, bf16=bf16).to(target.dtype))


@pytest.mark.process
def test_a_process_killed_after_its_last_checkpoint_is_resumed(chatty, tokenizer, tmp_path):
    plan = planned(tmp_path, "hidden-state", cache_taps=True)
    process = multiprocessing.get_context("fork").Process(
        target=_killed, args=(chatty, tokenizer, plan, {"bf16": True})
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert decodes_as_plain(chatty, run(chatty, tokenizer, plan, bf16=True))


def test_a_run_stopped_ten_times_is_the_run_that_was_not_stopped(chatty, tokenizer, tmp_path, monkeypatch):
    """It stops in the middle of each step, and shows the tau that an earlier process measured."""
    fields, stops, shown = {"max_steps": 11, "eval_steps": 1}, 0, list[str]()
    plan = planned(tmp_path, "hidden-state", cache_taps=True)
    whole = run(chatty, tokenizer, dataclasses.replace(plan, out=str(tmp_path / "whole")), **fields)
    loss_of, told = DrafterTrainer.compute_loss, TrainingProgress.on_step_end

    def stopping(self, *args, **kwargs):
        nonlocal stops
        loss = loss_of(self, *args, **kwargs)
        if self.state.global_step > stops:
            stops += 1
            raise KeyboardInterrupt
        return loss

    def noting(self, *args, **kwargs):
        told(self, *args, **kwargs)
        shown.append(self._stage.line())

    monkeypatch.setattr(DrafterTrainer, "compute_loss", stopping)
    monkeypatch.setattr(TrainingProgress, "on_step_end", noting)
    for step in range(1, 11):
        with pytest.raises(KeyboardInterrupt):
            run(chatty, tokenizer, plan, **fields)
        assert steps_done(tmp_path / "out") == stops == step
    drafter = run(chatty, tokenizer, plan, **fields)
    for step, line in enumerate(shown[1:], 2):
        assert re.match(rf"training: {step}/11 steps, loss \d+\.\d+, .*tau \d\.\d\d at step {step - 1}", line)
    assert len(shown) == 11 and steps_done(tmp_path / "out") == 11
    for name, weight in whole.state_dict().items():
        assert weight.equal(drafter.state_dict()[name]), name


def _damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.write_bytes({"half": data[: len(data) // 2], "garbage": os.urandom(100), "empty": b""}[how])


@pytest.mark.parametrize("how", ["half", "garbage", "empty"])
@pytest.mark.parametrize("name", ["features-*", "likely-*"])
def test_damaged_hidden_states_are_computed_again(chatty, tokenizer, tmp_path, name, how):
    plan, said = planned(tmp_path, "hidden-state", cache_taps=True), list[str]()
    run(chatty, tokenizer, plan, candidates=4)
    damaged = next((tmp_path / "out" / "features").glob(name))
    _damaged(damaged, how)
    drafter = run(chatty, tokenizer, plan, said.append, candidates=4, max_steps=6)
    assert decodes_as_plain(chatty, drafter)
    lines = [line for line in said if "damaged" in line]
    assert len(lines) == 1 and damaged.name in lines[0] and "again" in lines[0]


@pytest.mark.parametrize("how", ["half", "garbage"])
@pytest.mark.parametrize("name", ["training_plan.json", "data/recipe.yaml", "data/data/*.parquet"])
def test_other_damaged_files_are_errors_that_name_file_and_remedy(chatty, tokenizer, tmp_path, name, how):
    plan = planned(tmp_path, "hidden-state")
    run(chatty, tokenizer, plan)
    damaged = next((tmp_path / "out").glob(name))
    _damaged(damaged, how)
    with pytest.raises(ValueError, match=r"is damaged \(.*\): delete ") as error:
        run(chatty, tokenizer, plan, max_steps=6)
    assert str(damaged) in str(error.value)


def test_a_damaged_record_of_the_end_is_written_again(chatty, tokenizer, tmp_path):
    plan, said = planned(tmp_path, "hidden-state"), list[str]()
    run(chatty, tokenizer, plan)
    record = tmp_path / "out" / "finished.json"
    _damaged(record, "half")
    run(chatty, tokenizer, plan, said.append)
    assert not any("already finished" in line for line in said)
    assert json.loads(record.read_text())["steps"] == 4


def test_a_damaged_clock_is_an_error_that_names_file_and_remedy(tmp_path):
    TimeBudget(10, tmp_path, 0.3).begin_training(1, {})
    _damaged(tmp_path / "clock.json", "half")
    with pytest.raises(ValueError, match=r"clock\.json is damaged \(.*\): delete it"):
        TimeBudget(10, tmp_path)
