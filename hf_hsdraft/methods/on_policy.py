"""Training on the drafter's own tokens.

Data policies `student` and `mixed`: chains follow tokens that the drafter draws, labelled by the target (DistillSpec,
section 4). `draft-opd`: chains start where the target rejected a draft (Draft-OPD).

Speculative decoding emits the target's own text, so along a text that the target wrote its rounds can be replayed
without generating: a draft is accepted while it agrees with the text, and the next round starts behind the token at
which it differs. This is exact for greedy texts, and for sampled ones under verification that follows the target's own
draws. The drafts are chains of first choices of the current drafter, not trees.

The loss of `draft-opd` has two streams. Stream A: the emitted tokens of each round, by the objective of the training.
Stream B: the rejected drafts of the round, by `rejected_draft`. Their sum is divided by the number of emitted tokens
plus the sum of the weights of stream B.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..drafters.base.target_weights import TargetWeights
from ..runtime.prompt_inputs import end_tokens
from ..runtime.target_limits import text_config
from ..runtime.tree_reading import as_attention_takes_it
from ..training.families.trainable import family_of
from ..training.loop.arguments import TRAINING_OPTIONS, TrainingOption
from ..training.loss.chains import (
    DATA_POLICIES,
    ChainLabels,
    Chains,
    DataPolicy,
    Pack,
    PolicyStep,
    chain_starts,
    true_labels,
    unroll,
)
from .distillation.branches import Branches

_DECAY = 0.9  # weight of a rejected draft in stream B, to the power of its depth


@torch.no_grad()
def drafted_labels(
    drafter: Any,
    target: Any,
    weights: TargetWeights,
    pack: Pack,
    chains: Chains,
    labels: ChainLabels,
    every: int = 1,
) -> ChainLabels:
    """Returns labels in which rolled chains follow tokens that the drafter draws; the other chains keep `labels`.

    The target reads the text and all drawn branches in one forward. A branch sees its document up to the branch's
    parent, and its own tokens. With `every` 2, only every second rolled chain is drafted, and so on. The draws depend
    on the state of the RNG, so several processes do not draw the same as one.
    """
    steps = labels.tokens.shape[1]
    chosen = torch.arange(0, chains.num_rolled, every, device=chains.starts.device)
    if not len(chosen) or steps < 2:
        return labels
    starts = chains.starts[chosen]
    drawn = draft(drafter, weights, pack, starts, steps - 1, lambda x: torch.multinomial(x.softmax(dim=-1), 1)[:, 0])
    drawn = weights.vocab_ids[drawn]
    tokens, valid = labels.tokens.clone(), labels.valid.clone()
    tokens[chosen, 1:] = drawn
    ends = is_end(target, drawn)
    valid[chosen] = torch.cat([labels.valid[chosen, :1], ~ends], dim=1).cumprod(dim=1).bool()
    labels = replace(labels, tokens=tokens, valid=valid, count=valid.sum(dim=0))
    return labelled_by_target(target, pack, chains, labels, chosen)


def labelled_by_target(
    target: Any, pack: Pack, chains: Chains, labels: ChainLabels, chosen: torch.Tensor
) -> ChainLabels:
    """Returns labels whose `chosen` chains `[C]` have the target's distributions after their own parents."""
    drawn = labels.tokens[chosen, 1:]
    teacher = _read_branches(target, pack, chains.starts[chosen], drawn)
    rows = labels.rows.clone()
    rows[chosen, 1:] = len(labels.teacher) + torch.arange(drawn.numel(), device=rows.device).view_as(drawn)
    states = torch.cat([labels.teacher, teacher.to(labels.teacher)])
    return replace(labels, teacher=states, rows=rows, likely=None)


