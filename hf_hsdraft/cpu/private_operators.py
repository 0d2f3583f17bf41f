"""torch's private operators: a later torch may lack them, or take other arguments or another layout.

So each is tried once with a few small numbers, by the same calls as products, and compared with the public operator.
Where it raises or differs, this process does without it. The numbers are integers that each dtype holds, so that sums
are exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from transformers.utils import logging

logger = logging.get_logger(__name__)

_INPUTS, _OUTPUTS = 64, 33


def packed_copy(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of a weight `[out, in]` for `packed_product`, laid out for `rows` rows at once; it serves any number."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b, by a `packed_copy` of W."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def product_in_8_bits(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x W^T of `[n, in]`, by W as int8 `[out, in]` and a scale for each output `[out]`."""
    return torch._weight_int8pack_mm(x, weight, scales)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether products by packed copies of weights of this dtype work here."""
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        of_processor = getattr(operators, "_is_mkldnn_bf16_supported", None)
        if of_processor is None or not works("packed weights", lambda: isinstance(of_processor(), bool)):
            return False
        return of_processor() and works("packed weights", lambda: _packs(dtype))
    return dtype == torch.float32 and works("packed weights", lambda: _packs(dtype))


@cache
def can_multiply_in_8_bits() -> bool:
    """Whether products of bfloat16 by 8-bit weights work here."""
    return hasattr(torch, "_weight_int8pack_mm") and works("8-bit weights", _multiplies_in_8_bits)


def works(what: str, trial: Callable[[], bool]) -> bool:
    """Whether a trial succeeds; logs its failure."""
    try:
        # The answer is cached for all, whatever context the first caller is in.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            problem = "" if trial() else "its products are wrong"
    except Exception as error:  # whatever another torch raises
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.warning(
            f"torch {torch.__version__} has no {what} as they are known here ({problem.splitlines()[0][:160]}). "
            "Drafting continues without them, which is slower."
        )
    return not problem


def _packs(dtype: torch.dtype) -> bool:
    weight, bias = integers(_OUTPUTS, _INPUTS).to(dtype), integers(_OUTPUTS).to(dtype)
    packed = packed_copy(weight, 16)
    inputs = [integers(*shape).to(dtype) for shape in ((1, 1, _INPUTS), (5, _INPUTS))]
    return all(
        torch.equal(packed_product(x, packed, added), F.linear(x, weight, added))
        for x in inputs
        for added in (None, bias)
    )


def _multiplies_in_8_bits() -> bool:
    weight, scales = integers(_OUTPUTS, _INPUTS), 2.0 ** integers(_OUTPUTS)
    inputs = [integers(rows, _INPUTS) for rows in (1, 5)]
    return all(
        torch.equal(
            product_in_8_bits(x.bfloat16(), weight.to(torch.int8), scales.bfloat16()).float(),
            F.linear(x, weight) * scales,
        )
        for x in inputs
    )


def integers(*shape: int) -> torch.Tensor:
    """Float32, small enough that a product's sums are exact in each dtype."""
    count = math.prod(shape)
    return ((torch.arange(count, device="cpu", dtype=torch.float32) * 7 + 3) % 5 - 2).view(shape)
