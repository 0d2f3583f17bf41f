"""Training on the blocks that drafting meets (Draft-OPD): chains start where the target rejected a draft.

Speculative decoding emits the target's own text, so along a text that the target wrote its rounds can be replayed
without generating: a draft is accepted while it agrees with the text, and the next round starts behind the token at
which it differs. This is exact for greedy texts, and for sampled ones under verification that follows the target's own
draws. The drafts are chains of first choices of the current drafter, not trees.

The loss has two streams. Stream A: the emitted tokens of each round, by the objective of the training. Stream B: the
rejected drafts of the round, by `rejected_draft`. Their sum is divided by the number of emitted tokens plus the sum of
the weights of stream B.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ...drafters.base.target_weights import TargetWeights
from ...training.loop.arguments import METHOD_OPTIONS, MethodOption
from ...training.loss.chains import (
    DATA_POLICIES,
    ChainLabels,
    Chains,
    DataPolicy,
    Pack,
    PolicyStep,
    chain_starts,
    true_labels,
)
from .own_tokens import draft, is_end, labelled_by_target

_DECAY = 0.9  # weight of a rejected draft in stream B, to the power of its depth


@dataclass(frozen=True)
class Replay:
    """Replayed rounds of a pack, with a chain at every position at which one may start; all int64."""

    anchors: torch.Tensor  # `[A]`, ascending, positions i of the chains at which a round starts; its root is x_{i+1}
    columns: torch.Tensor  # `[T, K]`, columns of the draft vocabulary that a chain at a position drafts
    accepted: torch.Tensor  # `[T]`, number of these drafts that agree with the text


@dataclass(frozen=True)
class RejectedDrafts:
    """A `FurtherTerm` of drafted tokens that the target rejected. Entry `[s, d]` was drafted at depth d of chain s."""

    columns: torch.Tensor  # `[S, K]`, int64, columns of the drafted tokens in the draft vocabulary
    weights: torch.Tensor  # `[S, K]`, float32, weight of each in the loss; 0 where nothing was rejected

    def __call__(self, logits: torch.Tensor, teacher: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return rejected_draft(logits, teacher, self.columns.flatten()[place])


def rejected_draft(logits: torch.Tensor, teacher: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """KL(drafter | target), estimated by one drafted token: exp(r) - r - 1 with r = log p - log q.

    Its gradient lowers q where the target finds the token less probable than the drafter does. It is at most V' large
    for a first choice of the drafter, as q is 1 / V' or more. `drafted` `[N]` holds the columns of the drafted tokens.
    """
    ratio = F.cross_entropy(logits, drafted, reduction="none") - F.cross_entropy(teacher, drafted, reduction="none")
    return ratio.exp() - ratio - 1


@torch.no_grad()
def replay(drafter: Any, weights: TargetWeights, pack: Pack, rows: int | None = None) -> Replay:
    """Drafts along the texts of a pack, which the target wrote, as rounds of decoding would.

    `rows` is the number of predictions whose logits are computed at a time; `None` for all chains'.
    """
    steps, starts = drafter.num_draft_steps, chain_starts(pack)
    columns = starts.new_zeros(len(pack.input_ids), steps)
    accepted = starts.new_zeros(len(pack.input_ids))
    if len(starts):
        columns[starts] = draft(drafter, weights, pack, starts, steps, _first_choice, rows)
        chains = Chains(starts, len(starts), torch.ones_like(starts, dtype=torch.bool))
        goals = (starts[:, None] + 2 + torch.arange(steps, device=starts.device)).clamp(max=len(pack.input_ids) - 1)
        agree = weights.vocab_ids[columns[starts]] == pack.input_ids[goals]
        agree &= true_labels(pack, chains, steps).valid
        accepted[starts] = agree.cumprod(dim=1).sum(dim=1)
    anchors = _rounds(starts.tolist(), pack.answer_mask.tolist(), accepted.tolist())
    return Replay(torch.tensor(anchors, dtype=torch.int64, device=starts.device), columns, accepted)


def _first_choice(logits: torch.Tensor) -> torch.Tensor:
    return logits.max(dim=-1).indices


def _rounds(starts: list[int], answer: list[bool], accepted: list[int]) -> list[int]:
    """Returns where rounds start, answer by answer. The target itself writes the first token of each."""
    anchors = []
    for _, group in itertools.groupby(enumerate(starts), key=lambda pair: pair[1] - pair[0]):
        run = [start for _, start in group]  # one answer: consecutive positions
        start = run[0] if answer[run[0] + 1] else run[0] + 1
        while start <= run[-1]:
            anchors.append(start)
            start += accepted[start] + 1
    return anchors


def two_streams(
    replayed: Replay,
    target: Any,
    weights: TargetWeights,
    pack: Pack,
    chains: Chains,
    labels: ChainLabels,
    rejected_drafts: int = 1,
) -> ChainLabels:
    """Returns labels for chains to learn from what they emitted and from what was rejected.

    Args:
        chains: the chains, at some of the anchors.
        labels: labels by the text. They are kept up to the token at which a draft was rejected.
        rejected_drafts: greatest number of rejected drafts of a round that stream B counts. The draft at depth d, which
            is d + 1 tokens from the root, weighs `0.9 ** d`. The first one needs nothing more. For further ones, which
            follow tokens that are not in the text, the target reads all drafts.
    """
    steps = labels.tokens.shape[1]
    depth = torch.arange(steps, device=chains.starts.device)
    columns, accepted = replayed.columns[chains.starts], replayed.accepted[chains.starts, None]
    drafts = weights.vocab_ids[columns]
    # A draft is rejected where the text has another token, not where the text ends.
    rejected = labels.valid.gather(1, accepted.clamp(max=steps - 1)) & (accepted < steps)
    rejected = rejected & (depth >= accepted) & (depth < accepted + rejected_drafts)
    rejected[chains.num_rolled :, 1:] = False
    ended = (is_end(target, drafts) & (depth >= accepted)).cumsum(dim=1)
    rejected[:, 1:] &= ended[:, :-1] == 0  # nothing is drafted behind the end of a text
    costs = rejected * _DECAY**depth
    valid = labels.valid & (depth <= accepted)
    count = valid.sum(dim=0) + costs.sum(dim=0)
    labels = replace(labels, valid=valid, count=count, further=RejectedDrafts(columns, costs))
    if rejected_drafts < 2 or steps < 2:
        return labels
    after = depth[1:] > accepted  # these predictions follow rejected drafts
    tokens = labels.tokens.clone()
    tokens[:, 1:] = torch.where(after, drafts[:, :-1], tokens[:, 1:])
    rolled = torch.arange(chains.num_rolled, device=chains.starts.device)
    followed = labelled_by_target(target, pack, chains, replace(labels, tokens=tokens), rolled)
    rows = labels.rows.clone()
    rows[:, 1:] = torch.where(after, followed.rows[:, 1:], rows[:, 1:])
    return replace(followed, rows=rows)


class DraftOPD(DataPolicy):
    def check(self, args: Any) -> None:
        if args.depth_weighting == "d-pace":
            raise ValueError(
                "depth_weighting='d-pace' is invalid with data_policy='draft-opd': depths behind a rejected draft "
                "count as accepted, so it would weigh most; expected 'fixed'"
            )
        if args.candidates:
            raise ValueError(
                f"candidates={args.candidates} is invalid with data_policy='draft-opd', which compares drafted tokens "
                "of the whole draft vocabulary: leave it out"
            )

    def chains(self, step: PolicyStep) -> tuple[Chains, ChainLabels]:
        met = replay(step.drafter, step.weights, step.pack, step.rows_per_chunk)
        chains, labels = step.sampled(met.anchors)
        rejected = step.args.method_options.get("rejected_drafts", 1)
        return chains, two_streams(met, step.target, step.weights, step.pack, chains, labels, rejected)


def _check_rejected_drafts(args: Any, value: int) -> None:
    if args.data_policy != "draft-opd":
        raise ValueError(
            f"rejected_drafts={value} is invalid with data_policy={args.data_policy!r}, in which nothing is rejected: "
            "leave it out, or take 'draft-opd'"
        )
    if value < 0:
        raise ValueError(f"rejected_drafts={value} is invalid: expected 0 or more")


DATA_POLICIES["draft-opd"] = DraftOPD()
METHOD_OPTIONS["rejected_drafts"] = MethodOption(int, _check_rejected_drafts)
