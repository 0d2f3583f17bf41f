"""Decoder layers of EAGLE drafters, with the parameter names of published files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.checks import integer, setting
from ...core.tensors import RMSNorm
from ..base.decoder_layer import Attend, Attention, DecoderLayer, LayerSizes, Rope, rotate
from ..base.plain_config import number
from .configuration import EagleConfig


@dataclass(frozen=True, kw_only=True)
class LatentSizes(LayerSizes):
    """Sizes of a layer whose keys and values are made of one narrow state (MLA of DeepSeek-V2, section 2.1).

    `head_dim` is the width of queries and keys; the last `rotary_dim` of it are rotated.
    """

    q_lora_rank: int | None = setting(
        "width of the state that queries are made of", None, integer(2**17), optional=True
    )
    kv_lora_rank: int = setting("width of the state that keys and values are made of", limit=integer(2**17))
    rotary_dim: int = setting("width of the part of a head that is rotated", limit=integer(2**13))
    v_head_dim: int = setting("width of a head's values", limit=integer(2**13))
    score_scale: float = setting("factor of the scores, beside that by the width of heads", 1.0, number())


class LatentAttention(nn.Module):
    """MLA; the arguments are those of `Attention`. Stores whole keys and values."""

    def __init__(self, sizes: LatentSizes, input_size: int | None = None) -> None:
        super().__init__()
        inputs, heads, eps = input_size or sizes.hidden_size, sizes.num_attention_heads, sizes.rms_norm_eps
        self._sizes, rank = sizes, sizes.q_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(inputs, heads * sizes.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(inputs, rank, bias=sizes.attention_bias)
            self.q_a_layernorm = RMSNorm(rank, eps)
            self.q_b_proj = nn.Linear(rank, heads * sizes.head_dim, bias=False)
        rotated, rank = sizes.rotary_dim, sizes.kv_lora_rank
        self.kv_a_proj_with_mqa = nn.Linear(inputs, rank + rotated, bias=sizes.attention_bias)
        self.kv_a_layernorm = RMSNorm(rank, eps)
        self.kv_b_proj = nn.Linear(rank, heads * (sizes.head_dim - rotated + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, sizes.hidden_size, bias=sizes.output_bias)

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None) -> torch.Tensor:
        """Maps inputs `[..., n, input_size]` to `[..., n, D]`; with `rows`, for these rows only."""
        sizes, heads = self._sizes, (self._sizes.num_attention_heads, -1)
        state, shared = self.kv_a_proj_with_mqa(x).split([sizes.kv_lora_rank, sizes.rotary_dim], dim=-1)
        made = self.kv_b_proj(self.kv_a_layernorm(state)).unflatten(-1, heads)
        keys, values = made.split([sizes.head_dim - sizes.rotary_dim, sizes.v_head_dim], dim=-1)
        turned = _turned(shared[..., None, :], rope).expand(*keys.shape[:-1], -1)
        if rows is not None:
            x, rope = x[rows], (rope[0][rows], rope[1][rows])
        made = self.q_proj(x) if sizes.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        plain, rotated = made.unflatten(-1, heads).split([keys.shape[-1], sizes.rotary_dim], dim=-1)
        queries = torch.cat([plain, _turned(rotated, rope)], dim=-1) * sizes.score_scale
        return self.o_proj(attend(queries, torch.cat([keys, turned], dim=-1), values, rows))


def _turned(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates pairs of neighbours; the result is in another order, the same for queries and keys."""
    return rotate(x.unflatten(-1, (-1, 2)).mT.flatten(-2), rope)


class EagleLayer(DecoderLayer):
    """A decoder layer. In EAGLE-3 the first one also reads an embedding, which `input_layernorm` norms."""

    def __init__(self, config: EagleConfig, first: bool) -> None:
        size, eps = config.sizes.hidden_size, config.sizes.rms_norm_eps
        reads_embedding = (first or config.all_read_embeddings) and not config.fuses_embedding
        attention: Any = LatentAttention if isinstance(config.sizes, LatentSizes) else Attention
        super().__init__(config.sizes, 2 * size if reads_embedding else size, attention)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(size, eps) if reads_embedding else None
        if first and config.fuses_embedding:  # reads what fc gives, not normed
            self.input_layernorm = nn.Identity()  # type: ignore[assignment]

    def forward(
        self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None, embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As in `DecoderLayer`, with embeddings `[..., n, D]` of the tokens."""
        if self.hidden_norm is None:
            return super().forward(x, rope, attend, rows)
        normed = self.hidden_norm(x)
        inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return self.joined(normed if self.norm_before_residual else x, inputs, rope, attend, rows)
