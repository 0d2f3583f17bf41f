"""Training by the clock: the learning rate follows the time that is left, and training ends when none is left."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training after some minutes. Evaluations count, and so does the time before a resumption.

    All processes go by the clock of the first one, so that their learning rates and last steps are the same.

    Args:
        minutes: minutes of training.
        warmup: share of them in which the learning rate rises. After that it falls as a cosine.
        spent: seconds spent before this process.

    Attributes:
        spent: seconds spent when the clock was last read, those before this process included.
    """

    def __init__(self, minutes: float, warmup: float = 0.05, spent: float = 0.0) -> None:
        self.minutes = minutes
        self.warmup = warmup
        self.spent = spent
        self._begin = 0.0

    @property
    def progress(self) -> float:
        """Share of the time that is spent, 0 to 1."""
        return min(1.0, self.spent / (60.0 * self.minutes))

    def scale(self) -> float:
        """Returns the factor of the peak learning rate now."""
        if self.progress < self.warmup:
            return max(self.progress / self.warmup, 1e-3)
        return 0.5 * (1.0 + math.cos(math.pi * (self.progress - self.warmup) / (1.0 - self.warmup)))

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Returns a scheduler that sets the learning rates of an optimizer."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: self.scale())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin = time.monotonic() - self.spent

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        [self.spent] = broadcast_object_list([time.monotonic() - self._begin])
        if self.progress >= 1.0:
            control.should_evaluate = control.should_save = control.should_training_stop = True
        return control

    def state(self) -> dict[str, Any]:
        args = {"minutes": self.minutes, "warmup": self.warmup, "spent": self.spent}
        return {"args": args, "attributes": {"spent": self.spent}}
