"""The training loss: every draft depth against the target's own distribution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..modeling_hsdraft import HSDrafter, TargetWeights
from .features import Features


@dataclass(frozen=True)
class Pack:
    """Several conversations side by side: what one training step reads.

    Attributes:
        input_ids, answer_mask, position_ids, document_ids: `[T]`; document -1 is padding.
        taps: `[T, taps * D]`; final: `[T, D]`.
    """

    input_ids: torch.Tensor
    answer_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor

    @classmethod
    def of(cls, conversations: Sequence[Features], pad_to_multiple_of: int = 1) -> Pack:
        """Packs conversations.

        Args:
            pad_to_multiple_of: of T. Shapes that come back let a backend use its compiled kernels again.
        """
        lengths = [len(features.input_ids) for features in conversations]
        padding = -sum(lengths) % pad_to_multiple_of

        def joined(parts: Iterable[torch.Tensor], value: int = 0) -> torch.Tensor:
            whole = torch.cat(list(parts))
            return F.pad(whole, (0, 0) * (whole.dim() - 1) + (0, padding), value=value)

        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return cls(
            input_ids=joined(features.input_ids for features in conversations),
            answer_mask=joined(features.answer_mask for features in conversations),
            position_ids=joined(torch.arange(length) for length in lengths),
            document_ids=joined([documents], value=-1),
            taps=joined(features.taps for features in conversations),
            final=joined(features.final for features in conversations),
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Pack:
        return Pack(
            input_ids=self.input_ids.to(device),
            answer_mask=self.answer_mask.to(device),
            position_ids=self.position_ids.to(device),
            document_ids=self.document_ids.to(device),
            taps=self.taps.to(device, dtype),
            final=self.final.to(device, dtype),
        )


@dataclass(frozen=True)
class LossParts:
    """Per depth d = 0 .. K-1, `[K]` each, averaged over the sampled chains.

    Attributes:
        loss: the weighted sum that is trained on, a scalar.
        divergence: forward KL from the target's to the drafter's distribution on the draft vocabulary, in nats.
        accuracy: how often the drafter's first choice is the target's, both within the draft vocabulary and with the
            true previous tokens injected.
        count: chains that reach this deep, the number both are averages of.
    """

    loss: torch.Tensor
    divergence: torch.Tensor
    accuracy: torch.Tensor
    count: torch.Tensor


def chain_starts(pack: Pack) -> torch.Tensor:
    """Positions i whose chain predicts at least one answer token: x_{i+2} is an answer, in the same document."""
    same = pack.document_ids[2:] == pack.document_ids[:-2]
    return torch.nonzero(pack.answer_mask[2:] & same).squeeze(-1)


def chain_loss(
    drafter: HSDrafter,
    weights: TargetWeights,
    teacher_head: torch.Tensor,
    pack: Pack,
    starts: torch.Tensor,
    *,
    num_rolled: int | None = None,
    depth_decay: float = 0.8,
) -> LossParts:
    """Unrolls chains from `starts` and compares every depth with the target (DistillSpec, forward KL).

    Depth d of the chain at i predicts x_{i+2+d}; the injector is given the true tokens up to x_{i+1+d}, the parent.
    Only the sampled chains' logits ever exist.

    Args:
        teacher_head: `[V', D]`, the target's output rows of the draft vocabulary.
        starts: `[S]`, from `chain_starts`.
        num_rolled: chains followed beyond the first depth, the first ones of `starts`; `None` for all. Deeper depths
            matter less and cost as much, so following a part of the chains is a better use of time.
        depth_decay: depth d weighs `depth_decay ** d`.
    """
    last = pack.input_ids.shape[0] - 1
    embeds = weights.embed(pack.input_ids.roll(-1))  # row i: the token after position i
    output = drafter(pack.taps, embeds, pack.position_ids, starts, pack.document_ids, num_rolled=num_rolled)
    teacher = _teach(teacher_head, pack, starts, len(output.hidden_states))
    states = drafter.injector.advance(embeds[starts], None)
    losses, divergences, accuracies, counts = [], [], [], []
    for depth, hidden in enumerate(output.hidden_states):
        chains = starts[: hidden.shape[0]]
        logits = drafter.logits(hidden, weights).float()
        if depth > 0:
            states = drafter.injector.advance(embeds[(chains + depth).clamp(max=last)], states[: hidden.shape[0]])
            logits = logits + drafter.injector(hidden, states).float()
        goal = (chains + 2 + depth).clamp(max=last)
        valid = pack.answer_mask[goal] & (pack.document_ids[goal] == pack.document_ids[chains])
        valid &= chains + 2 + depth <= last
        rows = teacher.rows[goal - 1]
        # KL(p | q) = log sum exp(z) - p z - H(p): the drafter's log-probabilities never exist as a tensor.
        divergence = logits.logsumexp(dim=-1) - (teacher.probs[rows] * logits).sum(dim=-1) - teacher.entropy[rows]
        counts.append(valid.sum())
        count = counts[-1].clamp(min=1)
        divergence = (divergence * valid).sum() / count
        losses.append(divergence * depth_decay**depth)
        divergences.append(divergence.detach())
        hits = logits.detach().max(dim=-1).indices == teacher.choice[rows]  # on CPUs several times faster than argmax
        accuracies.append((hits & valid).sum() / count)
    weight = sum(depth_decay**depth for depth in range(len(losses)))
    return LossParts(
        torch.stack(losses).sum() / weight, torch.stack(divergences), torch.stack(accuracies), torch.stack(counts)
    )


@dataclass(frozen=True)
class _Teacher:
    """The target's distributions on the draft vocabulary, for the positions the chains need and no others.

    Attributes:
        probs: `[U, V']`; entropy: `[U]`, in nats; choice: `[U]`, the most probable row of the draft vocabulary.
        rows: `[T]`, which of the U belongs to a position (meaningless where no chain needs it).
    """

    probs: torch.Tensor
    entropy: torch.Tensor
    choice: torch.Tensor
    rows: torch.Tensor


@torch.no_grad()
def _teach(teacher_head: torch.Tensor, pack: Pack, starts: torch.Tensor, steps: int) -> _Teacher:
    length = pack.input_ids.shape[0]
    needed = torch.zeros(length + steps + 2, dtype=torch.bool, device=starts.device)
    for depth in range(steps):
        needed[starts + 1 + depth] = True
    positions = torch.nonzero(needed[:length]).squeeze(-1)
    rows = torch.zeros(length, dtype=torch.long, device=starts.device)
    rows[positions] = torch.arange(len(positions), device=starts.device)
    positions = F.pad(positions, (0, -len(positions) % 64))  # a shape that comes back, as in `Pack.of`
    logits = (pack.final[positions] @ teacher_head.T).float()
    probs = logits.softmax(dim=-1)
    entropy = logits.logsumexp(dim=-1) - (probs * logits).sum(dim=-1)
    return _Teacher(probs, entropy, logits.max(dim=-1).indices, rows)
