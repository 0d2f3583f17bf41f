"""The training loss: every draft depth against the target's own distribution.

Depth d of the chain at position i predicts x_{i+2+d}, and is told the tokens up to its parent x_{i+1+d}. The logits of
a chunk of predictions are the only full-vocabulary tensors that ever exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..common.target_weights import TargetWeights
from ..drafters.hidden_state.modeling_hsdraft import HSDrafter
from .features import Features
from .objectives import Objective

CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**26}  # of drafter and target each, in elements


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
        floating = {"taps": self.taps.to(device, dtype), "final": self.final.to(device, dtype)}
        return Pack(**{name: value.to(device) for name, value in vars(self).items()} | floating)


@dataclass(frozen=True)
class Chains:
    """Which chains of a pack are unrolled: S of them, the first `num_rolled` beyond the first depth.

    Attributes:
        starts: `[S]`, int64, positions i in the pack.
        num_rolled: R. Deeper depths matter less and cost as much, so following a part of the chains is a better use of
            time.
        real: `[S]`, bool; False for chains that only fill the shape.
    """

    starts: torch.Tensor
    num_rolled: int
    real: torch.Tensor


@dataclass(frozen=True)
class ChainLabels:
    """What the chains are told and what they are compared with; depth d of chain s is entry `[s, d]`.

    Attributes:
        tokens: `[S, K]`, int64, the parents: the last tokens known to the prediction.
        teacher: `[U, D]`, final hidden states of the target.
        rows: `[S, K]`, int64, the row of `teacher` behind the target's distribution of the predicted token.
        valid: `[S, K]`, bool, predictions that count.
        count: `[K]`, predictions a depth's loss is divided by; several processes share it.
        regression: weight of the hidden-state regression in this step.
        measured: also says how often, and how surely, the first choice is right.
    """

    tokens: torch.Tensor
    teacher: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor
    count: torch.Tensor
    regression: float = 0.0
    measured: bool = True


@dataclass(frozen=True)
class LossParts:
    """Per depth d = 0 .. K-1, `[K]` each, averages over the predictions of this process.

    Attributes:
        loss: what is trained on, a scalar.
        divergence: the objective on the draft vocabulary, in nats.
        accuracy: how often the drafter's first choice is the target's, both within the draft vocabulary and with the
            parents of the labels injected; zero where not measured.
        count: predictions both are averages of.
        regression: smooth L1 distance of drafted states to the target's final ones; zero where it has no weight.
        confidence, right: `[N]`, probability of the first choice and whether it was right, of all valid predictions in
            the order of `depth` `[N]`; empty where not measured.
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
    """Positions i whose chain predicts at least one answer token: x_{i+2} is an answer, in the same document."""
    same = pack.document_ids[2:] == pack.document_ids[:-2]
    return torch.nonzero(pack.answer_mask[2:] & same).squeeze(-1)


def sample_chains(
    pack: Pack, per_conversation: int, rolled_fraction: float, seeds: Sequence[int], pad_to_multiple_of: int = 1
) -> Chains:
    """Draws chain starts from every conversation of a pack.

    What is drawn from a conversation depends on its seed alone, not on what it is packed with: two processes with half
    the pack each learn from the same chains as one process with all of it.

    Args:
        per_conversation: chains drawn from each, at most.
        rolled_fraction: share of them that is followed beyond the first depth.
        seeds: one for each conversation.
        pad_to_multiple_of: of the number of rolled chains and of the others.
    """
    starts = chain_starts(pack).cpu()
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
    if not len(parts[0]):  # nothing to learn here, but the other processes of the step wait for gradients
        padding[0] = pad_to_multiple_of
    padded = [F.pad(part, (0, extra), value=-1) for part, extra in zip(parts, padding, strict=True)]
    every = torch.cat(padded).to(pack.input_ids.device)
    return Chains(every.clamp(min=0), len(padded[0]), every >= 0)


