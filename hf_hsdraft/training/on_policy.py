"""On-policy data: the drafter's own tokens, labelled by the target (DistillSpec, section 4, student data)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..bench.measure import end_tokens
from ..common.target_weights import TargetWeights
from .loss import ChainLabels, Chains, Pack, unroll
from .trainable import family_of


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
    """Returns labels in which rolled chains follow tokens that the drafter draws, not the text.

    The target reads the text and all drawn branches in one forward. A branch sees its document up to the branch's
    parent, and its own tokens.

    Args:
        drafter: the drafter.
        target: the target.
        weights: weights that the drafter borrows from its target.
        pack: the pack.
        chains: the chains.
        labels: labels by the text. The other chains keep them.
        every: 1 for all rolled chains, 2 for every second one, and so on. The draws depend on the state of the random
            numbers, so several processes do not draw the same as one.
    """
    steps = labels.tokens.shape[1]
    chosen = torch.arange(0, chains.num_rolled, every, device=chains.starts.device)
    if not len(chosen) or steps < 2:
        return labels
    starts = chains.starts[chosen]
    drawn, parents = _draw(drafter, weights, pack, starts, labels.tokens[chosen, 0], steps)
    teacher = _read_branches(target, pack, starts, drawn)
    length = len(pack.input_ids)
    rows = labels.rows.clone()
    branch = torch.arange(len(chosen), device=starts.device)[:, None] * (steps - 1)
    rows[chosen, 1:] = length + branch + torch.arange(steps - 1, device=starts.device)
    tokens, valid = labels.tokens.clone(), labels.valid.clone()
    tokens[chosen] = parents
    ends = torch.isin(drawn, torch.tensor(sorted(end_tokens(target)), device=drawn.device))
    valid[chosen] = torch.cat([labels.valid[chosen, :1], ~ends], dim=1).cumprod(dim=1).bool()
    teacher = torch.cat([labels.teacher, teacher.to(labels.teacher)])
    return replace(labels, tokens=tokens, teacher=teacher, rows=rows, valid=valid, count=valid.sum(dim=0))


def _draw(
    drafter: Any,
    weights: TargetWeights,
    pack: Pack,
    starts: torch.Tensor,
    first: torch.Tensor,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens `[S, K-1]` drawn along each chain, and the parents `[S, K]`: the true first one and these."""
    pack = replace(pack, taps=pack.taps.to(drafter.dtype))
    weights = replace(weights, head=None if weights.head is None else weights.head.to(drafter.dtype))
    predictions = family_of(drafter).predictions(drafter, weights)
    chains = Chains(starts, len(starts), torch.ones_like(starts, dtype=torch.bool))
    parents, hidden_states = [first], ()
    for depth in range(steps - 1):
        tokens = torch.stack(parents, dim=1)
        if depth == 0 or predictions.reads_tokens:
            hidden_states = unroll(drafter, predictions, pack, chains, tokens).hidden_states
        states = predictions.states(tokens, hidden_states[: depth + 1])[depth]
        logits = predictions.logits(hidden_states[depth].to(drafter.dtype), states)
        choice = torch.multinomial(logits.float().softmax(dim=-1), 1).squeeze(-1)
        parents.append(weights.vocab_ids[choice])
    return torch.stack(parents[1:], dim=1), torch.stack(parents, dim=1)


def _read_branches(target: Any, pack: Pack, starts: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Returns the target's final hidden states `[S * (K-1), D]` at the drawn tokens."""
    length, (count, steps) = len(pack.input_ids), drawn.shape
    every = torch.arange(length, device=starts.device)
    text = (every[None] <= every[:, None]) & (pack.document_ids[None] == pack.document_ids[:, None])
    prefix = (every[None] <= starts[:, None] + 1) & (pack.document_ids[None] == pack.document_ids[starts, None])
    chain = torch.arange(count, device=starts.device).repeat_interleave(steps)
    depth = torch.arange(steps, device=starts.device).repeat(count)
    own = (chain[None] == chain[:, None]) & (depth[None] <= depth[:, None])
    mask = torch.cat(
        [
            torch.cat([text, text.new_zeros(length, len(chain))], dim=1),
            torch.cat([prefix[chain], own], dim=1),
        ]
    )[None, None]
    positions = torch.cat([pack.position_ids, pack.position_ids[starts][chain] + 2 + depth])
    config = target.config.get_text_config()
    if config._attn_implementation == "eager":  # it would add a bool mask to the scores
        mask = torch.zeros(mask.shape, dtype=target.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(target.dtype).min
        )
    last = config.num_hidden_layers
    output = target(
        torch.cat([pack.input_ids, drawn.flatten()])[None].to(target.device),
        attention_mask=mask.to(target.device),
        position_ids=positions[None].to(target.device),
        output_hidden_states=[last],
        logits_to_keep=1,
        use_cache=False,
    )
    states: torch.Tensor = output.hidden_states[last][0, length:]
    return states.to(starts.device)
