"""Logs drafting statistics while a model is trained on its own texts, as in GRPO of TRL."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from ...core.checks import demand
from ...generate.attachment import Attachment

logger = logging.get_logger(__name__)


class DraftingLog(TrainerCallback):
    """Adds `hsdraft/...` to the logs of a trainer whose training steps call `generate()` of a model with a drafter.

    The values cover the training steps since the last log, in this process. Calls of an evaluation do not count.

    - `hsdraft/tau`: tokens per target forward and row.
    - `hsdraft/seconds`: seconds that the drafted calls took to decode.
    - `hsdraft/stepped_aside`: number of calls that were decoded without drafts; left out if there were none.

    Training changes the target, but not the drafter. A warning is logged once when the gain, tau - 1, is a third less
    than at the start.

    Args:
        attachment: the attachment of the trained model.
        window: number of logs over which tau is averaged before it is compared with that of the first logs.
    """

    def __init__(self, attachment: Attachment, window: int = 4) -> None:
        demand(window >= 1, "window", window, "expected 1 or more logs")
        self.attachment = attachment
        self._window, self._warned = window, False
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=window)
        self._before: Counter[str] | None = None  # what the attachment had counted when the step began
        self._since: Counter[str] = Counter()  # what the steps since the last log have counted

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = self._counted()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._before is not None:
            self._since, self._before = self._since + (self._counted() - self._before), None

    def _counted(self) -> Counter[str]:
        found: Any = self.attachment.statistics
        aside = sum(found.stepped_aside.values())
        return Counter(tokens=found.new_tokens, forwards=found.row_forwards, seconds=found.total_seconds, aside=aside)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is None or any(name.startswith("eval_") for name in logs):
            return
        since, self._since, entry = self._since, Counter(), dict[str, float]()
        if since["forwards"]:
            entry["hsdraft/tau"] = since["tokens"] / since["forwards"]
            entry["hsdraft/seconds"] = since["seconds"]
        if since["aside"]:
            entry["hsdraft/stepped_aside"] = since["aside"]
        logs.update(entry)
        if state.log_history:  # which holds a copy of the logs already
            state.log_history[-1].update(entry)
        if "hsdraft/tau" in entry:
            self._compare(entry["hsdraft/tau"])

    def _compare(self, tau: float) -> None:
        """Warns once when the gain is a third less than at the start."""
        if len(self._first) < self._window:
            self._first.append(tau)
            return
        self._recent.append(tau)
        if self._warned or len(self._recent) < self._window:
            return
        start, now = (sum(taus) / self._window for taus in (self._first, self._recent))
        if start > 1 and now - 1 <= 2 / 3 * (start - 1):
            self._warned = True
            logger.warning(
                f"hsdraft/tau has fallen from {start:.2f} to {now:.2f} since the start: the drafter fits the changed "
                "model less. Train it on the fresh texts (CoTraining, see docs/integrations.md), or detach it"
            )


def log_drafting(trainer: Any, attachment: Attachment, window: int = 4) -> DraftingLog:
    """Puts a `DraftingLog` first among a `Trainer`'s callbacks, so that wandb and others get its values; returns it."""
    callback = DraftingLog(attachment, window)
    trainer.callback_handler.add_callback(callback)
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, callbacks.pop())
    return callback