def true_labels(pack: Pack, chains: Chains, steps: int) -> ChainLabels:
    """Labels from the text itself: true parents, and the target's distributions along it (teacher data)."""
    last = pack.input_ids.shape[0] - 1
    parents = chains.starts[:, None] + 1 + torch.arange(steps, device=chains.starts.device)
    goals = (parents + 1).clamp(max=last)
    valid = pack.answer_mask[goals] & (pack.document_ids[goals] == pack.document_ids[chains.starts, None])
    valid &= (parents < last) & chains.real[:, None]
    valid[chains.num_rolled :, 1:] = False
    parents = parents.clamp(max=last)
    return ChainLabels(pack.input_ids[parents], pack.final, parents, valid, valid.sum(dim=0))


def unroll(
    model: Any,
    weights: TargetWeights,
    pack: Pack,
    starts: torch.Tensor,
    num_rolled: int,
    labels: ChainLabels | None = None,
) -> Any:
    """The forward of training: chains of a pack from `starts` `[S]`, the first `num_rolled` beyond the first depth.

    Args:
        model: an `HSDrafter`, or what training has wrapped around it.
    """
    return model(
        taps=pack.taps,
        embeds=weights.embed(pack.input_ids.roll(-1)),  # row i: the token after position i
        position_ids=pack.position_ids,
        starts=starts,
        document_ids=pack.document_ids,
        num_rolled=num_rolled,
        labels=labels,
    )


def chain_states(
    drafter: HSDrafter, weights: TargetWeights, hidden_states: Sequence[torch.Tensor], labels: ChainLabels
) -> list[torch.Tensor | None]:
    """The injector's states for each depth's predictions, `[rows, ...]`; none at the first, which read its token."""
    embeds = weights.embed(labels.tokens)
    states = drafter.injector.advance(embeds[:, 0], None)
    result: list[torch.Tensor | None] = [None]
    for depth, hidden in enumerate(hidden_states[1:], 1):
        rows = hidden.shape[0]
        states = drafter.injector.advance(embeds[:rows, depth], states[:rows])
        result.append(states)
    return result


def draft_logits(
    drafter: HSDrafter, weights: TargetWeights, hidden: torch.Tensor, states: torch.Tensor | None
) -> torch.Tensor:
    """Logits `[N, V']` of drafted states `[N, D]`, token information injected where there is any."""
    logits = drafter.logits(hidden, weights)
    return logits if states is None else logits + drafter.injector(hidden, states)