def is_end(target: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns where tokens end a text of a target; bool, in the shape of `tokens`."""
    return torch.isin(tokens, torch.tensor(sorted(end_tokens(target)), device=tokens.device))


@torch.no_grad()
def draft(
    drafter: Any,
    weights: TargetWeights,
    pack: Pack,
    starts: torch.Tensor,
    count: int,
    choose: Callable[[torch.Tensor], torch.Tensor],
    rows: int | None = None,
) -> torch.Tensor:
    """Drafts `count` tokens along each chain at positions `[S]`, each token after those before it.

    `choose` takes logits `[N, V']`, float32, and returns drafted columns `[N]` of the draft vocabulary. `rows` is the
    number of chains whose logits are computed at a time, `None` for all. Returns columns `[S, count]`, int64.
    """
    pack = replace(pack, taps=pack.taps.to(drafter.dtype))
    weights = replace(weights, head=None if weights.head is None else weights.head.to(drafter.dtype))
    predictions = family_of(drafter).predictions(drafter, weights)
    chains = Chains(starts, len(starts), torch.ones_like(starts, dtype=torch.bool))
    hidden_states: Sequence[torch.Tensor] = ()
    parents, columns = [pack.input_ids[starts + 1]], list[torch.Tensor]()
    for depth in range(count):
        tokens = torch.stack(parents, dim=1)
        if depth == 0 or predictions.reads_tokens:
            hidden_states = unroll(drafter, predictions, pack, chains, tokens).hidden_states
        state = predictions.states(tokens, hidden_states[: depth + 1])[depth]
        hidden: torch.Tensor = hidden_states[depth].to(drafter.dtype)
        pieces = [
            choose(predictions.logits(hidden[part], None if state is None else state[part]).float())
            for part in torch.arange(len(starts), device=starts.device).split(rows or len(starts))
        ]
        columns.append(torch.cat(pieces))
        parents.append(weights.vocab_ids[columns[-1]])
    return torch.stack(columns, dim=1)


def _read_branches(target: Any, pack: Pack, starts: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Returns the target's final hidden states `[S * (K-1), D]` at the drawn tokens."""
    branches, config = Branches.of(pack.position_ids, pack.document_ids, starts, drawn.shape[1]), text_config(target)
    last, seen = config.num_hidden_layers, branches.seen[None].to(target.device)
    output = target(
        torch.cat([pack.input_ids, drawn.flatten()])[None].to(target.device),
        attention_mask=as_attention_takes_it(seen, config._attn_implementation, target.dtype),
        position_ids=branches.positions[None].to(target.device),
        output_hidden_states=[last],
        logits_to_keep=1,
        use_cache=False,
    )
    states: torch.Tensor = output.hidden_states[last][0, len(pack.input_ids) :]
    return states.to(starts.device)


@dataclass(frozen=True)
class OwnTokens(DataPolicy):
    """Every `every`-th rolled chain follows tokens that the drafter draws, the others follow the text."""

    every: int

    def chains(self, step: PolicyStep) -> tuple[Chains, ChainLabels]:
        chains, labels = step.sampled()
        return chains, drafted_labels(step.drafter, step.target, step.weights, step.pack, chains, labels, self.every)


DATA_POLICIES["student"], DATA_POLICIES["mixed"] = OwnTokens(1), OwnTokens(2)


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
        columns[starts] = draft(drafter, weights, pack, starts, steps, lambda logits: logits.max(dim=-1).indices, rows)
        chains = Chains(starts, len(starts), torch.ones_like(starts, dtype=torch.bool))
        goals = (starts[:, None] + 2 + torch.arange(steps, device=starts.device)).clamp(max=len(pack.input_ids) - 1)
        agree = weights.vocab_ids[columns[starts]] == pack.input_ids[goals]
        agree &= true_labels(pack, chains, steps).valid
        accepted[starts] = agree.cumprod(dim=1).sum(dim=1)
    anchors = _rounds(starts.tolist(), pack.answer_mask.tolist(), accepted.tolist())
    return Replay(torch.tensor(anchors, dtype=torch.int64, device=starts.device), columns, accepted)


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
TRAINING_OPTIONS["rejected_drafts"] = TrainingOption(int, _check_rejected_drafts)
