"""The chains of a training step: where they start, whose tokens they follow, and what they are compared with.

Depth d of the chain at position i predicts x_{i+2+d}. It is given the tokens up to its parent x_{i+1+d}. Whose tokens
these are is a data policy: all but the text's are methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ...core.methods import Registry
from ...drafters.base.target_weights import TargetWeights
from ..data.features import Features


@dataclass(frozen=True)
class Pack:
    """Several conversations one after the other, as one training step reads them."""

    input_ids: torch.Tensor  # `[T]`, int64
    answer_mask: torch.Tensor  # `[T]`, bool, True where the assistant wrote the token
    position_ids: torch.Tensor  # `[T]`, int64, position of each token in its conversation
    document_ids: torch.Tensor  # `[T]`, int64, index of each token's conversation; -1 for padding
    taps: torch.Tensor  # `[T, taps * D]`, see `Features`
    final: torch.Tensor  # `[T, D]`, see `Features`
    likely: torch.Tensor | None = None  # `[T, n]`, int32, see `Features`; `None` where they are not known

    @classmethod
    def of(cls, conversations: Sequence[Features], pad_to_multiple_of: int = 1) -> Pack:
        """Packs conversations, padded to a multiple of `pad_to_multiple_of` tokens: a backend can reuse its kernels."""
        lengths = [len(features.input_ids) for features in conversations]
        padding = -sum(lengths) % pad_to_multiple_of

        def joined(parts: Iterable[torch.Tensor], value: int = 0) -> torch.Tensor:
            whole = torch.cat(list(parts))
            return F.pad(whole, (0, 0) * (whole.dim() - 1) + (0, padding), value=value)

        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        likely = [features.likely for features in conversations if features.likely is not None]
        return cls(
            input_ids=joined(features.input_ids for features in conversations),
            answer_mask=joined(features.answer_mask for features in conversations),
            position_ids=joined(torch.arange(length) for length in lengths),
            document_ids=joined([documents], value=-1),
            taps=joined(features.taps for features in conversations),
            final=joined(features.final for features in conversations),
            likely=joined(likely) if len(likely) == len(conversations) else None,
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Pack:
        floating = {"taps": self.taps.to(device, dtype), "final": self.final.to(device, dtype)}
        known = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return Pack(**known | floating)


@dataclass(frozen=True)
class Chains:
    """The S chains of a pack that are followed."""

    starts: torch.Tensor  # `[S]`, int64, position i of each chain in the pack
    # Number R of chains, the first ones, that are followed beyond the first depth. Deeper depths matter less and cost
    # as much, so only some chains are followed.
    num_rolled: int
    real: torch.Tensor  # `[S]`, bool, False for chains that only pad the shape


class FurtherTerm(Protocol):
    """A term of the loss besides the objective: called as a score, it returns values `[N]`, weighted by `[S, K]`."""

    @property
    def weights(self) -> torch.Tensor: ...

    def __call__(self, logits: torch.Tensor, teacher: torch.Tensor, place: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class ChainLabels:
    """What the chains are given and what they are compared with. Entry `[s, d]` is for depth d of chain s."""

    tokens: torch.Tensor  # `[S, K]`, int64, the parents: the last token that the prediction knows
    teacher: torch.Tensor  # `[U, D]`, final hidden states of the target
    # `[S, K]`, int64, the row of `teacher` that gives the target's distribution of the predicted token
    rows: torch.Tensor
    valid: torch.Tensor  # `[S, K]`, bool, True where the loss counts the prediction
    count: torch.Tensor  # `[K]`, divisor of the loss of each depth, the same in all processes of a step
    step: int = 0  # number of the training step
    measured: bool = True  # whether confidence and accuracy of the first choice are measured too
    # A term that is added; `None` for none. With it, the loss is divided by the sum of `count`.
    further: FurtherTerm | None = None
    # `[U, n]`, int32, its most probable columns there; `None` where they are not known
    likely: torch.Tensor | None = None


def chain_starts(pack: Pack) -> torch.Tensor:
    """Returns the positions i where x_{i+2} is an answer token of the same document. A chain may start there."""
    same = pack.document_ids[2:] == pack.document_ids[:-2]
    return torch.nonzero(pack.answer_mask[2:] & same).squeeze(-1)


def sample_chains(
    pack: Pack,
    per_conversation: int,
    rolled_fraction: float,
    seeds: Sequence[int],
    pad_to_multiple_of: int = 1,
    starts: torch.Tensor | None = None,
) -> Chains:
    """Draws chain starts from every conversation of a pack, by the conversation's seed alone, whatever is in the pack.

    Args:
        per_conversation: greatest number of chains of a conversation.
        rolled_fraction: share of them that is followed beyond the first depth.
        pad_to_multiple_of: the number of rolled chains and the number of others become multiples of this.
        starts: `[A]`, int64, positions that are drawn from; `None` for all `chain_starts`.
    """
    starts = (chain_starts(pack) if starts is None else starts).cpu()
    documents = pack.document_ids.cpu()[starts]
    rolled: list[torch.Tensor] = []
    short: list[torch.Tensor] = []
    for document, seed in enumerate(seeds):
        own = starts[documents == document]
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))
        own = own[order[:per_conversation]]
        cut = -int(-len(own) * rolled_fraction // 1)
        rolled.append(own[:cut])
        short.append(own[cut:])
    parts = [torch.cat(rolled), torch.cat(short)]
    padding = [-len(part) % pad_to_multiple_of for part in parts]
    if not len(parts[0]):  # nothing to learn here, but other processes of the step wait for gradients
        padding[0] = pad_to_multiple_of
    padded = [F.pad(part, (0, extra), value=-1) for part, extra in zip(parts, padding, strict=True)]
    every = torch.cat(padded).to(pack.input_ids.device)
    return Chains(every.clamp(min=0), len(padded[0]), every >= 0)


def true_labels(pack: Pack, chains: Chains, steps: int) -> ChainLabels:
    """Returns labels by the text itself: true parents, and the target's distributions along the text (teacher data)."""
    last = pack.input_ids.shape[0] - 1
    parents = chains.starts[:, None] + 1 + torch.arange(steps, device=chains.starts.device)
    goals = (parents + 1).clamp(max=last)
    valid = pack.answer_mask[goals] & (pack.document_ids[goals] == pack.document_ids[chains.starts, None])
    valid &= (parents < last) & chains.real[:, None]
    valid[chains.num_rolled :, 1:] = False
    parents = parents.clamp(max=last)
    return ChainLabels(pack.input_ids[parents], pack.final, parents, valid, valid.sum(dim=0), likely=pack.likely)


