"""The network of a SpecFormer drafter: attention over the accepted positions, then slots that are drafted at once.

Letters in the shapes: T pairs that are read, S or B texts or chains, K slots, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import ModelOutput

from ...core.attention import batched_attention
from ...core.norms import RMSNorm
from ...core.tensors import is_unhooked
from ...drafters.base.decoder_layer import Attention, FeedForward, Rope, rotary_of
from ...drafters.base.packed_texts import DraftContext, PackedTexts
from ...drafters.base.state_network import StateNetwork
from ...drafters.base.target_weights import TargetWeights
from .configuration_specformer import SpecFormerConfig


@dataclass
class SpecFormerOutput(ModelOutput):
    """Output of [`SpecFormerNetwork.forward`].

    Attributes:
        loss: what the drafter's `loss_function` made of the labels, if there were any.
        hidden_states: K tensors `[S, D]`: the slots of each chain. Slot d predicts the token at start + 2 + d.
    """

    loss: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class SlotLayer(nn.Module):
    """A decoder layer over the slots of one chain, each of which sees those before it.

    Args:
        config: of the drafter.
    """

    def __init__(self, config: SpecFormerConfig) -> None:
        super().__init__()
        sizes = config.sizes
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = FeedForward(sizes)

    def forward(self, slots: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Returns the slots `[B, K, D]` after this layer."""
        part, x, count = self.self_attn, self.input_layernorm(slots), slots.shape[1]
        keys, values = part.keys(x, rope).transpose(1, 2), part.values(x).transpose(1, 2)
        seen = torch.ones(count, count, dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        slots = slots + part.o_proj(batched_attention(part.queries(x, rope), keys, values, seen))
        return slots + self.mlp(self.post_attention_layernorm(slots))


class SpecFormerNetwork(StateNetwork):
    """The network of a SpecFormer drafter: parameters, forward, and what it borrows of its target.

    Let h_i be the target's hidden states at position i, after which it chose x_{i+1}. The states of a position are
    normed and joined, attend to the positions before (causal, with a residual), and are normed again. One product
    makes K slots of them, without a residual; its bias tells slots apart. The slots attend to those before them and
    pass a feed-forward block, both with residuals. They predict by a norm and the target's output rows ("SpecFormer",
    section 3). Slot d of position i predicts x_{i+2+d}. All slots of a draft are those of position t-1, the last that
    the target has read, with x_t the last accepted token.

    Differences from SpecFormer:

    - SpecFormer's slots know h_i alone. What x_{i+1} is they can only guess: from the distribution that the target drew
      it from. With `reads_tokens`, the default, the embedding of x_{i+1} joins the states, as in the hidden-state
      drafter. At a temperature above 0 this matters most. `reads_tokens=False` is SpecFormer's own form.
    - The released code runs the module on every verified position, in the target's forward, before it is known which
      are accepted. Here only accepted positions are read, in the next draft. They give the same slots.
    - A norm stands before each attention, and the norm before the head is the drafter's own. Its scale is the target's
      when training begins.
    - With `ctc`, slots are frames that may be blank: their head has one more row, see `frames`.
    - With K slots, drafts of depth k compute the first k only. These are the same, as slots see none after them.

    Args:
        config: its configuration.
    """

    config_class = SpecFormerConfig
    config: SpecFormerConfig
    main_input_name = "taps"
    loss_function: Any = None
    _no_split_modules = ["SlotLayer"]  # noqa: RUF012

    def __init__(self, config: SpecFormerConfig) -> None:
        config.check()  # fields may have been set since it was built
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.add_fusion(config.reads_tokens)
        self.context_norm = RMSNorm(size, eps)
        self.context_attn = Attention(config.sizes)
        self.expand_norm = RMSNorm(size, eps)
        self.expand = nn.Linear(size, config.num_draft_steps * size)
        self.layers = nn.ModuleList(SlotLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.add_head()
        self.blank = nn.Parameter(torch.zeros(size)) if config.ctc else None
        theta = {"rope_theta": config.rope_theta, "rope_type": "default"}
        self.rotary = rotary_of({"rope_parameters": theta}, config.sizes)
        self.post_init()

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> SpecFormerOutput:
        """Drafts after many positions of packed texts at once.

        Args:
            taps: `[T, taps * D]`, the target's hidden states h_i at the tapped layers, side by side.
            embeds: `[T, D]`, embeddings of the accepted next tokens x_{i+1}.
            position_ids: `[T]`, int64, position i of each pair; those of a document follow one another.
            starts: `[S]`, int64, the pairs at which a chain starts; `None` for the last one only.
            document_ids: `[T]`, int64; pairs of other documents are not seen. `None` if all belong together.
            num_rolled: chains of which all slots are computed, the first ones of `starts`; `None` for all. Of the
                others only the first slot is.
            labels: for training, what `loss_function(drafter, hidden_states, labels)` compares with. Computed in here,
                so that wrappers of the forward (data parallel, sharded, mixed precision) see all that is trained.
        """
        window, part = self.config.sliding_window, self.context_attn
        texts = PackedTexts(DraftContext(), position_ids, document_ids, starts, window, 1)
        x, places = self.fuse_inputs(taps, embeds), texts.starts
        normed, rope = self.context_norm(x), self.rotary(position_ids, x.dtype)
        keys, values = part.keys(normed, rope).transpose(0, 1), part.values(normed).transpose(0, 1)
        queries = part.queries(normed[places], (rope[0][places], rope[1][places]))
        mixed = texts.reading()(0, queries, keys, values, places)
        states = x[places] + part.o_proj(mixed)
        rolled = len(states) if num_rolled is None else num_rolled
        first, *further = self.slots(states[:rolled], self.config.num_draft_steps).unbind(dim=1)
        if rolled < len(states):
            first = torch.cat([first, self.slots(states[rolled:], 1)[:, 0]])
        drafts = (first, *further)
        loss = None if labels is None else self.loss_function(self, drafts, labels)
        return SpecFormerOutput(loss=loss, hidden_states=drafts)

    def slots(self, states: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the first slots `[B, count, D]` of states `[B, D]` that have attended to the text."""
        size = self.config.hidden_size * count
        x, expand = self.expand_norm(states), self.expand
        if type(expand) is nn.Linear and is_unhooked(expand):  # an adapter or an offloaded layer has to be called
            x = F.linear(x, expand.weight[:size], expand.bias[:size])
        else:
            x = expand(x)[..., :size]
        x = x.unflatten(-1, (count, -1))
        rope = self.rotary(torch.arange(count, device=x.device), x.dtype)
        for layer in cast(Sequence[SlotLayer], self.layers):
            x = layer(x, rope)
        return x

    def frames(self, slots: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Returns log-probabilities `[..., V' + 1]`, float32, of slots `[..., D]` as frames; the blank is last."""
        assert self.blank is not None, "only with ctc"
        blank = self.norm(slots) @ self.blank.to(slots.dtype)
        logits = torch.cat([self.logits(slots, weights), blank[..., None]], dim=-1)
        return logits.log_softmax(dim=-1, dtype=torch.float32)
