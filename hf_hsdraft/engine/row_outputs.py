"""Further outputs of a call's rows, which end at different lengths, joined by step as plain decoding returns them."""

from __future__ import annotations

import torch

from .decoded_texts import DecodedTexts, stacked


def stacked_scores(texts: DecodedTexts, name: str) -> tuple[torch.Tensor, ...]:
    """`scores` or `logits`: `[B, V]` for each step; 0 where a row had ended."""
    rows = [getattr(row, name)[: texts.new_tokens(index)] for index, row in enumerate(texts.rows)]
    return tuple(stacked(rows, step) for step in range(texts.length() - texts.prompt_length))


def stacked_steps(texts: DecodedTexts, name: str) -> tuple[tuple[torch.Tensor, ...], ...] | None:
    """Outputs by step and layer, rows joined; 0 where a row had ended. `None` if the target gave none."""
    if any(name not in step for row in texts.rows for step in row.steps):
        return None
    rows = [[step[name] for step in row.steps[: texts.new_tokens(index)]] for index, row in enumerate(texts.rows)]
    longest, count = max(rows, key=len), texts.length() - texts.prompt_length
    return tuple(
        tuple(
            torch.cat([row[step][layer] if step < len(row) else torch.zeros_like(sample) for row in rows])
            for layer, sample in enumerate(longest[step])
        )
        for step in range(count)
    )