def unroll(
    model: Any, predictions: Any, pack: Pack, chains: Chains, tokens: torch.Tensor, labels: ChainLabels | None = None
) -> Any:
    """Runs the forward of training over some chains of a pack, with the loss if there are labels.

    `model` is a drafter, or what training has wrapped around it; `predictions` are its family's. `tokens` are the
    parents, `[S, K]`, int64; a drafter whose states know no tokens ignores them.
    """
    return model(
        taps=pack.taps,
        embeds=predictions.weights.embed(pack.input_ids.roll(-1)),  # row i holds the token after position i
        position_ids=pack.position_ids,
        starts=chains.starts,
        document_ids=pack.document_ids,
        num_rolled=chains.num_rolled,
        labels=labels,
        **predictions.inputs(tokens),
    )


@dataclass(frozen=True)
class PolicyStep:
    """A training step before its chains are chosen."""

    drafter: Any
    target: Any
    weights: TargetWeights
    pack: Pack
    args: Any  # the training arguments
    seeds: Sequence[int]  # seed of each conversation of the pack
    rows_per_chunk: int  # number of predictions whose logits may be computed at a time

    def sampled(self, starts: torch.Tensor | None = None) -> tuple[Chains, ChainLabels]:
        """Draws chains, see `sample_chains`, and labels them by the text."""
        per_conversation, rolled = self.args.chains_per_conversation, self.args.rolled_fraction
        chains = sample_chains(self.pack, per_conversation, rolled, self.seeds, pad_to_multiple_of=32, starts=starts)
        return chains, true_labels(self.pack, chains, self.drafter.num_draft_steps)


class DataPolicy:
    """Chains that follow the text (`"teacher"`), and the interface of the policies of methods."""

    def check(self, args: Any) -> None:
        """Raises a ValueError for training arguments that do not go with this policy."""

    def chains(self, step: PolicyStep) -> tuple[Chains, ChainLabels]:
        """Returns the chains of a step and their labels."""
        return step.sampled()


DATA_POLICIES: Registry[DataPolicy] = Registry("data_policy", {"teacher": DataPolicy()})
