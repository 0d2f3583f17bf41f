"""Where the rows of a batch stand in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.tensors import on_device


@dataclass(frozen=True)
class TextRows:
    """The texts of the rows that are read.

    Attributes:
        kept: number of slots that hold the text of each row. Those behind are left over from longer rows.
        prompt_slots: number of slots of the prompts.
        attended: `[B or 1, prompt_slots]`, bool, which of these are no padding; `None` if there is none.
        last_positions: `[..., B or 1]`, the target's own positions of the prompts' ends, on several axes for some;
            `None` if it is given none.
    """

    kept: list[int]
    prompt_slots: int
    attended: torch.Tensor | None
    last_positions: torch.Tensor | None

    @property
    def next_positions(self) -> list[int] | None:
        """After the prompts, the target's own position of each row's next token; of several axes the greatest."""
        if self.last_positions is None:
            return None
        last = self.last_positions.reshape(-1, self.last_positions.shape[-1]).amax(dim=0)
        return (last.expand(len(self.kept)) + 1).tolist()

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row in the cache, padding not counted."""
        if self.attended is None:
            return list(self.kept)
        real = self.attended.sum(dim=1).expand(len(self.kept)).tolist()
        return [kept - self.prompt_slots + count for kept, count in zip(self.kept, real, strict=True)]

    def keeping(self, counts: Sequence[int]) -> TextRows:
        """The same when each row has so many tokens more."""
        return replace(self, kept=[kept + count for kept, count in zip(self.kept, counts, strict=True)])

    def of(self, places: Sequence[int]) -> TextRows:
        """Some of the rows, in this order."""
        attended, positions, before = self.attended, self.last_positions, len(self.kept)
        if attended is not None and len(attended) == before:
            attended = attended[on_device(places, attended.device)]
        if positions is not None and positions.shape[-1] == before:
            positions = positions[..., on_device(places, positions.device)]
        return TextRows([self.kept[place] for place in places], self.prompt_slots, attended, positions)


def slots_of_prompts(
    target: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], cached: int
) -> int:
    """Number of slots that are filled once `generate()` has read the prompts.

    It takes them for the whole texts where they are as long as the mask, or embeddings: then it leaves out what the
    cache holds. Otherwise they are what the cache does not hold yet.

    Args:
        input_ids: `[B, length]`.
        cached: number of slots that are filled before.
    """
    decoder = target.config.is_encoder_decoder
    embeds = None if decoder else model_kwargs.get("inputs_embeds")
    mask = model_kwargs.get("decoder_attention_mask" if decoder else "attention_mask")
    known = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    length = (input_ids if embeds is None else embeds).shape[1]
    whole = embeds is not None or known == length
    return cached + len(range(length)[cached - length if whole else 0 :])
