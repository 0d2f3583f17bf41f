"""Copies of weights that their user quantised, as they were quantised, for products with few rows.

A product reads such a copy in half or a third of the bytes of bfloat16. It dequantises the weights in registers, to the
numbers that the target's layer multiplies by, and rounds no inputs: only the sums are rounded differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .kernel import Kernel
from .private_operators import integers

OUTPUTS, INPUTS = 16, 32  # of a block
INT8 = 0  # format of few_rows.cpp: bare numbers
# Blocks of GGUF files, in the order of gguf_blocks.h
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
_SAME = 1e-4  # distance of two products in float32, relative to their size; rounded inputs are 100 times apart


@dataclass(frozen=True, eq=False)
class SmallCopy:
    """A weight `[outputs, inputs]` in blocks for the operators of few_rows.cpp.

    Attributes:
        operators: their namespace.
        blocks: `[outputs / 16, inputs / 32, bytes of a block]`, uint8.
        scales: `[outputs]`, float32, of `INT8`; otherwise `None`.
        format: of few_rows.cpp.
    """

    operators: Any
    blocks: torch.Tensor
    scales: torch.Tensor | None
    format: int

    @property
    def outputs(self) -> int:
        return self.blocks.shape[0] * OUTPUTS

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None, by_tiles: bool = True) -> torch.Tensor:
        """x W^T + b of `[..., inputs]`, of the weight's dtype; `bias` has the same dtype, and is contiguous.

        Args:
            by_tiles: whether bfloat16 is multiplied by AMX where that is present.
        """
        return self.operators.product(x, self.blocks, self.scales, bias, self.outputs, self.format, by_tiles)


def fits(weight: torch.Tensor) -> bool:
    """Whether the shape of a weight fills blocks."""
    return weight.dim() == 2 and not (weight.shape[0] % OUTPUTS or weight.shape[1] % INPUTS) and weight.numel() > 0


def in_int8(found: Any, weight: torch.Tensor, scales: torch.Tensor) -> SmallCopy:
    """A copy of int8 `[outputs, inputs]` with a scale for each output `[outputs]`."""
    groups, parts = len(weight) // OUTPUTS, weight.shape[1] // INPUTS
    pairs = weight.view(groups, OUTPUTS, parts, INPUTS // 2, 2).permute(0, 2, 3, 1, 4)
    return SmallCopy(found, pairs.contiguous().view(torch.uint8).flatten(2), scales.float().contiguous(), INT8)


def in_blocks(
    found: Any, kind: str, raw: torch.Tensor, weight: torch.Tensor, order: torch.Tensor | None = None
) -> SmallCopy | None:
    """A copy of a weight `[outputs, inputs]`, bfloat16 or float32, by blocks of a GGUF file `[outputs, bytes]`, uint8.

    Row i of the weight is row `order[i]` of the blocks; `None` if their numbers differ.
    """
    order = torch.arange(len(weight)) if order is None else order
    blocks, format = found.blocks_of(raw, weight, order, BLOCKS.index(kind))
    return SmallCopy(found, blocks, None, format) if blocks.numel() else None


def joined(copies: Sequence[SmallCopy]) -> SmallCopy | None:
    """One copy of several weights of the same input, along their outputs; `None` if their formats differ."""
    first = copies[0]
    if len(copies) == 1:
        return first
    if any(copy.format != first.format for copy in copies):
        return None
    scales = None if first.scales is None else torch.cat([copy.scales for copy in copies if copy.scales is not None])
    return SmallCopy(first.operators, torch.cat([copy.blocks for copy in copies]), scales, first.format)


def _multiplies(found: Any) -> bool:
    """Whether products of numbers that are exact in each dtype are right, in all formats."""
    outputs, inputs = 3 * OUTPUTS, 256
    numbers, bias = integers(outputs, inputs), integers(outputs)
    scales, held = 2.0 ** integers(outputs), _blocks_of(numbers.view(outputs, -1, INPUTS))
    for dtype in (torch.bfloat16, torch.float32):
        weight = numbers.to(dtype)
        copies: list[SmallCopy | None] = [in_int8(found, numbers.to(torch.int8), scales)]
        copies += [in_blocks(found, kind, blocks.flatten(1), weight) for kind, blocks in held.items()]
        for rows in (1, 3, 4, 5, 17):  # each way to multiply: few rows directly, then by panels; a tile, two of them
            x = integers(rows, inputs)
            for copy in copies:
                if copy is None:
                    return False
                expected = F.linear(x, numbers) * (scales if copy.format == INT8 else 1.0) + bias
                if not torch.equal(copy(x.to(dtype), bias.to(dtype)), expected.to(dtype)):
                    return False
    return True


def _blocks_of(parts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Blocks of each layout for numbers `[outputs, 8, 32]` from -8 to 7, by kind, with scales of 1."""
    outputs, ones = len(parts), torch.ones(len(parts), 8, 1).half().view(torch.uint8)
    bits = (parts + 8).to(torch.uint8)  # and a least value of -8
    halves, low, high = bits[..., :16] | bits[..., 16:] << 4, bits[:, ::2], bits[:, 1::2]
    least = (-8 * torch.ones(outputs, 8, 1)).half().view(torch.uint8)
    six = torch.tensor([1] * 4 + [8] * 4 + [1 | 8 << 4] * 4, dtype=torch.uint8).expand(outputs, -1)  # scales and leasts
    more = (parts + 32).to(torch.uint8).view(outputs, 2, 4, INPUTS)
    top = torch.stack([more[:, :, part] >> 4 << 2 * part for part in range(4)]).sum(0, dtype=torch.uint8)
    bottom = more[:, :, :2] & 15 | (more[:, :, 2:] & 15) << 4
    by_part: dict[str, list[torch.Tensor]] = {
        "Q8_0": [ones, parts.to(torch.int8).view(torch.uint8)],
        "Q4_0": [ones, halves],
        "Q5_1": [ones, least, torch.zeros(outputs, 8, 4, dtype=torch.uint8), halves],
    }
    by_block: dict[str, list[torch.Tensor]] = {
        "Q4_K": [ones[:, 0], ones[:, 0], six, low | high << 4],
        "Q6_K": [bottom, top, torch.ones(outputs, 16, dtype=torch.uint8), ones[:, 0]],
    }
    found = {kind: torch.cat(held, dim=-1) for kind, held in by_part.items()}
    return found | {kind: torch.cat([each.flatten(1) for each in held], dim=1) for kind, held in by_block.items()}


