"""Plain decoding's texts, to compare drafted ones with."""

from __future__ import annotations

import torch


def each_with_its_seed(target, ids: torch.Tensor, mask: torch.Tensor, seed: int, **call) -> torch.Tensor:
    """Plain decoding of each row by itself, with the seeds that the rows of a drafted batch get from `seed`."""
    torch.manual_seed(seed)
    texts = []
    for row, row_seed in enumerate(torch.randint(2**63 - 1, (len(ids),)).tolist()):
        torch.manual_seed(row_seed)
        texts.append(target.generate(ids[row : row + 1], attention_mask=mask[row : row + 1], **call))
    return torch.cat(texts)
