"""What networks share that read hidden states of a target: how these are joined, and the head that predicts tokens.

Letters in the shapes: T positions, D hidden size, V' draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import RMSNorm
from ...hub.pretrained_drafter import PretrainedDrafter
from .target_weights import TargetWeights, borrow


class StateNetwork(PretrainedDrafter):
    """Joins hidden states of a target, and predicts tokens by the target's output rows or by rows of its own.

    A network that is derived from it adds its parts in the order of their computation, and calls `post_init` last.

    Attributes:
        norm: the norm before the head, which the derived network adds.
    """

    norm: RMSNorm

    def add_fusion(self, reads_tokens: bool) -> None:
        """Adds the parts that join the hidden states of a position.

        Args:
            reads_tokens: whether the embedding of the token after the position is joined too.
        """
        config = self.config
        size, taps = config.target_hidden_size, len(config.target_tap_layers)
        self.tap_norms = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for _ in range(taps))
        self.token_norm = RMSNorm(size, config.rms_norm_eps) if reads_tokens else None
        self.fuse = nn.Linear((taps + int(reads_tokens)) * size, config.hidden_size, bias=False)

    def add_head(self) -> None:
        """Adds output rows, unless those of the target are used."""
        config = self.config
        trained = config.head == "trained"
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if trained else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def fuse_inputs(self, taps: torch.Tensor, embeds: torch.Tensor | None) -> torch.Tensor:
        """Returns what is made of positions i, `[T, D]`.

        Args:
            taps: `[T, taps * D]`, the target's hidden states h_i, side by side.
            embeds: `[T, D]`, embeddings of the tokens x_{i+1}; not looked at where these are not read.
        """
        parts = [norm(tap) for norm, tap in zip(self.tap_norms, taps.chunk(len(self.tap_norms), dim=-1), strict=True)]
        if self.token_norm is not None:
            parts.append(self.token_norm(embeds))
        return self.fuse(torch.cat(parts, dim=-1))

    def logits(self, hidden: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Draft logits `[..., V']` of drafted hidden states `[..., D]`, before any token information."""
        if self.lm_head is not None:
            return self.lm_head(self.norm(hidden))
        assert weights.head is not None
        return F.linear(self.norm(hidden), weights.head)

    def draft_vocab_ids(self) -> torch.Tensor:
        """`[V']`, int64: the token id behind each row of the head."""
        ids = self.config.draft_vocab_ids
        return torch.arange(self.config.draft_vocab_size) if ids is None else torch.tensor(ids)

    def borrow(self, embedding: Any, output_head: Any, with_head: bool = True) -> TargetWeights:
        """Collects what this drafter uses of a target: its embedding and the output rows of the draft vocabulary.

        Args:
            embedding: the target's input embedding.
            output_head: the target's output layer.
            with_head: `False` leaves the rows out, which are copied.
        """
        head = output_head if self.lm_head is None and with_head else None
        return borrow(embedding, head, self.draft_vocab_ids(), self.device, self.dtype)
