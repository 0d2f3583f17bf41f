"""On-policy data: the drafter's own tokens, labelled by the target (DistillSpec, section 4, student data)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...drafters.base.target_weights import TargetWeights
from ...runtime.prompt_inputs import end_tokens
from ...runtime.target_limits import text_config
from ...runtime.tree_reading import as_attention_takes_it
from ...training.families.trainable import family_of
from ...training.loss.chains import DATA_POLICIES, Branches, ChainLabels, Chains, DataPolicy, Pack, PolicyStep, unroll


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
    drawn = weights.vocab_ids[draft(drafter, weights, pack, starts, steps - 1, _sampled)]
    tokens, valid = labels.tokens.clone(), labels.valid.clone()
    tokens[chosen, 1:] = drawn
    ends = is_end(target, drawn)
    valid[chosen] = torch.cat([labels.valid[chosen, :1], ~ends], dim=1).cumprod(dim=1).bool()
    labels = replace(labels, tokens=tokens, valid=valid, count=valid.sum(dim=0))
    return labelled_by_target(target, pack, chains, labels, chosen)


def labelled_by_target(
    target: Any, pack: Pack, chains: Chains, labels: ChainLabels, chosen: torch.Tensor
) -> ChainLabels:
    """Returns labels in which the chains `chosen`, `[C]`, have the target's distributions after their own parents.

    The parent of the first depth is the text's own; the others may be tokens that are not in the text.
    """
    drawn = labels.tokens[chosen, 1:]
    teacher = _read_branches(target, pack, chains.starts[chosen], drawn)
    rows = labels.rows.clone()
    rows[chosen, 1:] = len(labels.teacher) + torch.arange(drawn.numel(), device=rows.device).view_as(drawn)
    states = torch.cat([labels.teacher, teacher.to(labels.teacher)])
    return replace(labels, teacher=states, rows=rows, likely=None)


def is_end(target: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns where tokens end a text of a target; bool, in the shape of `tokens`."""
    return torch.isin(tokens, torch.tensor(sorted(end_tokens(target)), device=tokens.device))


def _sampled(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(logits.softmax(dim=-1), 1).squeeze(-1)


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
