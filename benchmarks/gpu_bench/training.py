"""Speed of training a drafter, by the project's own loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from hf_hsdraft.bench.calls import PeakMemory
from hf_hsdraft.core.progress import Reporter
from hf_hsdraft.training.data.conversations import TokenizedConversation
from hf_hsdraft.training.data.features import read_features
from hf_hsdraft.training.families.trainable import TRAINABLE
from hf_hsdraft.training.loop.arguments import training_arguments
from hf_hsdraft.training.loop.trainer import DrafterTrainer

from .plan import Settings

_CONVERSATIONS, _LOGGED = 32, 4  # the first log has the warm-up
_LOOK = "target in each step", "hidden states kept"


class _Until(TrainerCallback):
    """Ends training after some seconds, but not before three logs."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= time.monotonic() > self._end and state.global_step >= 3 * _LOGGED


def measure_training(target: Any, settings: Settings) -> list[dict[str, Any]]:
    """Trains a fresh hidden-state drafter on random tokens; returns a row of figures for each source of features.

    The target reads the conversations in each step, or its hidden states are kept in memory (a run keeps them on disk).
    """
    vocab_size, generator = target.config.vocab_size, torch.Generator().manual_seed(settings.seed)
    chats = []
    for _ in range(_CONVERSATIONS):
        ids = torch.randint(1, vocab_size, (settings.train_length,), generator=generator)
        chats.append(TokenizedConversation(ids, torch.arange(len(ids)) >= len(ids) // 4))
    return [_trained(target, chats, look, settings) for look in _LOOK]


def _trained(target: Any, chats: Sequence[TokenizedConversation], look: str, settings: Settings) -> dict[str, Any]:
    family, device = TRAINABLE["hidden-state"], target.device
    torch.manual_seed(settings.seed)
    memory = PeakMemory(device)
    held = memory.start()
    drafted = list(range(target.config.vocab_size // 4))
    drafter = family.fresh(target, {}, settings.train_length, lambda: drafted).to(device)
    dataset: Sequence[Any] = chats
    if look != _LOOK[0]:
        taps = family.taps(drafter, target)
        dataset = [features for chat in chats for features in read_features(target, taps, [chat])]
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            "bf16": settings.dtype == "bfloat16",
            "per_device_train_batch_size": settings.train_batch,
            "logging_steps": _LOGGED,
            "max_steps": 10_000,
            "eval_strategy": "no",
            "save_strategy": "no",
            "load_best_model_at_end": False,
            "seed": settings.seed,
        }
        args = training_arguments(Path(folder), {**family.arguments, **fields}, device.type)
        until = [_Until(settings.train_seconds)]
        quiet = Reporter(lambda _: None)
        trainer = DrafterTrainer(drafter, args, target=target, train_dataset=dataset, callbacks=until, report=quiet)
        trainer.train()
    speeds = [entry["tokens_per_second"] for entry in trainer.state.log_history if "tokens_per_second" in entry]
    return {
        "drafter": look,
        "parameters": sum(each.numel() for each in drafter.parameters()),
        "draft_vocab_size": drafter.config.draft_vocab_size,
        "steps": trainer.state.global_step,
        "step_tokens": settings.train_batch * settings.train_length,
        "tokens_per_second": median(speeds[1:]),
        "held_bytes": held,
        "peak_bytes": None if held is None else memory.peak(),
    }
