"""Decides by trial which state drafted rows read, if a drafter's files do not tell.

Until September 2026 SpecForge wrote `norm_output: true` into files of plain EAGLE-3. Elsewhere, and there since then,
it means that the normed state is fed back (EAGLE-3.1). Both readings draft the same first token.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from ..base.target_weights import TargetWeights
from .configuration import EagleConfig

logger = logging.get_logger(__name__)

_DEPTH = 4  # of compared chains
_CONTEXT = 96  # accepted pairs visible to a chain
_ENOUGH = 64  # pairs after the prompt that suffice for a decision
_STEP = 16  # pairs between comparisons

_PROMPTS = (
    "How does a bicycle stay upright? Explain it step by step.",
    "Write a short story about a lighthouse keeper and a storm.",
    "def sorted_by_length(words):",
)

Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def can_be_tried(config: EagleConfig) -> bool:
    """Whether the files leave the reading open, and chains can be compared: all layers share one window."""
    return not config.norm_output_told and len(set(config.windows)) == 1


class FeedbackTrial:
    """Compares both readings on one sequence during decoding, and sets the network's `norm_output` to the better one.

    From each accepted pair both draft a chain; after the prompt, the text is the target's output. It counts tokens up
    to the first wrong one. Counts are stored on the drafter, so that the next call continues a short trial.
    """

    def __init__(self, network: Any, weights: TargetWeights) -> None:
        self._network, self._weights = network, weights
        self._pairs: list[Pairs] = []
        self._done = self._waiting = 0  # pairs compared, and pairs since the last comparison
        self._tried = -1  # pairs after the prompt; -1 before it
        self._depth = min(_DEPTH, network.config.num_draft_steps)

    def add(self, taps: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, following: torch.Tensor) -> None:
        """Takes accepted pairs: taps `[n, ...]`, embeddings `[n, D]`, positions `[n]`, and the following tokens."""
        network = self._network
        self._pairs.append((
            taps[-_CONTEXT:].to(network.device, network.dtype),
            embeds[-_CONTEXT:].to(network.device, network.dtype),
            positions[-_CONTEXT:].to(network.device),
            following[-_CONTEXT:].to(network.device),
        ))  # fmt: skip
        self._waiting += len(positions)
        self._tried = 0 if self._tried < 0 else self._tried + len(positions)

    @torch.no_grad()
    def decide(self) -> None:
        """Compares the readings once enough was accepted, and takes the better one; 3.1 in a tie."""
        network = self._network
        if network.config.norm_output_told or self._waiting < (_STEP if self._done else self._depth + 2):
            return
        taps, embeds, positions, following = pairs = tuple(map(torch.cat, zip(*self._pairs, strict=True)))
        starts = torch.arange(self._done, len(positions) - self._depth - 1, device=positions.device)
        if len(starts) == 0:
            return
        steps = torch.arange(self._depth, device=positions.device)
        path, wanted = embeds[starts[:, None] + steps], following[starts[:, None] + steps + 1]
        for reading in (False, True):
            twin = copy.copy(network)  # shares the weights
            twin.config = replace(network.config, norm_output=reading)
            states = twin(taps, embeds, positions, starts, num_draft_steps=self._depth, path_embeds=path).hidden_states
            best = [twin.logits(state, self._weights).argmax(dim=-1) for state in states]
            drafted = self._weights.vocab_ids[torch.stack(best, dim=1)]
            accepted = int((drafted == wanted).cumprod(dim=1).sum())
            network.feedback_counts[reading] = network.feedback_counts.get(reading, 0) + accepted
        kept = max(len(positions) - _CONTEXT, 0)
        self._done, self._pairs = len(positions) - self._depth - 1 - kept, [tuple(part[kept:] for part in pairs)]  # type: ignore[list-item]
        network.feedback_tried += self._tried
        self._waiting = self._tried = 0
        self._take(network.feedback_counts)

    def _take(self, counts: dict[bool, int]) -> None:
        network, normed = self._network, counts[True] >= counts[False]
        settled = network.feedback_tried >= _ENOUGH and counts[True] != counts[False]
        network.config = replace(network.config, norm_output=normed, norm_output_told=settled)
        if settled:
            logger.info(f"norm_output=true does not say which state is fed back. {told(network)}")


def told(network: Any) -> str:
    """Says which reading a drafter uses, and why."""
    counts, config = network.feedback_counts, network.config
    taken = "the normed state (EAGLE-3.1)" if config.norm_output else "the state before the norm (EAGLE-3)"
    if counts:
        return f"{taken}, as drafts agreed with {counts[True]} tokens if normed and with {counts[False]} if not"
    if config.norm_output_told:
        return f"{taken}, as the files tell"
    if not can_be_tried(config):
        return f"{taken}, which cannot be tried: its layers have different windows"
    return "not tried yet: calls try both readings"


def try_on(drafter: Any, target: Any, tokenizer: Any) -> str:
    """Generates a few lines with the target and the drafter, and says which reading was chosen."""
    for prompt in _PROMPTS:
        if can_be_tried(drafter.config):
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(target.device)
            target.generate(**inputs, assistant_model=drafter, max_new_tokens=_ENOUGH + _STEP, do_sample=False)
    return told(drafter)
