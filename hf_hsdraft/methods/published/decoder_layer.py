"""The pre-norm decoder layer of Llama and Qwen3, with their parameter names.

The caller passes `attend`, which decides what a layer attends to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...core.checks import Limit, check_fields, choice, demand, integer, is_number, setting
from ...core.tensors import RMSNorm
from ...drafters.base.plain_config import described
from ...drafters.base.travelling_config import heads_of, own_integer

Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each `[..., n, head_dim]`

# Attention. Takes queries `[..., n, heads, head_dim]`, and keys and values `[..., n, kv_heads, head_dim]` of the same
# positions; with `rows`, queries of these rows only. Returns `[..., n, heads * head_dim]`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
AttendByLayer = Callable[..., torch.Tensor]  # likewise, preceded by the layer's index

_EPSILON = Limit(lambda value: is_number(value) and 0.0 < value <= 1.0, "a number above 0, at most 1")
_ACTIVATION = choice("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")


@described
@dataclass(frozen=True)
class LayerSizes:
    """Sizes and variant of a decoder layer. Fields are checked on construction."""

    hidden_size: int = setting("width of the states", limit=integer(2**17))
    intermediate_size: int = setting("inner width of the feed-forward block", limit=integer(2**20))
    num_attention_heads: int = setting("number of query heads", limit=integer(2**12))
    num_key_value_heads: int = setting("number of heads of keys and values", limit=integer(2**12))
    head_dim: int = setting("width of a head", limit=integer(2**13))
    rms_norm_eps: float = setting("epsilon of the norms", 1e-6, _EPSILON)
    attention_bias: bool = setting("whether the products for queries, keys and values have a bias", False)
    output_bias: bool = setting("whether the product after attention has one", False)
    mlp_bias: bool = setting("whether the products of the feed-forward block have a bias", False)
    qk_norm: bool = setting("whether each head's queries and keys are normed, as in Qwen3", False)
    hidden_act: str = setting("activation of the feed-forward block, by transformers' name", "silu", _ACTIVATION)
    gemma: bool = setting(
        "whether attention is that of Gemma 4: values are normed, and scores are not scaled. Its layers norm the "
        "outputs of their parts too",
        False,
    )
    keys_are_values: bool = setting("whether values are made by the product for keys", False)
    sinks: bool = setting("whether each query head may look at nothing, by a learned score (attention sinks)", False)

    def __post_init__(self) -> None:
        check_fields(self)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        demand(heads % groups == 0, "num_key_value_heads", groups, f"it must divide num_attention_heads={heads}")
        demand(self.head_dim % 2 == 0, "head_dim", self.head_dim, "rotary embeddings need an even number")

    @classmethod
    def like(cls, config: Any, **fields: Any) -> LayerSizes:
        """Returns sizes like the target's; `fields` override them."""
        sizes = {
            "hidden_size": config.hidden_size,
            "intermediate_size": own_integer(config, "intermediate_size") or 4 * config.hidden_size,
            **heads_of(config),
        }
        return cls(**{**sizes, **fields})


