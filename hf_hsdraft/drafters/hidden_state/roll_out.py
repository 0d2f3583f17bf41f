"""A trunk's state in one call: the positions that it has read, and drafts rolled from their ends."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...core.tensors import on_device
from ...core.tuning import TUNING
from ..base.packed_texts import DraftContext, PackedTexts
from .configuration_hsdraft import HSDraftConfig
from .trunk import Context, GrowingText, Rope, Trunk, read, roll

Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # `[T, ...]`: taps h_i, embeddings of x_{i+1}, positions i


class RollOut:
    """A trunk's state in one call; for a single sequence unless `rows` are passed."""

    def __init__(self, trunk: Trunk, config: HSDraftConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._trunk, window = trunk, config.sliding_window
        room = torch.empty(config.num_key_value_heads, 0, config.head_dim, device=device, dtype=dtype)
        sizes = {"spare": TUNING.spare_tokens, "mask_rows": TUNING.mask_rows}
        self._text = GrowingText(len(trunk.layers), room, window, **sizes)
        self._batch, self._window = DraftContext(), window
        # Number of positions that affect the output at the last one and the drafts after it.
        self._reach = None if window is None else len(trunk.layers) * (window - 1) + 1

    @property
    def context(self) -> DraftContext:
        """A copy of the context of a single sequence, as far back as it matters."""
        text = self._text
        held = slice(max(text.length - (self._reach or text.length), 0), text.length)
        pairs = zip(text.keys, text.values, strict=True)
        return DraftContext([(keys[:, held].clone(), values[:, held].clone()) for keys, values in pairs])

    def resume(self, context: DraftContext) -> None:
        text, sides = self._text, zip(*context.layers, strict=True)
        text.keys, text.values = ([state.clone() for state in side] for side in sides)
        text.length = context.length

    def mark(self) -> tuple[int, DraftContext]:
        """Returns the current end of the sequences, for `reset`."""
        return self._text.length, self._batch

    def reset(self, mark: tuple[int, DraftContext]) -> None:
        """Drops positions read since `mark`, which must be fewer than a window holds."""
        self._text.length, self._batch = mark

    def __call__(self, pairs: Pairs, num_draft_steps: int, rows: Mapping[int, int] | None = None) -> torch.Tensor:
        """Reads accepted positions, then rolls K steps from the last of each row: `[B, K, D]`, g_0 .. g_{K-1}.

        In a batch the pairs stand row by row, and `rows` has the number of pairs of each row, in order.
        """
        x, ropes, context = self.read(pairs, num_draft_steps - 1, rows)
        return torch.stack(roll(self._trunk, x, ropes, context), dim=1)

    def read(
        self, pairs: Pairs, ahead: int = 0, rows: Mapping[int, int] | None = None
    ) -> tuple[torch.Tensor, list[Rope], Context]:
        """Reads accepted positions only; returns what `roll` needs for `ahead` steps."""
        if rows is not None:
            packed = self._packed(pairs[2], ahead + 1, rows)
            x, ropes = read(self._trunk, *pairs, packed, ahead)
            self._batch = packed.context.within(self._window)
            return x, ropes, packed
        taps, embeds, position_ids = pairs
        if self._reach is not None and len(taps) >= self._reach:  # earlier positions no longer matter
            taps, embeds, position_ids = (column[-self._reach :] for column in pairs)
            self._text.length = 0
        self._text.extend(len(taps), ahead)
        return *read(self._trunk, taps, embeds, position_ids, self._text, ahead), self._text

    def _packed(self, position_ids: torch.Tensor, steps: int, rows: Mapping[int, int]) -> PackedTexts:
        counts, device = torch.tensor(list(rows.values())), position_ids.device
        documents = on_device([row for row, count in rows.items() for _ in range(count)], device)
        starts = on_device((counts.cumsum(0) - 1).tolist(), device)
        return PackedTexts(self._batch, position_ids, documents, starts, self._window, steps)
