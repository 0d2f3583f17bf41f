"""The training loss, which compares each draft depth with the target's distribution, some predictions at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...core.methods import Registry
from ...drafters.base.target_weights import TargetWeights
from ..data.features import likely_columns
from ..families.family import TrainableFamily
from ..families.trainable import family_of
from .chains import ChainLabels
from .objectives import Candidates, Columns, Objective

# Takes logits of drafter and target, `[N, V']`, the places of their predictions, and the columns of the first choices
# of target and drafter, `[N]`. Returns a sum over them and a detached value of each.
Score = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# Sums a score over all predictions, by the labels of their chains.
Total = Callable[[ChainLabels, Score], tuple[torch.Tensor, torch.Tensor]]

CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**26}  # number of logits in a chunk, for drafter and target each
_CANDIDATE_ROWS = 512  # predictions that share their columns: more share more, but have more of them


@dataclass(frozen=True)
class Term:
    """What an option of a method does to the loss of training steps."""

    # Returns factors `[S, K]` of the weights of predictions, by the places s * K + d of these. The loss is a mean over
    # predictions then, and all logits are computed once more.
    weights: Callable[[Total, torch.Tensor, ChainLabels], torch.Tensor] | None = None
    # Returns what is added, of drafted states and the target's final ones, `[N, D]`, their shares `[N]`, and the step
    of_states: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None


WEIGHTINGS: Registry[Term] = Registry("depth_weighting")


@dataclass(frozen=True)
class LossParts:
    """The loss and what was measured with it, over the valid predictions of this process."""

    loss: torch.Tensor  # scalar, the loss to train on
    divergence: torch.Tensor  # `[K]`, mean of the objective on the draft vocabulary at each depth, in nats
    # `[K]`, share of predictions whose first choice is the target's, both within the draft vocabulary and after the
    # parents of the labels; zero where it is not measured
    accuracy: torch.Tensor
    count: torch.Tensor  # `[K]`, number of predictions at each depth
    # `[N]`, probability of each prediction's first choice. It is empty, as `right` and `depth` are, where nothing is
    # measured.
    confidence: torch.Tensor
    right: torch.Tensor  # `[N]`, 1 where that choice is the target's
    depth: torch.Tensor  # `[N]`, depth of each prediction


def _coefficients(weights: torch.Tensor, valid: torch.Tensor, count: torch.Tensor, by_prediction: bool) -> torch.Tensor:
    """Coefficients of predictions, `[S * K]`; `valid` `[S, K]` and `count` `[K]` are as in `ChainLabels`.

    The loss is the weighted mean, over the depths, of each's mean; or, by prediction, the sum of all with weights `[K]`
    or `[S, K]`, divided by their number.
    """
    shares = weights / count.sum().clamp(min=1) if by_prediction else weights / weights.sum() / count.clamp(min=1)
    return (valid * shares).flatten()


@dataclass(frozen=True)
class ChainLoss:
    """The drafter's `loss_function`, which is called inside its forward."""

    weights: TargetWeights  # weights that the drafter borrows from its target
    teacher_head: torch.Tensor  # `[V', D]`, the target's output rows of the draft vocabulary
    objective: Objective  # see `objectives`
    # `[K]`, weight of each depth. They are divided by their sum, unless the loss is a mean over predictions.
    depth_weights: Sequence[float]
    # Number of logits that are computed at a time, for drafter and target each; at most twice as many of the target
    # are held
    chunk_logits: int = CHUNK_LOGITS["cpu"]
    # Number of logits that are compared at a time, in float32. On CPUs they fit into a core's cache.
    scored_logits: int = 2**18
    terms: Sequence[Term] = ()  # of methods
    # Whether the loss is a mean over predictions, not over depths. It always is with weights of terms, and with a
    # further term.
    by_prediction: bool = False
    # Chooses the columns of the vocabulary that gradients are computed for, where predictions can be computed by
    # columns; `None` for all. Evaluations compare all.
    candidates: Candidates | None = None

    @property
    def rows_per_chunk(self) -> int:
        """Number of predictions whose logits are computed at a time."""
        return max(1, self.chunk_logits // self.teacher_head.shape[0])

    def __call__(self, drafter: Any, hidden_states: Sequence[torch.Tensor], labels: ChainLabels) -> LossParts:
        device = hidden_states[0].device
        steps = len(hidden_states)
        predictions = family_of(drafter).predictions(drafter, self.weights)
        states = predictions.states(labels.tokens, hidden_states)
        by_columns = torch.is_grad_enabled() and labels.further is None
        candidates = self.candidates if by_columns else None
        total = functools.partial(self._sum, predictions, hidden_states, states, candidates)
        place = torch.cat(_places(hidden_states))
        weights, further = torch.tensor(list(self.depth_weights), device=device), labels.further
        assert len(weights) == steps, "one weight a depth"
        terms = self.terms if torch.is_grad_enabled() else ()  # the loss of an evaluation is not used
        for of_predictions in (term.weights for term in terms if term.weights is not None):
            weights = weights * of_predictions(total, place, labels)
        by_prediction = bool(self.by_prediction or weights.dim() > 1 or further is not None)
        coefficients = _coefficients(weights, labels.valid, labels.count, by_prediction)
        if further is not None:
            costs = _coefficients(further.weights, further.weights > 0, labels.count, by_prediction)

        def score(
            logits: torch.Tensor, teacher: torch.Tensor, place: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            distance = self.objective(logits, teacher, best)
            loss = (distance * coefficients[place]).sum()
            if further is not None:
                loss = loss + (further(logits, teacher, place) * costs[place]).sum()
            return loss, _statistics(logits, chosen, best, distance, labels.measured)

        loss, statistics = total(labels, score)
        for of_states in (term.of_states for term in terms if term.of_states is not None):
            drafted, rows = predictions.final(torch.cat(list(hidden_states))), labels.rows.flatten()[place]
            loss = loss + of_states(drafted, labels.teacher[rows], coefficients[place], labels.step)
        valid = labels.valid.flatten()[place]
        return loss_parts(loss, statistics[valid], place[valid] % steps, steps, labels.measured)

    def _sum(
        self,
        predictions: TrainableFamily,
        hidden_states: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor | None],
        candidates: Candidates | None,
        labels: ChainLabels,
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
                    chosen = logits.detach().max(dim=-1).indices if labels.measured else best
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
        """Returns logits `[N, C]` by ascending rows `[N]` of the target's states `[U, D]`, of some columns or all."""
        distinct, index = rows.unique_consecutive(return_inverse=True)
        logits = F.linear(teacher[distinct], self.teacher_head if columns is None else self.teacher_head[columns])
        return logits if len(distinct) == len(rows) else logits[index]


def _places(hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns for each depth d the places s * K + d of its predictions in tensors `[S, K]`."""
    steps = len(hidden_states)
    return [torch.arange(len(h), device=h.device) * steps + depth for depth, h in enumerate(hidden_states)]


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
    loss: torch.Tensor, statistics: torch.Tensor, depth: torch.Tensor, steps: int, measured: bool
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
    return LossParts(loss, means[:, 0], means[:, 2], count, statistics[kept, 1], statistics[kept, 2], depth[kept])


def sum_over_chunks(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    rows: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    rows_per_chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums a loss over chunks of rows, and keeps the intermediate results of one chunk only.

    Gradients are computed in the forward, chunk by chunk. The backward only scales them.

    Args:
        function: takes a chunk of each of `rows`; returns its loss, a scalar, and detached values `[n, ...]` of its
            rows.
        rows: tensors `[N, ...]`, which are split in the same way.
        parameters: other tensors that the loss depends on and that need gradients.

    Returns:
        The summed loss and the values `[N, ...]`.
    """
    if not torch.is_grad_enabled():
        pieces = [function(*chunk) for chunk in _chunks(rows, rows_per_chunk)]
        return torch.stack([piece[0] for piece in pieces]).sum(), torch.cat([piece[1] for piece in pieces])
    result: tuple[torch.Tensor, torch.Tensor] = _SumOverChunks.apply(
        function, rows_per_chunk, len(rows), *rows, *parameters
    )
    return result


def _chunks(rows: Sequence[torch.Tensor], size: int) -> Iterable[tuple[torch.Tensor, ...]]:
    return zip(*(part.split(size) for part in rows), strict=True)


class _SumOverChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, size: int, num_rows: int, *tensors: torch.Tensor) -> Any:
        rows, parameters = tensors[:num_rows], tensors[num_rows:]
        wanted = [index for index, part in enumerate(rows) if part.requires_grad]
        of_rows: list[list[torch.Tensor]] = [[] for _ in wanted]
        of_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        total, values = rows[0].new_zeros((), dtype=torch.float32), []
        for chunk in _chunks(rows, size):
            leaves = [part.detach().requires_grad_(part.requires_grad) for part in chunk]
            with torch.enable_grad():
                loss, value = function(*leaves)
            sources = [*(leaves[index] for index in wanted), *parameters]
            gradients = torch.autograd.grad(loss, sources, allow_unused=True)
            total += loss.detach()
            values.append(value)
            for kept, gradient, index in zip(of_rows, gradients[: len(wanted)], wanted, strict=True):
                kept.append(torch.zeros_like(leaves[index]) if gradient is None else gradient)
            for index, gradient in enumerate(gradients[len(wanted) :]):
                if gradient is not None:
                    known = of_parameters[index]
                    of_parameters[index] = gradient if known is None else known.add_(gradient)
        ctx.gradients = [None] * num_rows + of_parameters
        for index, parts in zip(wanted, of_rows, strict=True):
            ctx.gradients[index] = torch.cat(parts)
        value = torch.cat(values)
        ctx.mark_non_differentiable(value)
        return total, value

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor, _: Any) -> Any:
        return (None, None, None, *(None if g is None else g * scale.to(g.dtype) for g in ctx.gradients))
