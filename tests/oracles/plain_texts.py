"""Padded prompts, and plain decoding's texts to compare drafted ones with."""

from __future__ import annotations

import torch

_TOKENS = 97  # of the smallest target that reads these prompts


def padded(rows: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    ids = torch.randint(5, _TOKENS, (rows, 12), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : 3 * row], mask[row, : 3 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def each_with_its_seed(target, ids: torch.Tensor, mask: torch.Tensor, seed: int, **call) -> torch.Tensor:
    """Plain decoding of each row by itself, with the seeds that the rows of a drafted batch get from `seed`."""
    torch.manual_seed(seed)
    texts = []
    for row, row_seed in enumerate(torch.randint(2**63 - 1, (len(ids),)).tolist()):
        torch.manual_seed(row_seed)
        texts.append(target.generate(ids[row : row + 1], attention_mask=mask[row : row + 1], **call))
    return torch.cat(texts)
