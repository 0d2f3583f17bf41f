"""Grouped-query attention for batches, and for chains that share a context."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def batched_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """`shared_attention` for a batch, each row with its own keys: `[B, n, heads * head_dim]`.

    Args:
        queries: `[B, n, heads, head_dim]`.
        keys, values: `[B, kv_heads, P, head_dim]`.
        seen: `[B, n, P]`, bool, True where a query may look; `None` for everywhere. Each query has to see a key.
    """
    batch, rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    grouped = queries.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
    mask = None if seen is None else seen.repeat(1, groups, 1)[:, None]
    mixed = F.scaled_dot_product_attention(grouped, keys, values, mask)
    return mixed.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).reshape(batch, rows, -1)


def attention_of_chains(
    queries: torch.Tensor,  # `[S, heads, head_dim]`
    keys: torch.Tensor,  # `[kv_heads, P, head_dim]`
    values: torch.Tensor,  # `[kv_heads, P, head_dim]`
    mask: torch.Tensor,  # `[S, P]`, True where a chain may look
    own_keys: torch.Tensor,  # `[kv_heads, S, steps, head_dim]`
    own_values: torch.Tensor,  # `[kv_heads, S, steps, head_dim]`
) -> torch.Tensor:
    """Attention of chains over a shared context and their own positions: `[S, heads * head_dim]`."""
    kv_heads, length, head_dim = keys.shape
    rows = len(queries)
    queries = queries.view(rows, kv_heads, -1, head_dim).permute(1, 0, 2, 3) * head_dim**-0.5
    flat = queries.reshape(kv_heads, -1, head_dim)
    scores = (flat @ keys.transpose(1, 2)).view(kv_heads, rows, -1, length)
    scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
    scores = torch.cat([scores, queries @ own_keys.transpose(2, 3)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(values.dtype)
    shared = weights[..., :length].reshape(kv_heads, -1, length) @ values
    mixed = shared.view(queries.shape) + weights[..., length:] @ own_values
    return mixed.permute(1, 0, 2, 3).reshape(rows, -1)
