"""The drafter: a trunk that rolls hidden states forward, an injector for token information, a compressed head.

Here are the parameters and the forward of training; what is computed with them is in `trunk`. Nothing has a batch axis:
training packs several documents into one row and rolls many chains at once. Decoding hands `WorkingWeights`, made of
the same parameters, to the same trunk. With the package these may be rounded to 8 bits; `hsdraft check` compares the
two, but for that.

Letters in the shapes: T pairs that are read, S chains, K draft steps, D hidden size, V' draft vocabulary, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers.utils import ModelOutput

from ...common.norms import RMSNorm
from ...common.tensors import Transform, side_by_side
from ..packed_texts import Attend, DraftContext, PackedTexts
from ..state_network import StateNetwork
from .configuration_hsdraft import HSDraftConfig
from .injectors import INJECTORS
from .trunk import LayerProducts, Rope, Trunk, read, roll, rotary_frequencies


@dataclass
class HSDrafterOutput(ModelOutput):
    """Output of [`HSDraftNetwork.forward`].

    Attributes:
        hidden_states: K tensors `[S, D]`: g_0 .. g_{K-1} of each chain; g_d predicts the token at start + 2 + d.
        context: the context cache with the new positions appended.
        loss: what the drafter's `loss_function` made of the labels, if there were any.
    """

    loss: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    context: DraftContext | None = None


class HSDraftAttention(nn.Module):
    """Parameters of grouped-query attention."""

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)


class HSDraftLayer(nn.Module):
    """Parameters of a trunk layer; what they compute is `LayerProducts`."""

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = HSDraftAttention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def products(self, made_of: Callable[..., Transform]) -> LayerProducts:
        """The layer by what `made_of` makes of one or several modules that multiply the same."""
        attention = self.attention
        return LayerProducts(
            made_of(self.input_norm),
            made_of(attention.q_proj, attention.k_proj, attention.v_proj),
            made_of(attention.o_proj),
            made_of(self.mlp_norm),
            made_of(self.gate_proj, self.up_proj),
            made_of(self.down_proj),
            self.heads,
            self.kv_heads,
        )

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: torch.Tensor | None = None) -> torch.Tensor:
        return self.products(side_by_side)(x, rope, attend, rows)


class HSDraftNetwork(StateNetwork):
    """The network of a hidden-state drafter: parameters, forward, and what it borrows of its target."""

    config_class = HSDraftConfig
    config: HSDraftConfig
    main_input_name = "taps"
    token_norm: RMSNorm
    _no_split_modules = ["HSDraftLayer"]  # noqa: RUF012

    def __init__(self, config: HSDraftConfig) -> None:
        config.check()  # fields may have been set since it was built
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.add_fusion(reads_tokens=True)
        self.roll_norm = RMSNorm(size, eps)
        self.roll_proj = nn.Linear(size, size, bias=False)
        self.layers = nn.ModuleList(HSDraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.injector = INJECTORS[config.injector](config)
        self.add_head()
        self.post_init()

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        context: DraftContext | None = None,
        num_draft_steps: int | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> HSDrafterOutput:
        """Reads accepted positions, then rolls hidden states forward without tokens (Lyanna, drafting phase).

        Args:
            taps: `[T, taps * D]`, the target's hidden states h_i at the tapped layers, side by side.
            embeds: `[T, D]`, embeddings of the accepted next tokens x_{i+1}.
            position_ids: `[T]`, int64, position i of each pair; those of a document follow one another.
            starts: `[S]`, int64, the pairs at which a chain starts; `None` for the last one only.
            document_ids: `[T]`, int64; pairs of other documents are not seen. `None` if all belong together. What
                the context holds belongs to them too, unless it says to which.
            context: what earlier calls read; `None` for nothing. Not changed.
            num_draft_steps: K of this call, the configuration's by default.
            num_rolled: chains rolled beyond g_0, the first ones of `starts`; `None` for all.
            labels: for training, what `loss_function(drafter, hidden_states, labels)` compares with. Computed in here,
                so that wrappers of the forward (data parallel, sharded, mixed precision) see all that is trained.
        """
        steps = self.config.num_draft_steps if num_draft_steps is None else num_draft_steps
        past = DraftContext() if context is None else context
        texts = PackedTexts(past, position_ids, document_ids, starts, self.config.sliding_window, steps)
        layers = cast(Sequence[HSDraftLayer], self.layers)
        trunk = Trunk(self.fuse_inputs, self.roll_norm, self.roll_proj, layers, self.frequencies())
        x, ropes = read(trunk, taps, embeds, position_ids, texts, steps - 1)
        states = roll(trunk, x, ropes, texts, num_rolled)
        loss = None if labels is None else self.loss_function(self, states, labels)
        return HSDrafterOutput(loss=loss, hidden_states=tuple(states), context=texts.context)

    def frequencies(self) -> torch.Tensor:
        """`[head_dim / 2]`, float32, of the rotary embedding."""
        return rotary_frequencies(self.config.head_dim, self.config.rope_theta, self.device)
