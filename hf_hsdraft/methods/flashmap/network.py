"""The network of a FlashMap drafter: a diffusion transformer that jumps from noise to a block of tokens.

Parameters have the names of the authors' class. Letters in the shapes: B rows, T context positions, K slots of a block,
D width of the network, E that of the target, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import RMSNorm, batched_attention
from ...drafters.base.decoder_layer import Attention, Rope, rotary_of, rotate
from ...drafters.base.published import PublishedNetwork
from ...drafters.base.target_weights import TargetWeights, borrow
from .configuration import FlashMapConfig

Modulation = tuple[torch.Tensor, ...]  # scale, shift and gate, `[1, 1, D]` each
Jump = Sequence[Modulation]  # of all norms in order of computation: three a layer, and the last
Look = Callable[
    [int, torch.Tensor], torch.Tensor
]  # attention of a layer's queries `[B, K, heads, size]` to the context

_ROWS_AT_ONCE = 2**14  # of the embedding, as its copy may be in another dtype


class PairedAttention(Attention):
    """Attention whose rotary embedding turns channels 2i and 2i + 1 together.

    They are moved to the two halves of a head, in queries and keys alike, which changes no score.
    """

    def _turned(self, x: torch.Tensor, norm: nn.Module | None, rope: Rope) -> torch.Tensor:
        heads = cast(nn.Module, norm)(x.unflatten(-1, (-1, self.head_dim)))
        return rotate(heads.unflatten(-1, (-1, 2)).mT.flatten(-2), rope)


class TimeEmbedding(nn.Module):
    """Embeds a time from 0 to 1: waves of it, and two products."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.count, self.scale = config.time_embed_dim // 2, config.time_scale
        self.linear_1 = nn.Linear(config.time_embed_dim, config.cond_dim)
        self.linear_2 = nn.Linear(config.cond_dim, config.cond_dim)

    def forward(self, time: float) -> torch.Tensor:
        """Returns `[1, 1, C]`."""
        weight = self.linear_1.weight
        frequencies = torch.exp(torch.arange(self.count, device=weight.device) * (-math.log(10000.0) / self.count))
        waves = time * self.scale * frequencies
        return self.linear_2(F.silu(self.linear_1(torch.cat([waves.cos(), waves.sin()])[None, None].to(weight.dtype))))


class ModulatedNorm(nn.Module):
    """A layer norm whose scale and shift come from the times of a jump, as does the gate of what follows."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.linear, self.eps = nn.Linear(config.cond_dim, 3 * config.hidden_size), config.layer_norm_eps

    def modulation(self, times: torch.Tensor) -> Modulation:
        return self.linear(F.silu(times)).chunk(3, dim=-1)

    def forward(self, x: torch.Tensor, modulation: Modulation) -> torch.Tensor:
        scale, shift, _ = modulation
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift


class FlowLayer(nn.Module):
    """Attention among the slots of a block, attention to the context, and a feed-forward block."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.self_attn_adaln, self.self_attn = ModulatedNorm(config), PairedAttention(config.sizes)
        self.cross_attn_adaln, self.cross_attn = ModulatedNorm(config), PairedAttention(config.sizes)
        self.mlp_adaln = ModulatedNorm(config)
        inner, width = config.intermediate_size, config.hidden_size
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    @property
    def norms(self) -> Sequence[ModulatedNorm]:
        return self.self_attn_adaln, self.cross_attn_adaln, self.mlp_adaln

    def forward(self, x: torch.Tensor, jump: Jump, rope: Rope, look: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Returns the slots `[B, K, D]` after this layer; `look` attends to its context."""
        first, second, third = jump

        def among(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
            return batched_attention(queries, keys.transpose(1, 2), values.transpose(1, 2))

        x = x + first[2] * self.self_attn(self.self_attn_adaln(x, first), rope, among)
        mixed = look(self.cross_attn.queries(self.cross_attn_adaln(x, second), rope))
        x = x + second[2] * self.cross_attn.o_proj(mixed)
        return x + third[2] * self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.mlp_adaln(x, third))))


class FlashMapNetwork(PublishedNetwork):
    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__(config)
        width, target = config.hidden_size, config.target_hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * target, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.anchor_proj, self.anchor_norm = nn.Linear(target, width), RMSNorm(width, config.rms_norm_eps)
        self.state_norm, self.noise_norm = (RMSNorm(target, config.rms_norm_eps) for _ in range(2))
        self.noise_gate = nn.Parameter(torch.ones(1))
        self.x_embed = nn.Linear(target, width)
        self.time_embed, self.jump_embed = TimeEmbedding(config), TimeEmbedding(config)
        self.layers = nn.ModuleList(FlowLayer(config) for _ in range(config.num_hidden_layers))
        self.final_adaln = ModulatedNorm(config)
        self.head = nn.Linear(width, target)
        rope = {"rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}}
        self.rotary = rotary_of(rope, config.sizes)

    @torch.no_grad()
    def jump(self, start: float, end: float) -> Jump:
        """Returns what the times of a jump make of all norms."""
        times = self.time_embed(start) + self.jump_embed(end)
        norms = [norm for layer in self.layers for norm in cast(FlowLayer, layer).norms]
        return [norm.modulation(times) for norm in (*norms, self.final_adaln)]

    def read(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns context states `[T, D]` from the target's hidden states `[T, taps * E]`."""
        return self.hidden_norm(self.fc(taps))

    def read_anchors(self, embeds: torch.Tensor) -> torch.Tensor:
        """Returns context states `[..., D]` of last accepted tokens, which the target has not read, `[..., E]`."""
        return self.anchor_norm(self.anchor_proj(embeds))

    def context_keys(self, index: int, states: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's keys and values `[..., heads, head_dim]` of context states `[..., D]`."""
        attention = cast(FlowLayer, self.layers[index]).cross_attn
        return attention.keys(states, rope), attention.values(states)

    def inputs(self, likely: torch.Tensor, noise: torch.Tensor, start: float, end: float) -> torch.Tensor:
        """Returns inputs `[B, K, E]` of a jump from embeddings of the likely tokens and of the noisy state."""
        length = 1.0 if self.config.noise_gate == "constant" else end - start
        return self.state_norm(likely) + (self.noise_gate * length) * self.noise_norm(noise)

    def run(self, inputs: torch.Tensor, jump: Jump, positions: torch.Tensor, look: Look) -> torch.Tensor:
        """Returns the states `[B, K, E]` that the target's head reads, of slots at positions `[B, K]`."""
        x, rope = self.x_embed(inputs), self.rotary(positions, inputs.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, jump[3 * index : 3 * index + 3], rope, lambda queries, index=index: look(index, queries))
        return self.head(self.final_adaln(x, jump[-1]))

    def borrow(self, embedding: nn.Module, output_head: nn.Module | None, scaled: bool = True) -> TargetWeights:
        """Collects the target's embedding and output rows; arguments as those of `target_weights.borrow`."""
        ids = self.draft_vocab_ids()
        return borrow(cast(nn.Embedding, embedding), output_head, ids, self.device, self.dtype, scaled)


def embedded(states: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns weighted sums `[..., E]` of the embeddings of all tokens, by weights `[..., V]`."""
    size, total = states.shape[-1], None
    for begin in range(0, size, _ROWS_AT_ONCE):
        rows = embed(torch.arange(begin, min(begin + _ROWS_AT_ONCE, size), device=states.device))
        part = states[..., begin : begin + _ROWS_AT_ONCE].to(rows.dtype) @ rows
        total = part if total is None else total + part
    assert total is not None
    return total