@dataclass(frozen=True)
class ChainLoss:
    """The loss as a `loss_function` of the drafter, called inside its forward.

    Args:
        weights: what the drafter borrows of its target.
        teacher_head: `[V', D]`, the target's output rows of the draft vocabulary.
        objective: see `objectives`.
        depth_weights: weight of each depth, `[K]`; they are normalised.
        chunk_logits: logits of drafter and target that exist at a time, in elements each: what the matrix products
            are computed by.
        scored_logits: those of them that are compared at a time, in float32: on CPUs what fits into a core's cache.
    """

    weights: TargetWeights
    teacher_head: torch.Tensor
    objective: Objective
    depth_weights: Sequence[float]
    chunk_logits: int = CHUNK_LOGITS["cpu"]
    scored_logits: int = 2**18

    @property
    def rows_per_chunk(self) -> int:
        return self._rows(self.chunk_logits)

    def _rows(self, elements: int) -> int:
        return max(1, elements // self.teacher_head.shape[0])

    def __call__(self, drafter: HSDrafter, hidden_states: Sequence[torch.Tensor], labels: ChainLabels) -> LossParts:
        device = hidden_states[0].device
        steps = len(hidden_states)
        states = chain_states(drafter, self.weights, hidden_states, labels)
        scale = torch.tensor(list(self.depth_weights), device=device)
        assert len(scale) == steps, "one weight a depth"
        scale = scale / scale.sum() / labels.count.clamp(min=1)
        modules = [drafter.norm, drafter.injector, *([] if drafter.lm_head is None else [drafter.lm_head])]
        parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        coefficients = [labels.valid[: len(h), d] * scale[d] for d, h in enumerate(hidden_states)]
        rows = [labels.rows[: len(h), d] for d, h in enumerate(hidden_states)]

        def compare(
            hidden: torch.Tensor, coefficient: torch.Tensor, rows: torch.Tensor, states: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                teacher = F.linear(labels.teacher[rows], self.teacher_head)
            logits = draft_logits(drafter, self.weights, hidden, states)
            return sum_over_chunks(score, [logits, teacher, coefficient], [], self._rows(self.scored_logits))

        def score(
            logits: torch.Tensor, teacher: torch.Tensor, coefficient: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast(device.type, enabled=False):
                logits, teacher = logits.float(), teacher.float()
                distance = self.objective(logits, teacher)
                return (distance * coefficient).sum(), _statistics(logits, teacher, distance, labels.measured)

        first = [hidden_states[0], coefficients[0], rows[0]]
        size = self.rows_per_chunk
        loss, statistics = sum_over_chunks(compare, first, parameters, size)
        if steps > 1:
            parts: list[Any] = [hidden_states[1:], coefficients[1:], rows[1:], states[1:]]
            deeper = [torch.cat(list(part)) for part in parts]
            more, further = sum_over_chunks(compare, deeper, parameters, size)
            loss, statistics = loss + more, torch.cat([statistics, further])
        regression = torch.zeros((), device=device)
        if labels.regression > 0.0:
            goals = labels.teacher[torch.cat(rows)]
            distance = F.smooth_l1_loss(drafter.norm(torch.cat(list(hidden_states))), goals, reduction="none")
            regression = (distance.float().mean(dim=-1) * torch.cat(coefficients)).sum()
            loss = loss + labels.regression * regression
        depth = torch.cat([torch.full((len(h),), d, device=device) for d, h in enumerate(hidden_states)])
        valid = torch.cat([labels.valid[: len(h), d] for d, h in enumerate(hidden_states)])
        return _parts(loss, statistics[valid], depth[valid], steps, regression.detach(), labels.measured)


def _statistics(logits: torch.Tensor, teacher: torch.Tensor, distance: torch.Tensor, measured: bool) -> torch.Tensor:
    """`[N, 3]`: objective, confidence of the first choice, whether it is the target's."""
    logits, distance = logits.detach(), distance.detach()
    if not measured:
        return torch.stack([distance, torch.zeros_like(distance), torch.zeros_like(distance)], dim=-1)
    best = logits.max(dim=-1)  # on CPUs several times faster than argmax
    right = best.indices == teacher.max(dim=-1).indices
    confidence = (best.values - logits.logsumexp(dim=-1)).exp()
    return torch.stack([distance, confidence, right.to(distance.dtype)], dim=-1)


def _parts(
    loss: torch.Tensor,
    statistics: torch.Tensor,
    depth: torch.Tensor,
    steps: int,
    regression: torch.Tensor,
    measured: bool,
) -> LossParts:
    count = torch.bincount(depth, minlength=steps)
    sums = statistics.new_zeros(steps, 3).index_add_(0, depth, statistics)
    means = sums / count.clamp(min=1)[:, None]
    kept = slice(None) if measured else slice(0)
    return LossParts(
        loss, means[:, 0], means[:, 2], count, regression, statistics[kept, 1], statistics[kept, 2], depth[kept]
    )


def sum_over_chunks(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    rows: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    rows_per_chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums a loss over chunks of rows, without keeping more than one chunk's intermediate results.

    Gradients are computed in the forward, chunk by chunk, and only scaled in the backward.

    Args:
        function: from a chunk of each of `rows` to its loss, a scalar, and detached values `[n, ...]` of its rows.
        rows: tensors `[N, ...]`, split alike.
        parameters: whatever else the loss depends on and gradients are wanted for.

    Returns:
        the summed loss and the values `[N, ...]`.
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
