"""Drafts chains of a hidden-state drafter in transformers' assisted decoding."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..base.target_weights import TargetWeights
from ..base.travelling_drafter import PlainDraws, TravellingDrafter
from .network import HSDraftNetwork, Leftover, WorkingWeights
from .trunk import GrowingText, read, roll


class HSCandidateGenerator(CandidateGenerator):
    """Drafts chains for one sequence from the target's hidden states.

    A chain is verified by the target's choices, which is exact for greedy decoding and sampling.

    Args:
        max_length: limit of the sequence, drafts included.

    Attributes:
        draws: draws the call's tokens as plain decoding does, if set.
    """

    requires_model_outputs = True

    def __init__(self, drafter: HSDraftNetwork, weights: TargetWeights, max_length: int | None = None) -> None:
        config, options = drafter.config, drafter.generation_config
        self.drafter, self.weights = drafter, weights
        self.draws: PlainDraws | None = None
        self.model_kwargs_overrides = {"output_hidden_states": list(config.target_tap_layers)}
        steps = getattr(options, "num_assistant_tokens", None)
        self._depth = config.num_draft_steps if steps is None else min(steps, config.num_draft_steps)
        self._threshold = getattr(options, "assistant_confidence_threshold", None) or 0.0
        self._reuse, self._weight = getattr(options, "reuse", "none"), getattr(options, "reuse_weight", 0.4)
        self._working, self._max_length = WorkingWeights.of(drafter, weights.head), max_length
        room = torch.empty(config.num_key_value_heads, 0, config.head_dim, device=drafter.device, dtype=drafter.dtype)
        self._text = GrowingText(config.num_hidden_layers, room, config.sliding_window)
        self._started, self._root = False, -1
        self._drafted: torch.Tensor | None = None  # `[K, D]`, g_0 .. g_{K-1} of the last round

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns `input_ids` `[1, length]` extended by a chain, and no logits."""
        states, length = getattr(model_outputs, "hidden_states", None), input_ids.shape[1]
        candidates = input_ids
        if not is_first_iteration and states is not None:
            taps = torch.cat(
                [states[layer][0].to(self.drafter.device) for layer in self.drafter.config.target_tap_layers], dim=-1
            )
            accepted = int(n_last_matches)
            # The first forward read the uncached part of the prompt; later ones read a chain.
            rows = accepted + 1 if self._started else len(taps)
            mask = (model_kwargs or {}).get("attention_mask")
            attended = torch.ones(length - 1) if mask is None else mask[0, : length - 1].cpu()
            positions, real = attended.long().cumsum(0)[-rows:] - 1, torch.nonzero(attended[-rows:]).flatten()
            chain = self._draft(
                taps[real.to(taps.device)],
                input_ids[0, length - rows :][real.to(input_ids.device)],
                positions[real],
                input_ids[0, length - 1 - accepted : length - 1].tolist(),
                length,
            )
            self._started = True
            drafted = torch.tensor([chain], dtype=input_ids.dtype, device=input_ids.device)
            candidates = torch.cat([input_ids, drafted], dim=-1)
        if self.draws is not None:
            self.draws.begin(candidates, length)
        return candidates, None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Does nothing: `num_assistant_tokens` sets the depth."""

    @torch.no_grad()
    def _draft(
        self, taps: torch.Tensor, following: torch.Tensor, positions: torch.Tensor, accepted: list[int], length: int
    ) -> list[int]:
        """Reads pairs (h_i, x_{i+1}, i) and drafts a chain; `accepted` are the accepted tokens of the last draft."""
        leftover = Leftover.of(self._drafted, self._root, accepted)
        self._root = int(following[-1])
        depth = self._depth if self._max_length is None else min(self._depth, self._max_length - length - 1)
        ahead, device = max(depth, 1) - 1, self.drafter.device
        taps, self._drafted = taps.to(device, self.drafter.dtype), None
        self._text.extend(len(taps), ahead)
        embeds = self.weights.embed(following)
        x, ropes = read(self._working, taps, embeds, positions.to(device), self._text, ahead)
        if depth < 1:
            return []
        self._drafted = hidden = torch.cat(roll(self._working, x, ropes, self._text))
        logits = self._working.logits(hidden)
        if leftover is not None and self._reuse == "ensemble":
            self._working.ensemble(logits, leftover, self._root, self._weight, self.weights.embed)
        fresh, worth = self._chain(hidden, logits, None)
        if leftover is None or self._reuse != "resample":
            return fresh
        old = leftover.hidden[:depth]
        since = self._working.after(leftover.path, self.weights.embed)
        again, again_worth = self._chain(old, self._working.logits(old), since)
        return again if again_worth > worth else fresh

    def _chain(self, hidden: torch.Tensor, logits: torch.Tensor, since: torch.Tensor | None) -> tuple[list[int], float]:
        """Returns the greedy chain and the number of its tokens expected to be accepted.

        hidden `[K, D]` are drafted states, logits `[K, V']` the head's; `since` is the injector's state before the
        root, for states drafted without the root.
        """
        injector, state, told = self._working.injector, since, since is not None
        chain, score, worth = [], 0.0, 0.0
        token = self._root
        for place in range(len(hidden)):
            row, state = slice(place, place + 1), self._working.after((token,), self.weights.embed, state)
            likely = injector.told(logits[row], hidden[row], state) if told or place else logits[row]
            best, column = likely.float().log_softmax(dim=-1).max(dim=-1)
            score += float(best)
            if math.exp(score) < self._threshold:
                break
            token = int(self.weights.vocab_ids[column])
            chain.append(token)
            worth += math.exp(score)
        return chain, worth


class ChainDrafter(HSDraftNetwork, TravellingDrafter):
    """A hidden-state drafter where `hf_hsdraft` is not installed."""

    def candidates(self, target: Any, generation_config: Any) -> HSCandidateGenerator:
        weights = self.borrow(target.get_input_embeddings(), target.get_output_embeddings())
        return HSCandidateGenerator(self, weights, max_length=generation_config.max_length)