KERNEL = Kernel(Path(__file__).with_name("few_rows.cpp"), "products by small weights", _multiplies)


def quantised_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The int8 numbers `[out, in]` and the scales `[out]` of a weight that its user quantised, or `None`.

    These are torchao's weights with a scale for each output; inputs are not quantised.
    """
    numbers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(numbers, torch.Tensor) or not isinstance(scales, torch.Tensor):
        return None
    plain = numbers.dtype == torch.int8 and numbers.device.type == "cpu" and numbers.is_contiguous() and fits(numbers)
    others = ("zero_point", "act_quant_kwargs", "act_quant_scale", "act_pre_scale")
    if not plain or scales.numel() != len(numbers) or any(getattr(weight, name, None) is not None for name in others):
        return None
    return numbers, scales.reshape(-1)


def small_copy(weight: torch.Tensor) -> SmallCopy | None:
    """A copy of a quantised weight; `None` where there is no kernel, or its product is another one."""
    parts, found = quantised_parts(weight), KERNEL.operators()
    if parts is None or found is None:
        return None
    copy = in_int8(found, *parts)
    x = (torch.arange(2 * weight.shape[1], dtype=torch.float32) * 12.9898).sin().view(2, -1)
    own = F.linear(x, weight)
    return copy if (copy(x) - own).norm() <= _SAME * own.norm() else None
