"""Checks a drafter by decoding alone: whether outputs equal plain decoding's, and how much was drafted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.call_output import DraftStatistics
from ...engine.divergence import Divergence, first_divergence


@dataclass(frozen=True)
class CheckedText:
    """A text decoded with and without a drafter; `divergence` is `None` if both hold the same tokens."""

    statistics: DraftStatistics
    divergence: Divergence | None

    def __str__(self) -> str:
        found, same = self.statistics, "yes" if self.divergence is None else str(self.divergence)
        return f"{found.new_tokens} tokens, tau {found.tau:.2f}, same text {same}"


def check_texts(
    drafter: Any, target: Any, inputs: Sequence[dict[str, torch.Tensor]], max_new_tokens: int
) -> Iterator[CheckedText]:
    """Decodes prompts greedily, plainly and with a drafter of any family.

    `inputs` holds `input_ids` and `attention_mask` of each prompt, `[1, length]`.
    """
    call = {"do_sample": False, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    for each in inputs:
        plain = target.generate(**each, **call).sequences
        output = target.generate(**each, **call, assistant_model=drafter)
        yield CheckedText(
            output.statistics, first_divergence(target, each["input_ids"].shape[1], plain, output.sequences)
        )
