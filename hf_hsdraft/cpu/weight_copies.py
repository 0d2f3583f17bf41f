"""Copies of weights for products with few rows: how they are made, the products by them, and what they were made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.tuning import TUNING
from .gguf_blocks import copy_of_blocks
from .private_operators import can_pack, packed_copy, packed_product
from .small_weights import KERNEL, SmallCopy, joined, quantised_parts, small_copy

Copy = torch.Tensor | SmallCopy  # torch's packed one; of a quantised weight, one of our kernel's
Stamp = tuple[int, int | None]


def has_kernel(weight: torch.Tensor) -> bool:
    """Whether a kernel here multiplies by a copy of `weight`."""
    if quantised_parts(weight) is not None:
        return KERNEL.operators() is not None
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.numel() == 0:
        return False
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    return can_pack(weight.dtype)


def copy_of(weights: Sequence[torch.Tensor]) -> Copy | None:
    """A copy of weights `[out, in]`, accepted by `has_kernel`, joined along `out`.

    Returns `None` if the products of a quantised one are others than the kernel's. Raises a RuntimeError without room.
    """
    small = [copy_of_blocks(weight) if quantised_parts(weight) is None else small_copy(weight) for weight in weights]
    found = [copy for copy in small if copy is not None]
    whole = joined(found) if len(found) == len(weights) else None
    if whole is not None or any(quantised_parts(weight) is not None for weight in weights):
        return whole
    dense = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    return packed_copy(dense, TUNING.packed_rows)


def product(x: torch.Tensor, copy: Copy, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b of `[..., in]`, by a copy of W; `bias` is contiguous and has the dtype of `x`."""
    return copy(x, bias) if isinstance(copy, SmallCopy) else packed_product(x, copy, bias)


def is_worth_it(copy: Copy, x: torch.Tensor) -> bool:
    """Whether the product by the copy is quicker than the layer's own, for these rows."""
    return not isinstance(copy, SmallCopy) or x.numel() <= TUNING.small_rows * x.shape[-1]


def stamps_of(weights: Sequence[torch.Tensor]) -> list[Stamp]:
    """What changes when weights are replaced, or written to in a way that their versions count."""
    parts = [part for weight in weights for part in _parts(weight)]
    return [(part.data_ptr(), None if part.is_inference() else part._version) for part in parts]


def sums_of(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Checksums of the bits of each weight, int64, to detect writes to `.data`."""
    return [_sums(part.detach().reshape(len(part), -1)) for weight in weights for part in _parts(weight)]


def _parts(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a weight: torchao wraps two of them."""
    return quantised_parts(weight) or (weight,)


def _sums(weight: torch.Tensor) -> torch.Tensor:
    row = weight.shape[1] * weight.element_size()
    if not weight.is_contiguous() or row % 8 or weight.data_ptr() % 8:
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.element_size()]
        return weight.view(bits).sum(1, dtype=torch.int64)
    words = weight.view(torch.int64)
    return words.view(len(words), 4 if words.shape[1] % 4 == 0 else 1, -1).sum(-1)
