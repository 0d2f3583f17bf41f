"""Attention by an operator of ours, which reads a text's keys once for all heads that share them.

On processors with AMX it is used for few queries only. torch's kernel multiplies small matrices by a library for large
ones. Scores and sums are float32 in both, so results differ by rounding alone.
"""

from __future__ import annotations

import sys
from functools import cache

import torch
import torch.nn.functional as F

from .private_operators import works
from .small_weights import KERNEL

# Greatest number of queries of a text and a key head that our operator takes on processors with AMX, in float32 and in
# bfloat16, for which torch's kernel uses AMX. On others there is no limit
# - by hand; measured: 27 queries over 200 keys took 41 instead of 63 microseconds with AMX, 51 over 1,000 keys 385
# instead of 307; with AVX-512 alone 512 tokens of 9 heads 1.9 instead of 5.2 ms, 2,048 27 instead of 43 (bfloat16).
FEW_QUERIES = 192
FEW_QUERIES_BESIDE_TILES = 32

_MASKS = (torch.bool, torch.bfloat16, torch.float32)
_LANES, _MOST = 32, 256  # of the operator: a head's size is a multiple of the first, and at most the second
_SAME = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # greatest distance of two results, relative to their size


def attend_few(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor | None:
    """As `grouped_attention.attend`; `None` where the operator is not there, or torch's kernel is as fast."""
    queries = query.shape[1] // key.shape[1] * query.shape[2]
    if not _fits(query, key, value, mask) or (operators := KERNEL.operators()) is None:
        return None
    if not attends(query.dtype, queries):
        return None
    return operators.attend(query, key, value, mask, query.shape[-1] ** -0.5 if scaling is None else scaling)


def attends(dtype: torch.dtype, queries: int) -> bool:
    """Whether the operator, which is there, is quicker for so many queries of a text and a key head, and right."""
    return queries <= _most_queries(dtype) and _is_right(dtype)


def _most_queries(dtype: torch.dtype) -> int:
    if KERNEL.operators().has_tiles():
        return FEW_QUERIES_BESIDE_TILES if dtype == torch.bfloat16 else FEW_QUERIES
    return sys.maxsize


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    batch, heads, n, size = query.shape
    same = (
        query.dtype in _SAME
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and key.shape[::3] == (batch, size)
    )
    if not same or size % _LANES or size > _MOST or heads % key.shape[1] or not key.shape[2]:
        return False
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        return False
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (query, key, value, mask)):
        return False
    if mask is None:
        return n == 1
    of_all_heads = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1:] == (1, n, key.shape[2])
    return of_all_heads and mask.dtype in _MASKS and mask.stride(3) == 1


@cache
def _is_right(dtype: torch.dtype) -> bool:
    """Whether the operator computes what torch's kernel does in this dtype."""
    return works("attention of few queries", lambda: _attends(dtype))


def _attends(dtype: torch.dtype) -> bool:
    count = 2 * (6 * 5 + 4 * 70) * _LANES
    numbers = (torch.arange(count, dtype=torch.float32, device="cpu") * 12.9898).sin().to(dtype)
    query, key, value = (
        part.view(2, heads, -1, _LANES)
        for part, heads in zip(numbers.split([x * 2 * _LANES for x in (30, 140, 140)]), (6, 2, 2), strict=True)
    )
    seen = torch.ones(5, 70, dtype=torch.bool, device="cpu").tril(64)[None, None]
    for mask in (seen, torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))):
        found = KERNEL.operators().attend(query, key, value, mask, 0.5).transpose(1, 2)
        expected = F.scaled_dot_product_attention(query, key, value, mask, scale=0.5, enable_gqa=True)
        if not (found.float() - expected.float()).norm() <= _SAME[dtype] * expected.float().norm():
            return False
    return True
