"""Training of SpecFormer drafters ("SpecFormer", section 3), and the CTC objective of those whose slots are frames.

The CTC loss of a chain is the negative log-probability that its frames, collapsed, say exactly the labels: the target's
first choices along the text ("CTC drafter", section 3; "Connectionist Temporal Classification", section 4.1). Labels
are fewer than frames, which need room for blanks between equal tokens, and for saying a token late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...drafters.base.target_weights import TargetWeights
from ...training.families.hidden_state import TravellingFamily
from ...training.families.trainable import TRAINABLE
from ...training.loop.arguments import DRAFTER_OPTIONS, TRAINING_OPTIONS, TrainingOption
from ...training.loss.chains import ChainLabels
from ...training.loss.loss import CHUNK_LOGITS, LossParts, loss_parts, sum_over_chunks
from ...training.loss.objectives import WHOLE_LOSSES, WholeLoss
from .collapsed_frames import CollapsedFrames
from .drafter import SpecFormerConfig, SpecFormerDrafter


class SpecFormerFamily(TravellingFamily):
    name = "specformer"
    drafter = SpecFormerDrafter
    least = {"draft_vocab_size": 1, "intermediate_size": 1, "num_draft_steps": 1, "tree_size": 1}  # noqa: RUF012
    arguments = {"rolled_fraction": 1.0}  # noqa: RUF012  # further slots are quick to compute

    def by_columns(self, config: SpecFormerConfig) -> bool:
        return not config.ctc

    def predictions(self, drafter: SpecFormerDrafter, weights: TargetWeights) -> Any:
        return TravellingFamily.predictions(_Frames() if drafter.config.ctc else self, drafter, weights)

    def describe(self, drafter: SpecFormerDrafter) -> str:
        config = drafter.config
        reads = "with" if config.reads_tokens else "without"
        return f"{config.num_draft_steps} {'frames' if config.ctc else 'slots'}, {reads} the last token"


class _Frames(SpecFormerFamily):
    """Slots that are frames: what they say after a path, collapsed. A path's state has all of its chain's slots."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*super().parameters, self.model.blank]

    def states(self, tokens: torch.Tensor, hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        slots, state, result = torch.stack(list(hidden_states), dim=1), None, list[torch.Tensor | None]()
        frames = self._collapsed(slots)
        for depth in range(tokens.shape[1]):
            state = frames.advance(depth + 1, tokens[:, depth : depth + 1], state)
            result.append(torch.cat([slots.flatten(1), state[:, 0].to(slots.device)], dim=-1))
        return result

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert states is not None
        count, width = self.model.config.num_draft_steps, self.model.config.hidden_size
        slots, state = states[:, : count * width], states[:, count * width :]
        slots = slots.to(hidden.dtype).unflatten(-1, (count, -1))
        return self._collapsed(slots).children(state[:, None].float())[:, 0]

    def _collapsed(self, slots: torch.Tensor) -> CollapsedFrames:
        return CollapsedFrames(self.model.frames(slots, self.weights), self.weights.vocab_ids, slots.shape[1])


TRAINABLE[SpecFormerFamily.name] = SpecFormerFamily()
DRAFTER_OPTIONS["reads_tokens"] = bool


CTC = "ctc"
_MOST = 60.0  # nats of a label that frames have no room for; measured, not trained on


@dataclass(frozen=True)
class CTCLoss:
    """The loss, called as the drafter's `loss_function` inside its forward.

    Statistics by depth are of a draft after the preceding labels: the divergence is the cross-entropy with the
    label, and accuracy is that of the first choice. `teacher_head`, `[V', D]`, holds the target's output rows of
    the draft vocabulary; `num_labels` is at most the number of frames.
    """

    weights: TargetWeights
    teacher_head: torch.Tensor
    num_labels: int
    chunk_logits: int = CHUNK_LOGITS["cpu"]

    @property
    def depth_weights(self) -> list[float]:
        return [1.0] * self.num_labels

    @property
    def rows_per_chunk(self) -> int:
        return max(1, self.chunk_logits // self.teacher_head.shape[0])

    def __call__(self, drafter: Any, hidden_states: Sequence[torch.Tensor], labels: ChainLabels) -> LossParts:
        slots = torch.stack(list(hidden_states), dim=1)
        chains, steps, _ = slots.shape
        device, count = slots.device, self.num_labels
        # Labels end where the first one is not valid: a frame cannot leave one out.
        valid = labels.valid[:, :count].long().cumprod(dim=1).bool()
        share = 1.0 / labels.count[:count].sum().clamp(min=1)

        def compare(
            slots: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                choices = F.linear(labels.teacher[rows], self.teacher_head).max(dim=-1).indices
            frames = drafter.frames(slots, self.weights)
            with torch.autocast(device.type, enabled=False):
                losses = ctc_losses(frames, choices, lengths)
                return losses.sum() * share, self._statistics(frames.detach(), choices)

        columns = [slots, labels.rows[:, :count], valid.sum(dim=1)]
        parameters = SpecFormerFamily().predictions(drafter, self.weights).parameters
        loss, statistics = sum_over_chunks(compare, columns, parameters, max(1, self.rows_per_chunk // steps))
        depth = torch.arange(count, device=device).expand(chains, -1)
        return loss_parts(loss, statistics[valid], depth[valid], steps, labels.measured)

    def _statistics(self, frames: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """Returns `[n, labels, 3]`: cross-entropy, confidence of the first choice, and whether it is the label."""
        draft = CollapsedFrames(frames, self.weights.vocab_ids, choices.shape[1])
        tokens, states, found = self.weights.vocab_ids[choices], None, []
        for depth in range(choices.shape[1]):
            states = draft.advance(depth + 1, tokens[:, max(depth - 1, 0), None], states)
            logs = draft.children(states)[:, 0]
            best, label = logs.max(dim=-1), choices[:, depth]
            distance = -logs.gather(1, label[:, None])[:, 0].clamp(min=-_MOST)
            found.append(torch.stack([distance, best.values.exp(), (best.indices == label).float()], dim=-1))
        return torch.stack(found, dim=1)


def ctc_losses(frames: torch.Tensor, choices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns the loss of each chain in nats, `[n]`; 0 for chains without labels, and where frames have no room.

    Args:
        frames: `[n, K, V' + 1]`, log-probabilities; the blank is the last column.
        choices: `[n, labels]`, int64, columns of the labels.
        lengths: `[n]`, int64, number of valid labels at the start of each row.
    """
    steps = torch.full_like(lengths, frames.shape[1])
    losses = F.ctc_loss(
        frames.transpose(0, 1), choices, steps, lengths, frames.shape[-1] - 1, "none", zero_infinity=True
    )
    return losses * (lengths > 0)


def _check(config: Any, args: Any) -> None:
    labels = args.method_options.get("ctc_labels", 1)
    if labels > config.num_draft_steps:
        raise ValueError(f"ctc_labels={labels} is invalid: expected at most num_draft_steps={config.num_draft_steps}")
    only_values = {
        "data_policy": "teacher", "depth_weighting": "fixed", "rolled_fraction": 1.0, "regression_weight": 0.0,
        "cosine_weight": 0.0, "valid_prefix": False, "candidates": 0,
    }  # fmt: skip
    for name, only in only_values.items():
        value = args.method_options.get(name, getattr(args, name, only))
        if value != only:
            raise ValueError(
                f"{name}={value!r} is invalid with objective='ctc', which compares all frames of a chain with the text "
                f"at once: expected {only!r}"
            )


def _made(args: Any, drafter: Any, weights: TargetWeights, teacher_head: torch.Tensor, chunk_logits: int) -> CTCLoss:
    """See `WholeLoss.made`. By default a chain has half as many labels as frames, rounded up."""
    num_labels = args.method_options.get("ctc_labels") or (drafter.config.num_draft_steps + 1) // 2
    return CTCLoss(weights, teacher_head, num_labels, chunk_logits)


def _check_ctc_labels(args: Any, value: int) -> None:
    if value < 1:
        raise ValueError(f"ctc_labels={value} is invalid: expected 1 or more")
    if args.objective != CTC:
        raise ValueError(f"ctc_labels={value} is invalid: leave it out, or name the objective='ctc'")


TRAINING_OPTIONS["ctc_labels"] = TrainingOption(int, _check_ctc_labels)
WHOLE_LOSSES[CTC] = WholeLoss({"ctc": True}, _check, _made)
