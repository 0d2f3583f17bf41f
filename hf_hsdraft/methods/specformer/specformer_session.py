"""The session of a SpecFormer drafter: the keys and values of the texts of a call, and drafting."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.tensors import batched_attention, on_device
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.protocol import Accepted, Ask, Call
from ...drafters.base.reading_session import Columns, ParallelSession, Slots
from ...drafters.base.target_weights import TargetWeights
from ...drafters.base.tree_session import TokenBias
from ...trees.tree_builders import Expansion
from .collapsed_frames import CollapsedFrames


class SpecFormerSession(ParallelSession):
    """Drafts trees (or chains) for the texts of a batch, the slots of all of them in one forward.

    Keys and values of the accepted positions are kept. Only the last position attends to them; the outputs of the
    others would never be used. Best trees use `foresight`, sampled ones do not.
    """

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        config = drafter.config
        super().__init__(drafter, weights, call, 1)
        layers, taps, tokens = config.num_hidden_layers, len(config.target_tap_layers), config.draft_vocab_size
        place = drafter.dtype, drafter.device, self._refiner is not None
        self.kind = config.sizes, layers, taps, tokens, config.num_draft_steps, config.ctc, config.reads_tokens, *place
        # The fused inputs of each text's last position read.
        self._last = torch.zeros(call.rows, config.hidden_size, dtype=drafter.dtype, device=drafter.device)

    def columns(self, news: Accepted) -> Columns:
        device, dtype = self.drafter.device, self.drafter.dtype
        embeds = news.next_embeds(self.weights.embed)
        return news.taps.to(device, dtype), embeds, news.positions.to(device)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        drafter, part = self.drafter, self.drafter.context_attn
        taps, embeds, positions = columns
        x = drafter.fuse_inputs(taps, embeds)
        normed = drafter.context_norm(x)
        self._context.write(0, slots, part.keys(normed, drafter.rotary(positions, x.dtype)), part.values(normed))
        ends = [end - 1 for end in itertools.accumulate(counts.values())]
        self._last[on_device(list(counts), x.device)] = x[on_device(ends, x.device)]

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        rows, drafter, part = [ask.row for ask in asks], self.drafter, self.drafter.context_attn
        self.read_pending(rows)
        positions = self.anchors(rows) - 1
        x = self._last[on_device(rows, positions.device)]
        queries = part.queries(drafter.context_norm(x)[:, None], drafter.rotary(positions, x.dtype))
        keys, values = self._context.view(0, rows)
        seen = self._context.seen(rows, positions, drafter.config.sliding_window)
        mixed = batched_attention(queries, keys, values, seen)
        count = drafter.config.num_draft_steps if drafter.config.ctc else depth  # any frame may say the first token
        return drafter.slots(x + part.o_proj(mixed[:, 0]), count)

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        return self.drafter.logits(hidden, self.weights), None

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        if not self.drafter.config.ctc:
            return super().expansion(asks, depth, options)
        frames = self.drafter.frames(self.drafted(asks, depth), self.weights)
        drawn, temperature = options.drawn, options.temperature
        race = self.race([ask.row for ask in asks], depth)
        return CollapsedFrames(frames, self.weights.vocab_ids, depth, drawn, temperature, race)
