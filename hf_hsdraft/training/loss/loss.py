"""The training loss, which compares every draft depth with the target's distribution.

Depth d of the chain at position i predicts x_{i+2+d}. It is given the tokens up to its parent x_{i+1+d}. Logits exist
only for a chunk of predictions at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ...drafters.base.target_weights import TargetWeights
from ..data.features import Features
from ..families.trainable import family_of
from .candidates import Candidates, Columns, likely_columns
from .chunks import sum_over_chunks
from .depth_weights import d_pace, mean_of_depths, mean_of_predictions, reached
from .objectives import Objective, hard_labels
from .predictions import Predictions

# Takes logits of drafter and target, `[N, V']`, the places of their predictions, and the columns of the first choices
# of target and drafter, `[N]`. Returns a sum over them and a detached value of each.
Score = Callable[..., tuple[torch.Tensor, torch.Tensor]]

CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**26}  # number of logits in a chunk, for drafter and target each
_CANDIDATE_ROWS = 512  # predictions that share their columns: more share more, but have more of them


@dataclass(frozen=True)
class Pack:
    """Several conversations one after the other, as one training step reads them.

    Attributes:
        input_ids: `[T]`, int64.
        answer_mask: `[T]`, bool, True where the assistant wrote the token.
        position_ids: `[T]`, int64, position of each token in its conversation.
        document_ids: `[T]`, int64, index of each token's conversation; -1 for padding.
        taps: `[T, taps * D]`, see `Features`.
        final: `[T, D]`, see `Features`.
        likely: `[T, n]`, int32, see `Features`; `None` where they are not known.
    """

    input_ids: torch.Tensor
    answer_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor
    likely: torch.Tensor | None = None

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
    """The S chains of a pack that are followed.

    Attributes:
        starts: `[S]`, int64, position i of each chain in the pack.
        num_rolled: number R of chains, the first ones, that are followed beyond the first depth. Deeper depths matter
            less and cost as much, so only some chains are followed.
        real: `[S]`, bool, False for chains that only pad the shape.
    """

    starts: torch.Tensor
    num_rolled: int
    real: torch.Tensor


class FurtherTerm(Protocol):
    """A term of the loss besides the objective: called as a score, it returns values `[N]`, weighted by `[S, K]`."""

    @property
    def weights(self) -> torch.Tensor: ...

    def __call__(self, logits: torch.Tensor, teacher: torch.Tensor, place: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class ChainLabels:
    """What the chains are given and what they are compared with. Entry `[s, d]` is for depth d of chain s.

    Attributes:
        tokens: `[S, K]`, int64, the parents: the last token that the prediction knows.
        teacher: `[U, D]`, final hidden states of the target.
        likely: `[U, n]`, int32, its most probable columns there; `None` where they are not known.
        rows: `[S, K]`, int64, the row of `teacher` that gives the target's distribution of the predicted token.
        valid: `[S, K]`, bool, True where the loss counts the prediction.
        count: `[K]`, divisor of the loss of each depth, the same in all processes of a step.
        regression: weight of the hidden-state regression in this step.
        measured: whether confidence and accuracy of the first choice are measured too.
        further: a term that is added; `None` for none. With it, the loss is divided by the sum of `count`.
    """

    tokens: torch.Tensor
    teacher: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor
    count: torch.Tensor
    regression: float = 0.0
    measured: bool = True
    further: FurtherTerm | None = None
    likely: torch.Tensor | None = None


@dataclass(frozen=True)
class LossParts:
    """The loss and what was measured with it, over the valid predictions of this process.

    Attributes:
        loss: scalar, the loss to train on.
        divergence: `[K]`, mean of the objective on the draft vocabulary at each depth, in nats.
        accuracy: `[K]`, share of predictions whose first choice is the target's, both within the draft vocabulary and
            after the parents of the labels; zero where it is not measured.
        count: `[K]`, number of predictions at each depth.
        regression: scalar, smooth L1 distance of drafted states from the target's final ones; zero where it has no
            weight.
        confidence: `[N]`, probability of each prediction's first choice. It is empty, as `right` and `depth` are, where
            nothing is measured.
        right: `[N]`, 1 where that choice is the target's.
        depth: `[N]`, depth of each prediction.
    """

    loss: torch.Tensor
    divergence: torch.Tensor
    accuracy: torch.Tensor
    count: torch.Tensor
    regression: torch.Tensor
    confidence: torch.Tensor
    right: torch.Tensor
    depth: torch.Tensor


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
    """Draws chain starts from every conversation of a pack.

    The draws from a conversation depend on its seed alone, not on the rest of the pack, so two processes with half of
    the pack each learn from the same chains as one process with all of it.

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
    model: Any,
    predictions: Predictions,
    pack: Pack,
    chains: Chains,
    tokens: torch.Tensor,
    labels: ChainLabels | None = None,
) -> Any:
    """Runs the forward of training over some chains of a pack, with the loss if there are labels.

    `model` is a drafter, or what training has wrapped around it. `tokens` are the parents, `[S, K]`, int64; a drafter
    whose states know no tokens ignores them.
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
class ChainLoss:
    """The drafter's `loss_function`, which is called inside its forward.

    Args:
        weights: weights that the drafter borrows from its target.
        teacher_head: `[V', D]`, the target's output rows of the draft vocabulary.
        objective: see `objectives`.
        depth_weights: `[K]`, weight of each depth. They are divided by their sum, unless the loss is a mean over
            predictions.
        chunk_logits: number of logits that are computed at a time, for drafter and target each; at most twice as many
            of the target are held.
        scored_logits: number of logits that are compared at a time, in float32. On CPUs they fit into a core's cache.
        d_pace: whether predictions weigh by `depth_weights.d_pace` too. The labels are then predicted once more without
            gradients, which takes another product with the drafter's head and the target's for each prediction.
        valid_prefix: whether only the depths count that greedy decoding would reach, see `depth_weights.reached`; it
            takes the same further products.
        cosine_weight: weight of 1 minus the cosine of drafted and final hidden states (FastVLM).
        by_prediction: whether the loss is a mean over predictions, not over depths. It always is with `d_pace`, with
            `valid_prefix`, and with a further term.
        candidates: chooses the columns of the vocabulary that gradients are computed for, where predictions can be
            computed by columns; `None` for all. Evaluations compare all.
    """

    weights: TargetWeights
    teacher_head: torch.Tensor
    objective: Objective
    depth_weights: Sequence[float]
    chunk_logits: int = CHUNK_LOGITS["cpu"]
    scored_logits: int = 2**18
    d_pace: bool = False
    valid_prefix: bool = False
    cosine_weight: float = 0.0
    by_prediction: bool = False
    candidates: Candidates | None = None

    @property
    def rows_per_chunk(self) -> int:
        """Number of predictions whose logits are computed at a time."""
        return self._rows(self.chunk_logits)

    def _rows(self, elements: int) -> int:
        return max(1, elements // self.teacher_head.shape[0])

    def __call__(self, drafter: Any, hidden_states: Sequence[torch.Tensor], labels: ChainLabels) -> LossParts:
        device = hidden_states[0].device
        steps = len(hidden_states)
        predictions = family_of(drafter).predictions(drafter, self.weights)
        states = predictions.states(labels.tokens, hidden_states)
        by_columns = torch.is_grad_enabled() and labels.further is None
        candidates = self.candidates if by_columns else None
        total = functools.partial(self._sum, predictions, hidden_states, states, labels, candidates)
        place = torch.cat(_places(hidden_states))
        weights, further = torch.tensor(list(self.depth_weights), device=device), labels.further
        assert len(weights) == steps, "one weight a depth"
        if (self.d_pace or self.valid_prefix) and torch.is_grad_enabled():  # the loss of an evaluation is not used
            probability, right = _foreseen(total, place, labels)
            if self.d_pace:
                weights = weights * d_pace(probability, labels.valid)
            if self.valid_prefix:
                weights = weights * reached(right, labels.valid)
        by_prediction = self.by_prediction or self.d_pace or self.valid_prefix or further is not None
        mean = mean_of_predictions if by_prediction else mean_of_depths
        coefficients = mean(weights, labels.valid, labels.count).flatten()
        if further is not None:
            costs = mean(further.weights, further.weights > 0, labels.count).flatten()

        def score(
            logits: torch.Tensor, teacher: torch.Tensor, place: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            distance = self.objective(logits, teacher, best)
            loss = (distance * coefficients[place]).sum()
            if further is not None:
                loss = loss + (further(logits, teacher, place) * costs[place]).sum()
            return loss, _statistics(logits, chosen, best, distance, labels.measured)

        loss, statistics = total(score)
        regression = torch.zeros((), device=device)
        if labels.regression > 0.0 or self.cosine_weight > 0.0:
            drafted = predictions.final(torch.cat(list(hidden_states)))
            goals = labels.teacher[labels.rows.flatten()[place]]
        if labels.regression > 0.0:
            distance = F.smooth_l1_loss(drafted, goals, reduction="none").float().mean(dim=-1)
            regression = (distance * coefficients[place]).sum()
            loss = loss + labels.regression * regression
        if self.cosine_weight > 0.0:
            distance = 1 - F.cosine_similarity(drafted.float(), goals.float(), dim=-1)
            loss = loss + self.cosine_weight * (distance * coefficients[place]).sum()
        valid = labels.valid.flatten()[place]
        return loss_parts(loss, statistics[valid], place[valid] % steps, steps, regression.detach(), labels.measured)

    def _sum(
        self,
        predictions: Predictions,
        hidden_states: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor | None],
        labels: ChainLabels,
        candidates: Candidates | None,
        score: Score,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums `score` over all predictions, depth by depth; returns the sum and its values."""
        device, rows = hidden_states[0].device, labels.rows.flatten()

        def compare(
            hidden: torch.Tensor, place: torch.Tensor, states: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            columns = None if candidates is None else self._columns(candidates, labels, rows[place])
            index = None if columns is None else columns.index
            teacher = self._teacher_logits(labels.teacher, rows[place], index)
            logits = predictions.logits(hidden, states, index)

            def precisely(
                logits: torch.Tensor, teacher: torch.Tensor, place: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                with torch.autocast(device.type, enabled=False):
                    logits, teacher = logits.float(), teacher.float()
                    best = teacher[:, : columns.sure if columns else None].max(dim=-1).indices
                    # By their own logits, not the weighted ones; on CPUs several times faster than argmax.
                    chosen = logits.detach().max(dim=-1).indices if labels.measured or self.valid_prefix else best
                    if columns is not None:
                        logits, teacher = logits + columns.log_weight, teacher + columns.log_weight
                    return score(logits, teacher, place, best, chosen)

            size = max(1, self.scored_logits // logits.shape[1])
            return sum_over_chunks(precisely, [logits, teacher, place], [], size)

        total, values, places = torch.zeros((), device=device), list[torch.Tensor](), _places(hidden_states)
        # Depths whose logits do not depend on the paths are compared apart from the others.
        for told, depths in itertools.groupby(range(len(hidden_states)), key=lambda depth: states[depth] is not None):
            alike = list(depths)
            columns: list[Any] = [hidden_states, places, *([states] if told else [])]
            parts = [torch.cat([column[depth] for depth in alike]) for column in columns]
            # Predictions of the same token are adjacent, so that the target's logits are computed once.
            order = rows[parts[1]].argsort()
            more, further = sum_over_chunks(
                compare,
                [part[order] for part in parts],
                predictions.parameters,
                self.rows_per_chunk if candidates is None else _CANDIDATE_ROWS,
            )
            total = total + more
            values.append(torch.empty_like(further).index_copy_(0, order, further))
        return total, torch.cat(values)

    @torch.no_grad()
    def _columns(self, candidates: Candidates, labels: ChainLabels, rows: torch.Tensor) -> Columns:
        """Returns the columns to compare for predictions of the rows `[N]`, ascending, of `labels.teacher`."""
        distinct = rows.unique_consecutive()
        if labels.likely is None:
            return candidates.columns(likely_columns(labels.teacher[distinct], self.teacher_head, candidates.count))
        return candidates.columns(labels.likely[distinct, : candidates.count])

    @torch.no_grad()
    def _teacher_logits(self, teacher: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
        """Returns the target's logits `[N, C]` by the rows `[N]`, ascending, of its hidden states `[U, D]`.

        `columns` `[C]`, int64, are those of the draft vocabulary; `None` for all.
        """
        distinct, index = rows.unique_consecutive(return_inverse=True)
        logits = F.linear(teacher[distinct], self.teacher_head if columns is None else self.teacher_head[columns])
        return logits if len(distinct) == len(rows) else logits[index]


def _places(hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns for each depth d the places s * K + d of its predictions in tensors `[S, K]`."""
    steps = len(hidden_states)
    return [torch.arange(len(h), device=h.device) * steps + depth for depth, h in enumerate(hidden_states)]


@torch.no_grad()
def _foreseen(
    total: Callable[[Score], Any], place: torch.Tensor, labels: ChainLabels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the drafter's probabilities of the labels of `hard_labels`, and whether they are its first choices.

    Both are `[S, K]`; 1 and True where it predicts nothing. The weights of a chain's first depth need the last depth's,
    so all logits are computed once more beforehand.
    """

    def score(
        logits: torch.Tensor, teacher: torch.Tensor, place: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probability = hard_labels(logits, teacher, best).neg().exp()
        right = chosen == best
        return probability.sum(), torch.stack([probability, right.to(probability.dtype)], dim=-1)

    kind = place.device.type
    # Parameters that are cast here, without gradients, must not stand in for those that need them.
    with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
        _, found = total(score)
    known = found.new_ones(labels.valid.numel(), 2)
    known[place] = found
    probability, right = known.unbind(dim=-1)
    return probability.view_as(labels.valid), right.view_as(labels.valid) > 0


def _statistics(
    logits: torch.Tensor, chosen: torch.Tensor, goal: torch.Tensor, distance: torch.Tensor, measured: bool
) -> torch.Tensor:
    """Returns `[N, 3]`: the objective, the confidence of the first choice, and whether it is `goal`, the target's.

    `chosen` `[N]`, int64, are the columns of the first choices.
    """
    logits, distance = logits.detach(), distance.detach()
    if not measured:
        return torch.stack([distance, torch.zeros_like(distance), torch.zeros_like(distance)], dim=-1)
    right = chosen == goal
    confidence = (logits.gather(-1, chosen[:, None])[:, 0] - logits.logsumexp(dim=-1)).exp()
    return torch.stack([distance, confidence, right.to(distance.dtype)], dim=-1)


def loss_parts(
    loss: torch.Tensor,
    statistics: torch.Tensor,
    depth: torch.Tensor,
    steps: int,
    regression: torch.Tensor,
    measured: bool,
) -> LossParts:
    """Returns the loss with what was measured of each prediction, see `LossParts`.

    Args:
        statistics: `[N, 3]`, of each prediction the divergence, the confidence of its first choice, and 1 where that is
            the target's.
        depth: `[N]`, int64, depths of the predictions.
        measured: whether confidence and accuracy were measured.
    """
    count = torch.bincount(depth, minlength=steps)
    sums = statistics.new_zeros(steps, 3).index_add_(0, depth, statistics)
    means = sums / count.clamp(min=1)[:, None]
    kept = slice(None) if measured else slice(0)
    return LossParts(
        loss, means[:, 0], means[:, 2], count, regression, statistics[kept, 1], statistics[kept, 2], depth[kept]
    )
