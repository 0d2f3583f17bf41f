"""The network of a block drafter: a trunk that computes all slots of a block in one forward, and its heads.

Parameters have the names of the speculators package. Letters in the shapes: B rows or blocks, T context positions, D
hidden size, K drafts of a block, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import RMSNorm
from ..base.decoder_layer import Attend, DecoderLayer, Rope, rotary_of
from ..base.published import AttendByLayer, PublishedNetwork
from ..base.target_weights import DrafterOutput, TargetWeights, borrow
from .configuration import BlockConfig
from .context import training_attention
from .heads import MARKOV_HEADS, CandidateSelector, ConfidenceHead, DominoHead, TokenHead


class BlockConvolution(nn.Module):
    """Two convolutions over a block's slots, before and after a part of a layer.

    Slot i becomes the sum over tau of (base[tau] + delta[i, tau]) * x[i - tau], with zeros before the block. Channels
    of a group share one delta. Both deltas are computed from the input of the first convolution. Kernels span
    `kernel_size` slots, groups `group_size` channels.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * (hidden_size // group_size), bias=False)
        self.group_size = group_size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes both convolutions the identity."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the convolved input `[..., slots, D]` of the part, and the kernels for `after`."""
        size = self.base_kernel.shape[1]
        deltas = self.kernel_projection(x).unflatten(-1, (2, size, -1)).repeat_interleave(self.group_size, dim=-1)
        kernels = self.base_kernel + deltas
        return _convolved(x, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def after(self, x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Returns the convolved output `[..., slots, D]` of the part."""
        return _convolved(x, kernels)


def _convolved(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Convolves blocks `[..., slots, D]` by kernels `[..., slots, K, D]`."""
    slots = x.shape[-2]
    parts = (F.pad(x, (0, 0, back, 0))[..., :slots, :] * kernels[..., back, :] for back in range(kernels.shape[-2]))
    return torch.stack(list(parts)).sum(dim=0)


class BlockLayer(DecoderLayer):
    """A decoder layer whose slots also see the context; optionally with convolutions (DFlash2) or Gemma 4's norms."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.sizes)
        sizes = config.sizes
        self.pre_feedforward_layernorm = self.post_feedforward_layernorm = None
        if sizes.gemma:
            self.pre_feedforward_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
            self.post_feedforward_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
            self.register_buffer("layer_scalar", torch.ones(1))
        self.attention_conv, self.mlp_conv = (
            BlockConvolution(sizes.hidden_size, config.conv_kernel_size, config.conv_group_size)
            if config.conv_kernel_size
            else None
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None) -> torch.Tensor:
        """Returns the slots `[B, slots, D]` after this layer."""

        def attention(x: torch.Tensor) -> torch.Tensor:
            return self.self_attn(x, rope, attend)

        if self.pre_feedforward_layernorm is not None:
            x = x + self.post_attention_layernorm(attention(self.input_layernorm(x)))
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))  # type: ignore[misc]
            return x * cast(torch.Tensor, self.layer_scalar)
        x = x + _between(self.attention_conv, self.input_layernorm(x), attention)
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _between(convolution: nn.Module | None, x: torch.Tensor, part: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Applies a part of a layer, between its convolutions if there are any."""
    if convolution is None:
        return part(x)
    convolution = cast(BlockConvolution, convolution)
    x, kernels = convolution.before(x)
    return convolution.after(part(x), kernels)


class BlockNetwork(PublishedNetwork):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config, sizes = config, config.sizes
        inputs = len(config.target_tap_layers) * config.target_hidden_size
        self.fc = nn.Linear(inputs, sizes.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.rotary = rotary_of(dict(config.rope), sizes)
        vocab_size, draft_size, width = config.vocab_size or 0, config.draft_vocab_size or 0, sizes.hidden_size
        self.markov_head = self.candidate_selector = self.domino = self.confidence_head = self.lm_head = None
        if config.markov_rank:
            self.markov_head = MARKOV_HEADS[config.markov_head_type](vocab_size, draft_size, width, config.markov_rank)
        if config.selector_rank:
            selector = CandidateSelector(vocab_size, width, config.selector_rank, config.selector_top_k)
            self.candidate_selector = selector
        if config.domino_rank:
            ends = config.domino_rank, draft_size, config.free_depths
            self.domino = DominoHead(width, config.gru_size, *ends)
        if config.confidence_head != "none":
            extra = config.markov_rank if config.confidence_head == "markov" else 0
            self.confidence_head = ConfidenceHead(width + extra)
        if config.has_own_head:
            self.lm_head = nn.Linear(width, draft_size, bias=False)
            self.lm_head.weight.requires_grad = False  # the target's rows
            self.register_buffer("d2t", torch.zeros(draft_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))
        if config.learned_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(width))

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialises all weights; the target's rows are to be taken after that."""
        super().reset_parameters(std)
        for module in self.modules():
            if isinstance(module, CandidateSelector):
                nn.init.normal_(module.predecessor_codebook, std=std)
                nn.init.normal_(module.successor_codebook, std=std)
            elif isinstance(module, BlockConvolution):
                module.reset_parameters()

    @property
    def token_head(self) -> TokenHead | None:
        return cast("TokenHead | None", self.markov_head or self.candidate_selector or self.domino)

    def read(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns context states `[T, D]`, shared by all layers, from the target's hidden states `[T, taps * D]`."""
        return self.hidden_norm(self.fc(taps))

    def context_keys(self, index: int, states: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's keys and values `[T, kv_heads, head_dim]` of context states `[T, D]`."""
        attention = cast(BlockLayer, self.layers[index]).self_attn
        return attention.keys(states, rope), attention.values(states)

    def run(self, embeds: torch.Tensor, positions: torch.Tensor, attend: AttendByLayer) -> torch.Tensor:
        """Returns the slots `[B, slots, D]` after the final norm, from their embeddings and positions `[B, slots]`."""
        x, rope = embeds, self.rotary(positions, embeds.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, partial(attend, index))
        return self.norm(x)

    def block_embeds(self, anchors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns embeddings `[B, slots, D]` from those of anchors, `[B, D]`, and of masks, if none is learned."""
        mask = self.mask_embedding.to(anchors.dtype) if self.config.learned_mask else mask
        masks = mask.expand(len(anchors), self.config.block_size - 1, -1)
        return torch.cat([anchors[:, None], masks], dim=1)

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
        mask_embeds: torch.Tensor | None = None,
    ) -> DrafterOutput:
        """Drafts blocks after many positions of packed sequences at once (DFlash, training).

        The block that starts at pair i has its anchor x_{i+1} at position i + 1, and sees the context up to i. Blocks
        do not see each other. Each is computed whole, as its slots see each other; after the first `num_rolled` blocks,
        only the first draft of each is returned.

        Args:
            mask_embeds: `[D]`, `embed` of `mask_token_id`; unused with a learned mask embedding. The other arguments
                are those of `PublishedNetwork`.

        Raises:
            ValueError: `mask_embeds` is missing.
        """
        if mask_embeds is None and not self.config.learned_mask:
            raise ValueError(f"mask_embeds is missing: expected the embedding of token {self.config.mask_token_id}")
        if starts is None:
            starts = torch.tensor([len(taps) - 1], device=taps.device)
        states, rope = self.read(taps), self.rotary(position_ids, taps.dtype)
        context = [self.context_keys(index, states, rope) for index in range(len(self.layers))]
        anchors = embeds[starts]
        blocks = self.block_embeds(anchors, anchors[0] if mask_embeds is None else mask_embeds.to(anchors))
        slots = torch.arange(self.config.block_size, device=taps.device)
        positions = position_ids[starts, None] + 1 + slots
        attend = training_attention(context, self.config.sights, position_ids, document_ids, starts, positions)
        hidden = self.run(blocks, positions, attend)[:, self.config.first_slot :]
        rolled = len(starts) if num_rolled is None else num_rolled
        drafts = tuple(hidden[: len(starts) if depth == 0 else rolled, depth] for depth in range(hidden.shape[1]))
        loss = None if labels is None else self.loss_function(self, drafts, labels)
        return DrafterOutput(loss=loss, hidden_states=drafts)

    def logits(self, hidden: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Returns draft logits `[..., V']` of slots `[..., D]`, before any token information."""
        head = weights.head if self.lm_head is None else self.lm_head.weight
        assert head is not None
        logits, cap = F.linear(hidden, head), self.config.final_logit_softcapping
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        return logits if cap == 0 else torch.tanh(logits / cap) * cap

    def draft_vocab_ids(self, vocab_size: int | None = None) -> torch.Tensor:
        """Returns `[V']`, int64, the token id of each row of the head; drafters of any vocabulary need `vocab_size`."""
        ids = torch.arange(self.config.draft_vocab_size or vocab_size or 0, device=self.device)
        return ids + cast(torch.Tensor, self.d2t) if self.config.has_own_head else ids

    def borrow(self, embedding: nn.Module, output_head: nn.Module, with_head: bool = True) -> TargetWeights:
        """Collects the target's embedding, and its output rows if needed; copies only to another dtype or device."""
        scale = self.config.embedding_scale
        is_normed = isinstance(getattr(embedding, "embed_norm", None), nn.Module)
        as_made = scale is None and not is_normed
        if scale is None:  # except the norm
            scale = float(getattr(embedding, "embed_scale", 1.0)) if is_normed else 1.0
        head = output_head if self.lm_head is None and with_head else None
        ids = self.draft_vocab_ids(len(cast(torch.Tensor, embedding.weight)))
        weights = borrow(cast(nn.Embedding, embedding), head, ids, self.device, self.dtype, scaled=as_made)
        if scale == 1.0:
            return weights
        return replace(weights, embed=lambda tokens: weights.embed(tokens) * scale)
