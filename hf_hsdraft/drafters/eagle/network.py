"""The network of an EAGLE-3 drafter, with the parameter names of published files.

At position i, with embedding e and the target's hidden state h_i: the row of an accepted position reads e(x_{i+1}) and
the fused h_i, and gives y_i, which predicts x_{i+2}. The row of a drafted token reads its embedding and the y of the
row that drafted it, one position later ("EAGLE-3", section 3.1).

Letters in the shapes: T accepted pairs, S chains, K draft steps, D hidden size, V' draft vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...core.tensors import Attend as PackedAttend
from ...core.tensors import RMSNorm
from ..base.decoder_layer import Attend, DecoderLayer, Rope, rotary_of
from ..base.packed_texts import DraftContext, PackedTexts
from ..base.published import AttendByLayer, PublishedNetwork
from ..base.target_weights import DrafterOutput, TargetWeights
from .configuration import EagleConfig


class EagleLayer(DecoderLayer):
    """A decoder layer. The first one also reads an embedding, which `input_layernorm` norms."""

    def __init__(self, config: EagleConfig, first: bool) -> None:
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        super().__init__(config.layer, 2 * size if first else size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(size, eps) if first else None

    def forward(
        self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None, embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As in `DecoderLayer`, with embeddings `[..., n, D]` of the tokens."""
        if self.hidden_norm is None:
            return super().forward(x, rope, attend, rows)
        normed = self.hidden_norm(x)
        inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return self.joined(normed if self.norm_before_residual else x, inputs, rope, attend, rows)


class EagleNetwork(PublishedNetwork):
    """Network of an EAGLE-3 drafter, or of a parallel one (P-EAGLE); raises a ValueError for an unknown rope type."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        inputs = config.num_taps * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        self.input_norm = RMSNorm(inputs, eps) if config.norm_before_fc else None
        tap_norms = (RMSNorm(config.target_hidden_size, eps) for _ in range(config.num_taps))
        self.fc_norm = nn.ModuleList(tap_norms) if config.fc_norm else None
        self.fc = nn.Linear(inputs, size, bias=False)
        self.layers = nn.ModuleList(EagleLayer(config, index == 0) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, inputs)) if config.mask_token_id is not None else None
        self.rotary = rotary_of(dict(config.rope), config.layer)
        # `FeedbackTrial`'s counts: right tokens by each reading of `norm_output`, and number of pairs.
        self.feedback_counts: dict[bool, int] = {}
        self.feedback_tried = 0

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        super().reset_parameters(std)
        if self.mask_hidden is not None:
            nn.init.normal_(self.mask_hidden)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Maps taps `[..., taps * target's D]` to input states `[..., D]` of the first layer."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def through(
        self,
        states: torch.Tensor,  # `[..., n, D]`, fused hidden states of the target, or from `fed_back`
        embeds: torch.Tensor,  # `[..., n, D]`, embeddings of the tokens
        positions: torch.Tensor,  # `[..., n]`, int64
        attend: AttendByLayer,  # stores keys and values, and computes attention
        rows: Any = None,  # rows to return; None for all
    ) -> torch.Tensor:
        """Returns y of rows `[..., n, D]`."""
        rope = self.rotary(positions, states.dtype)
        last, x = len(self.layers) - 1, states
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, partial(attend, index), rows if index == last else None, embeds)
        return x

    def fed_back(self, y: torch.Tensor) -> torch.Tensor:
        """Maps y `[..., D]` to the input state of the token that it drafted."""
        return self.norm(y) if self.config.norm_output else y

    def logits(self, hidden: torch.Tensor, weights: TargetWeights | None = None) -> torch.Tensor:
        """Returns draft logits `[..., V']` of states y `[..., D]`; `weights` is not used."""
        return self.lm_head(self.norm(hidden))

    def draft_vocab_ids(self) -> torch.Tensor:
        """Returns `[V']`, int64, the token id of each row of the head. Cached; do not modify."""
        ids = self.config.draft_vocab_ids
        if ids is None:
            return torch.arange(self.config.draft_vocab_size, device=self.device)
        known = _vocabularies.get(self)
        if known is None or known[0] is not ids or known[1].device != self.device:
            known = _vocabularies[self] = ids, torch.tensor(ids, device=self.device)
        return known[1]

    def mask_states(self) -> torch.Tensor:
        """Returns the input state `[D]` of the deeper rows of a parallel drafter."""
        return self.fuse(cast(torch.Tensor, self.mask_hidden)).flatten()

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_draft_steps: int | None = None,
        num_rolled: int | None = None,
        path_embeds: torch.Tensor | None = None,
        labels: Any = None,
    ) -> DrafterOutput:
        """Reads sequences, then unrolls drafts from some positions (EAGLE-3's training-time test).

        The row of step s at start i sees the target's states up to i, and the s steps of its chain as drafted states.

        Args:
            num_draft_steps: K, the configuration's by default.
            path_embeds: `[S, K, D]`, embeddings of the parents x_{i+1}, x_{i+2}, ... of each depth, or of the mask
                token for a parallel drafter. The first depth is not read here but from `embeds`. The other arguments
                are those of `PublishedNetwork`.

        Raises:
            ValueError: `path_embeds` is missing, or the layers have different windows.
        """
        steps = self.config.num_draft_steps if num_draft_steps is None else num_draft_steps
        if steps > 1 and path_embeds is None:
            raise ValueError(f"path_embeds=None is invalid with {steps} draft steps: expected the chains' embeddings")
        texts = PackedTexts(DraftContext(), position_ids, document_ids, starts, self.config.window, steps)
        y = self.through(self.fuse(taps), embeds, position_ids, _of_packed(texts.reading()), texts.starts)
        states, at = [y], position_ids[texts.starts][:num_rolled]
        y = y[:num_rolled]
        mask = None if self.mask_hidden is None else self.mask_states().expand_as(y)
        for step in range(1, steps):
            inputs = self.fed_back(y) if mask is None else mask
            path = cast(torch.Tensor, path_embeds)[: len(y), step]
            y = self.through(inputs, path, at + step, _of_packed(texts.rolling(step, len(y))))
            states.append(y)
        loss = None if labels is None else self.loss_function(self, states, labels)
        return DrafterOutput(loss=loss, hidden_states=tuple(states))


def _of_packed(attend: PackedAttend) -> AttendByLayer:
    """Packed attention, with keys and values row by row."""

    def attend_rows(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        return attend(layer, queries, keys.transpose(0, 1), values.transpose(0, 1), rows)

    return attend_rows


# Cached by drafter, with the configured ids: slow to build for every call.
_vocabularies: weakref.WeakKeyDictionary[EagleNetwork, tuple[Sequence[int], torch.Tensor]] = weakref.WeakKeyDictionary()
