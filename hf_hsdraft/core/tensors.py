"""Tensor and module helpers, and parts that networks share: a norm, and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Transform = Callable[[torch.Tensor], torch.Tensor]  # of the last axis
# Takes a layer's index, queries `[R, heads, head_dim]`, and keys and values `[kv_heads, n, head_dim]` to keep; with
# `rows`, only these rows have queries. Returns `[R, heads * head_dim]`.
Attend = Callable[..., torch.Tensor]


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Nested `values` as a tensor on a device, without waiting for queued work."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling a module runs only its class's forward, on weights where they are."""
    own = vars(module)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not (any(own[name] for name in hooks) or "forward" in own)


def hooks_of(model: nn.Module) -> list[Any]:
    """The hooks by which accelerate runs parts of a model elsewhere, or offloads their weights."""
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    return [part for hook in hooks for part in getattr(hook, "hooks", [hook])]


def device_of(model: Any) -> torch.device:
    """Where a model or a module computes.

    `model.device` is where weights are between forwards: on the meta device where accelerate offloads them. Then its
    hooks know where they are brought to.
    """
    device: torch.device = next(model.parameters()).device if not hasattr(model, "device") else model.device
    if device.type != "meta":
        return device
    places = [getattr(hook, "execution_device", None) for hook in hooks_of(model)]
    return next((torch.device(place) for place in places if place is not None), device)


def embedded_tokens(model: Any) -> int:
    """Number of tokens that a model embeds; by its configuration where its embedding is a module without a table."""
    table = getattr(model.get_input_embeddings(), "weight", None)
    rows: int = model.config.get_text_config(decoder=True).vocab_size
    return len(table) if isinstance(table, torch.Tensor) and table.dim() == 2 else rows


def side_by_side(*modules: nn.Module) -> Transform:
    """Applies modules to the same input and concatenates in the last axis."""
    return modules[0] if len(modules) == 1 else lambda x: torch.cat([module(x) for module in modules], dim=-1)


def joined(*modules: nn.Module) -> Transform:
    """As `side_by_side`, by one product with all weights, which are joined now: for a forward that uses them often."""
    linear = all(type(module) is nn.Linear and module.bias is None and is_unhooked(module) for module in modules)
    if len(modules) == 1 or not linear:
        return side_by_side(*modules)
    weights: list[torch.Tensor] = [module.weight for module in modules]  # type: ignore[misc]
    kind = weights[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights[0].dtype
    weight = torch.cat([each.to(dtype) for each in weights])
    return lambda x: F.linear(x, weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last axis, in the dtype of its inputs."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def batched_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Grouped-query attention of a batch, each row with its own keys: `[B, n, heads * head_dim]`.

    The heads of a group are folded into the query axis, so no key is read twice or copied.

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


def shared_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Grouped-query attention of one text, `[n, heads * head_dim]`; arguments as a row's of `batched_attention`."""
    rows, heads, _ = queries.shape
    if rows > 1:
        return batched_attention(queries[None], keys[None], values[None], None if seen is None else seen[None])[0]
    groups = heads // len(keys)
    mask = seen if seen is None or groups == 1 else seen.expand(groups, -1)
    grouped = queries.view(1, len(keys), groups, -1)
    return F.scaled_dot_product_attention(grouped, keys[None], values[None], mask).reshape(1, -1)


def best_of(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a mask of the `count` greatest logits, `[..., V]`, bool."""
    best = logits.topk(count, dim=-1, sorted=False).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)


def biased(logits: torch.Tensor, bias: torch.Tensor, reach: torch.Tensor | None) -> torch.Tensor:
    """Returns logits `[..., V]` with `bias` added where `reach`, bool, is True; `None` for everywhere."""
    return logits + (bias if reach is None else bias.masked_fill(~reach, 0.0))


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of equal tokens at the beginning of two texts."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(place for place in range(least) if one[place] != other[place])