class Attention(nn.Module):
    """Grouped-query attention; `input_size` is the width of its input if that is not the hidden size."""

    def __init__(self, sizes: LayerSizes, input_size: int | None = None) -> None:
        super().__init__()
        inputs, bias = input_size or sizes.hidden_size, sizes.attention_bias
        self.head_dim, self._gemma, self._eps = sizes.head_dim, sizes.gemma, sizes.rms_norm_eps
        query_size, key_size = (
            heads * sizes.head_dim for heads in (sizes.num_attention_heads, sizes.num_key_value_heads)
        )
        self.q_proj = nn.Linear(inputs, query_size, bias=bias)
        self.k_proj = nn.Linear(inputs, key_size, bias=bias)
        self.v_proj = None if sizes.keys_are_values else nn.Linear(inputs, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, sizes.hidden_size, bias=sizes.output_bias)
        self.q_norm = RMSNorm(sizes.head_dim, sizes.rms_norm_eps) if sizes.qk_norm else None
        self.k_norm = RMSNorm(sizes.head_dim, sizes.rms_norm_eps) if sizes.qk_norm else None
        # Scores of the sinks, which `attend` has to add: this module attends to nothing itself
        self.attention_sink_bias = nn.Parameter(torch.zeros(sizes.num_attention_heads)) if sizes.sinks else None

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None) -> torch.Tensor:
        """Maps inputs `[..., n, input_size]` to `[..., n, D]`; with `rows`, for these rows only."""
        keys, values = self.keys(x, rope), self.values(x)
        if rows is not None:
            x, rope = x[rows], (rope[0][rows], rope[1][rows])
        return self.o_proj(attend(self.queries(x, rope), keys, values, rows))

    def queries(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Returns rotated queries `[..., n, heads, head_dim]`."""
        queries = self._turned(self.q_proj(x), self.q_norm, rope)
        return queries * self.head_dim**0.5 if self._gemma else queries  # attention divides by that

    def keys(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Returns rotated keys `[..., n, kv_heads, head_dim]`."""
        return self._turned(self.k_proj(x), self.k_norm, rope)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Returns values `[..., n, kv_heads, head_dim]`."""
        values = (self.k_proj if self.v_proj is None else self.v_proj)(x).unflatten(-1, (-1, self.head_dim))
        return F.rms_norm(values, (self.head_dim,), eps=self._eps) if self._gemma else values

    def _turned(self, x: torch.Tensor, norm: nn.Module | None, rope: Rope) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, self.head_dim))
        return rotate(heads if norm is None else norm(heads), rope)


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int, act: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act = ACT2FN[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residuals; `input_size` as in `Attention`, or a class like it."""

    def __init__(self, sizes: LayerSizes, input_size: int | None = None, attention: Any = Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = attention(sizes, input_size)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = FeedForward(sizes.hidden_size, sizes.intermediate_size, sizes.hidden_act, sizes.mlp_bias)
        self.pre_feedforward_layernorm = self.post_feedforward_layernorm = None
        if sizes.gemma:
            self.pre_feedforward_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
            self.post_feedforward_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
            self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None) -> torch.Tensor:
        """Returns the states `[..., n, D]` after this layer; with `rows`, these rows only."""
        return self.joined(x, self.input_layernorm(x), rope, attend, rows)

    def joined(self, x: torch.Tensor, inputs: torch.Tensor, rope: Rope, attend: Attend, rows: Any) -> torch.Tensor:
        """As `forward`, with the residual `x` and the attention's `inputs` given separately."""
        mixed, x = self.self_attn(inputs, rope, attend, rows), x if rows is None else x[rows]
        if self.pre_feedforward_layernorm is None:
            x = x + mixed
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))  # type: ignore[misc]
        return x * cast(torch.Tensor, self.layer_scalar)


class Rotary:
    """Rotary embeddings of any type that transformers supports, by `rope_parameters`, `head_dim` and
    `max_position_embeddings` of a configuration.

    Computed in float32; not a module, so casting the drafter does not round its frequencies.
    """

    def __init__(self, config: Any) -> None:
        with torch.device("cpu"):  # even if the drafter is built on the meta device
            self._embedding = LlamaRotaryEmbedding(config)

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
        """Returns cosines and sines `[..., head_dim]` for positions `[...]`, int64."""
        if self._embedding.inv_freq.device != positions.device:
            self._embedding.to(positions.device)
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self._embedding(like, positions.reshape(1, -1))
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)


def rotary_of(fields: dict[str, Any], sizes: LayerSizes) -> Rotary:
    """Builds the rotary embeddings from a drafter's `fields`.

    These are `rope_parameters`, or the older `rope_theta` and `rope_scaling`, and `max_position_embeddings`. Missing
    ones take transformers' defaults, `rope_theta` 10,000. A `partial_rotary_factor`, there or in a table, is the part
    of each head that is rotated. Raises a ValueError if transformers cannot build it.
    """
    names = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings")
    given = {name: fields[name] for name in names if fields.get(name) is not None}
    known, part = copy.deepcopy(given), fields.get("partial_rotary_factor", 1.0)  # the tables are modified
    try:
        for table in (known.get("rope_parameters"), known.get("rope_scaling")):
            if table is not None and "proportional" not in (table.get("rope_type"), table.get("type")):
                part = table.pop("partial_rotary_factor", None) or part  # transformers' plain type would rotate all
        width = int(getattr(sizes, "rotary_dim", sizes.head_dim) * part)
        demand(width > 0 and width % 2 == 0, "partial_rotary_factor", part, "expected an even part of head_dim")
        config = LlamaConfig(
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_attention_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            head_dim=width,
            **known,
        )
        return Rotary(config)
    except Exception as error:  # transformers raises various types for wrong values
        told = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"rope={given!r} is invalid ({told}): expected rope_parameters as transformers has them"
        ) from error


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates the first `rope.shape[-1]` channels of heads `[..., n, heads, head_dim]`, by halves (rotate-half)."""
    cos, sin = (part[..., None, :] for part in rope)
    if cos.shape[-1] < x.shape[-1]:
        return torch.cat([rotate(x[..., : cos.shape[-1]], rope), x[..., cos.shape[-1] :]], dim=-1)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
