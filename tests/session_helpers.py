"""What tests of sessions need: prompts of different lengths, and news of a text as an engine tells them."""

from __future__ import annotations

import torch
from conftest import VOCAB

from hf_hsdraft.drafters.base.protocol import Accepted


def padded(rows: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    ids = torch.randint(5, VOCAB, (rows, 12), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : 3 * row], mask[row, : 3 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def news(drafter, target, text: list[int], start: int, end: int, row: int = 0) -> Accepted:
    """What a session is told of positions `start` to `end` of a text."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap][0] for tap in drafter.taps], dim=-1)
    tokens = torch.tensor(text)
    return Accepted(
        row=row,
        tokens=text[start + 1 : end + 1],
        taps=taps[start:end],
        positions=torch.arange(start, end),
        following=tokens[start + 1 : end + 1],
    )
