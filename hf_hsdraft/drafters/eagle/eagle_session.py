"""Session of an EAGLE-3 drafter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.attention import batched_attention
from ...core.tensors import on_device
from ...core.tuning import TUNING
from ...trees.tree_builders import Expansion
from ...verify.foresight import Foresight
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask
from ..base.reading_session import Columns, ReadingSession, Slots
from ..base.target_weights import TargetWeights
from ..base.tree_session import ParallelExpansion
from .eagle_expansion import DraftedRows, EagleExpansion, parallel_logits
from .eagle_network import AttendRows, EagleNetwork
from .feedback_trial import FeedbackTrial, can_be_tried


class EagleSession(ReadingSession):
    """Drafts trees (or chains) for a batch, one depth of all rows per forward; arguments as in `ReadingSession`.

    Foresight serves beams only: rejection needs nodes drawn by independent random numbers.

    Attributes:
        expansion_class: runs the drafter on nodes.
    """

    expansion_class: type[EagleExpansion] = EagleExpansion

    def __init__(
        self,
        network: EagleNetwork,
        weights: TargetWeights,
        options: DraftOptions,
        count: int = 1,
        foresight: Foresight | None = None,
    ) -> None:
        config = network.config
        super().__init__(network, weights, options, count, config.num_hidden_layers, config.layer, foresight)
        parallel = config.mask_token_id is not None
        sizes = config.layer, config.num_hidden_layers, config.draft_vocab_size
        self.kind = *sizes, parallel, network.dtype, network.device
        self._last: dict[int, torch.Tensor] = {}  # `[D]`, y of each row's last pair read
        self._trial = None if not can_be_tried(config) else FeedbackTrial(network, weights)

    def columns(self, news: Accepted) -> Columns:
        device, dtype = self.drafter.device, self.drafter.dtype
        last = self.weights.embed(news.following[-1:])
        if news.embeds is None:
            embeds, count = self.weights.embed(news.following), len(news.positions)
        elif news.embeds.shape[-1] == last.shape[-1]:
            embeds, count = torch.cat([news.embeds.to(last.device, last.dtype), last]), len(news.positions)
        else:  # the drafter's embedding has another width, and the token ids are unknown
            embeds, count = last, 1
        taps, positions = news.taps[-count:], news.positions[-count:]
        if self._trial is not None and news.row == 0 and len(news.following) >= count:
            self._trial.add(taps, embeds, positions, news.following[-count:])
        return taps.to(device, dtype), embeds.to(device, dtype), positions.to(device)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        (taps, embeds, positions), network = columns, self.drafter
        ends = on_device(list(counts.values()), positions.device).cumsum(0) - 1
        attend = self._attention(counts, slots, positions)
        states = network.through(network.fuse(taps), embeds, positions, attend, ends)
        self._last.update(zip(counts, states, strict=True))

    def _attention(self, counts: Mapping[int, int], slots: Slots, positions: torch.Tensor) -> AttendRows:
        """Attention of accepted pairs, row by row: each sees its sequence up to itself."""
        context, rows, windows = self._context, list(counts), self.drafter.config.windows

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ends: Any
        ) -> torch.Tensor:
            context.write(layer, slots, keys, values)
            if ends is not None:  # only the last pair of each row
                seen = context.seen(rows, positions[ends][:, None], windows[layer])
                return batched_attention(queries[:, None], *context.view(layer, rows), seen)[:, 0]
            mixed = []
            texts = zip(rows, queries.split(list(counts.values())), positions.split(list(counts.values())), strict=True)
            for row, own, at in texts:
                view = context.view(layer, [row])
                # A mask of a whole prompt would grow quadratically.
                for block, last in zip(own.split(TUNING.mask_rows), at.split(TUNING.mask_rows), strict=True):
                    seen = context.seen([row], last[None], windows[layer])
                    mixed.append(batched_attention(block[None], *view, seen)[0])
            return torch.cat(mixed)

        return attend

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        read = self._context
        self._context = copy.deepcopy(read)  # later rounds overwrite drafted positions
        made = self.expansion(asks, expansion.depth, options)
        self._context = read
        return made

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        network, weights, mask = self.drafter, self.weights, self.drafter.config.mask_token_id
        rows = [ask.row for ask in asks]
        self.read_pending(rows)
        if self._trial is not None:
            self._trial.decide()
        race, temperature = self.race(rows, depth), options.draw_temperature
        drafted = self.rows_after(rows)
        if mask is None:
            return self.expansion_class(network, weights, drafted, depth, temperature, race)
        logits = parallel_logits(network, weights, drafted, mask, depth)
        return ParallelExpansion(logits, temperature=temperature, race=race)

    def rows_after(self, rows: Sequence[int]) -> DraftedRows:
        """Returns the drafted rows of sequences without pending pairs."""
        states = torch.stack([self._last[row] for row in rows])
        return DraftedRows(self.drafter, self._context, rows, states, self.anchors(rows) - 1)
