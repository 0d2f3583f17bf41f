"""What tests of training need: a short plan, a short run, and a run that is killed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_prompts
from hub_server import HubServer
from huggingface_hub import HfApi, constants

from hf_hsdraft.hub import publication
from hf_hsdraft.training.data.conversations import Conversation
from hf_hsdraft.training.data.plan import TrainingPlan
from hf_hsdraft.training.families import hidden_state
from hf_hsdraft.training.loop import results
from hf_hsdraft.training.loop.run import train
from hf_hsdraft.training.loop.trainer import DrafterTrainer


def chat_of(pairs: Iterable[tuple[str, str]]) -> Conversation:
    return Conversation.of([{"role": role, "content": text} for role, text in pairs])


def planned(folder: Path, family: str, **fields: Any) -> TrainingPlan:
    """A plan of 12 prompts in a folder, whose run is written beside them; drafters have K = 3."""
    given = {
        "prompts": [str(write_prompts(folder / "prompts.jsonl", 12))], "out": str(folder / "out"), "family": family,
        "eval_conversations": 3, "eval_prompts": 1, "max_new_tokens": 12, "answer_batch_size": 5,
        "drafter": {"num_draft_steps": 3, "tree_size": 6},
    }  # fmt: skip
    return TrainingPlan(**{**given, **fields})


def run(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    report: Callable[[str], object] = lambda _: None,
    whole: bool = False,
    **arguments: Any,
) -> Any:
    """The drafter after four steps, evaluated at the second and the fourth; `whole` as in `end_briefly`."""
    fields = {"max_steps": 4, "eval_steps": 2, "eval_new_tokens": 6, "logging_steps": 1, "disable_tqdm": True}
    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            end_briefly(patch)
        return train(target, tokenizer, plan, {**fields, **arguments}, report=report)


def end_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs draw no pictures and record few words of the target: both take longer than a few steps."""
    monkeypatch.setattr(results, "draw_pictures", lambda *_: [])
    monkeypatch.setattr(hidden_state, "_TOKENS", 6)


def decodes_as_plain(target: Any, drafter: Any) -> bool:
    ids, call = torch.tensor([[5, 6, 7, 8]]), {"max_new_tokens": 12, "do_sample": False}
    return target.generate(ids, **call, assistant_model=drafter).tolist() == target.generate(ids, **call).tolist()


def own_hub(monkeypatch: Any) -> HubServer:
    """A Hub on the loopback, to which runs push as `user` with the token `hf_secret`."""
    hub = HubServer(tokens={"hf_secret": "user"})
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(publication, "HfApi", functools.partial(HfApi, endpoint=hub.url))
    return hub


def interrupted(*_args: Any, **_kwargs: Any) -> None:
    raise KeyboardInterrupt


def kill_at_step_three(monkeypatch: Any) -> list[int]:
    """Lets the next run die at its fourth loss. Returns the steps of all losses, to which later runs add theirs."""
    original, steps = DrafterTrainer.compute_loss, list[int]()

    def dies_at_step_three(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.state.global_step)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "compute_loss", dies_at_step_three)
    return steps
