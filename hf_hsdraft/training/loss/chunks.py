"""Sums over many rows, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def sum_over_chunks(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    rows: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    rows_per_chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums a loss over chunks of rows, and keeps the intermediate results of one chunk only.

    Gradients are computed in the forward, chunk by chunk. The backward only scales them.

    Args:
        function: takes a chunk of each of `rows`; returns its loss, a scalar, and detached values `[n, ...]` of its
            rows.
        rows: tensors `[N, ...]`, which are split in the same way.
        parameters: other tensors that the loss depends on and that need gradients.

    Returns:
        The summed loss and the values `[N, ...]`.
    """
    if not torch.is_grad_enabled():
        pieces = [function(*chunk) for chunk in _chunks(rows, rows_per_chunk)]
        return torch.stack([piece[0] for piece in pieces]).sum(), torch.cat([piece[1] for piece in pieces])
    result: tuple[torch.Tensor, torch.Tensor] = _SumOverChunks.apply(
        function, rows_per_chunk, len(rows), *rows, *parameters
    )
    return result


def _chunks(rows: Sequence[torch.Tensor], size: int) -> Iterable[tuple[torch.Tensor, ...]]:
    return zip(*(part.split(size) for part in rows), strict=True)


class _SumOverChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, size: int, num_rows: int, *tensors: torch.Tensor) -> Any:
        rows, parameters = tensors[:num_rows], tensors[num_rows:]
        wanted = [index for index, part in enumerate(rows) if part.requires_grad]
        of_rows: list[list[torch.Tensor]] = [[] for _ in wanted]
        of_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        total, values = rows[0].new_zeros((), dtype=torch.float32), []
        for chunk in _chunks(rows, size):
            leaves = [part.detach().requires_grad_(part.requires_grad) for part in chunk]
            with torch.enable_grad():
                loss, value = function(*leaves)
            sources = [*(leaves[index] for index in wanted), *parameters]
            gradients = torch.autograd.grad(loss, sources, allow_unused=True)
            total += loss.detach()
            values.append(value)
            for kept, gradient, index in zip(of_rows, gradients[: len(wanted)], wanted, strict=True):
                kept.append(torch.zeros_like(leaves[index]) if gradient is None else gradient)
            for index, gradient in enumerate(gradients[len(wanted) :]):
                if gradient is not None:
                    known = of_parameters[index]
                    of_parameters[index] = gradient if known is None else known.add_(gradient)
        ctx.gradients = [None] * num_rows + of_parameters
        for index, parts in zip(wanted, of_rows, strict=True):
            ctx.gradients[index] = torch.cat(parts)
        value = torch.cat(values)
        ctx.mark_non_differentiable(value)
        return total, value

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor, _: Any) -> Any:
        return (None, None, None, *(None if g is None else g * scale.to(g.dtype) for g in ctx.gradients))
