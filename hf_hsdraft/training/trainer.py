"""`transformers.Trainer` with the drafter's loss, and measured tau as the metric that decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from ..modeling_hsdraft import HSDrafter, TargetWeights
from .features import Features
from .loss import LossParts, Pack, chain_loss, chain_starts


def collate(conversations: Sequence[Features]) -> dict[str, torch.Tensor]:
    """Packs conversations side by side; documents are kept apart by the attention mask."""
    return dict(vars(Pack.of(conversations, pad_to_multiple_of=128)))


class DrafterTrainer(Trainer):
    """Trains a drafter on cached features of the target.

    Args:
        weights: what the drafter borrows of its target.
        teacher_head: `[V', D]`, the target's output rows of the draft vocabulary.
        measure_tau: returns tau of the drafter as it is now, by actually generating; `None` skips that.
        chains_per_step: chain starts sampled from a batch. 0 < value.
        rolled_fraction: share of those chains that is followed beyond the first depth.
        depth_decay: weight of depth d is `depth_decay ** d`.
        bf16: autocast of the whole loss. `args.bf16` would cast the model's forward alone, for good, and with it what
            tau is measured by.
    """

    control: Any

    def __init__(
        self,
        model: HSDrafter,
        args: TrainingArguments,
        *,
        weights: TargetWeights,
        teacher_head: torch.Tensor,
        measure_tau: Callable[[HSDrafter], float] | None = None,
        chains_per_step: int = 160,
        rolled_fraction: float = 0.5,
        depth_decay: float = 0.8,
        bf16: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, args=args, data_collator=collate, **kwargs)
        self.weights = weights
        self.teacher_head = teacher_head
        self.measure_tau = measure_tau
        self.chains_per_step = chains_per_step
        self.rolled_fraction = rolled_fraction
        self.depth_decay = depth_decay
        self.bf16 = bf16
        self._recent: LossParts | None = None

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        parts = self._parts(model, inputs, torch.randperm)
        self._recent = parts
        return (parts.loss, {"loss": parts.loss}) if return_outputs else parts.loss

    def _parts(self, model: Any, inputs: dict[str, torch.Tensor], order: Callable[[int], torch.Tensor]) -> LossParts:
        pack = Pack(**inputs).to(self.args.device, self.teacher_head.dtype)
        starts = chain_starts(pack)
        starts = starts[order(len(starts))[: self.chains_per_step].to(starts.device)]
        rolled = max(1, int(len(starts) * self.rolled_fraction))
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.bf16):
            return chain_loss(
                model, self.weights, self.teacher_head, pack, starts, num_rolled=rolled, depth_decay=self.depth_decay
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the accuracy per depth of the latest step to every training log line."""
        if self._recent is not None and "loss" in logs:
            logs |= {f"accuracy_{depth + 1}": round(a, 3) for depth, a in enumerate(self._recent.accuracy.tolist())}
        super().log(logs, *args, **kwargs)

    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Held-out loss and accuracy per depth, and tau measured by generating."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.model.eval()
        generator = torch.Generator().manual_seed(self.args.seed)
        order = lambda n: torch.randperm(n, generator=generator)  # noqa: E731
        size = self.args.per_device_eval_batch_size
        packs = [
            collate([dataset[i] for i in range(start, min(start + size, len(dataset)))])
            for start in range(0, len(dataset), size)
        ]
        parts = [self._parts(model, pack, order) for pack in packs]
        # Pooled over chains: a pack with few of them, or none that deep, must not count as much as the others.
        counts = torch.stack([part.count for part in parts]).clamp(min=1e-9)
        divergence, accuracy = (
            (torch.stack([getattr(part, name) for part in parts]) * counts).sum(dim=0) / counts.sum(dim=0)
            for name in ("divergence", "accuracy")
        )
        weights = self.depth_decay ** torch.arange(len(divergence), device=divergence.device)
        metrics = {f"{metric_key_prefix}_loss": float((divergence * weights).sum() / weights.sum())}
        for depth, value in enumerate(accuracy.tolist()):
            metrics[f"{metric_key_prefix}_accuracy_{depth + 1}"] = round(value, 4)
        if self.measure_tau is not None:
            metrics[f"{metric_key_prefix}_tau"] = self.measure_tau(model)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        model.train()
        return metrics
