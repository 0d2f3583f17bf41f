"""The imitation network: predicts the target's last hidden states from early ones (FastVLM).

Letters in the shapes: T positions, S chains, K depths, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.tensors import RMSNorm
from ...drafters.base.decoder_layer import FeedForward
from ...drafters.base.target_weights import DrafterOutput, StateNetwork
from .configuration_self import SelfDraftConfig


class ImitationBlock(FeedForward):
    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(self.norm(x))


class ImitationNetwork(StateNetwork):
    """The network of a self-speculative drafter: its parameters, and the forward that trains it.

    Let h_i be the target's hidden state after its first n layers at position i. The network imitates the last hidden
    state from it, position by position: a linear map with a residual, and gated blocks. A norm and the target's output
    rows then predict x_{i+1}. The first layers attend to the whole text, so the network has no attention.
    """

    config_class = SelfDraftConfig
    config: SelfDraftConfig
    main_input_name = "taps"
    loss_function: Any = None
    _no_split_modules = ["ImitationBlock"]  # noqa: RUF012

    def __init__(self, config: SelfDraftConfig) -> None:
        config.check()  # fields may have been set since it was built
        super().__init__(config)
        self.tap_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.turn = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(ImitationBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_head()
        self.post_init()

    def imitated(self, states: torch.Tensor) -> torch.Tensor:
        """Returns imitations `[..., D]` of the last hidden states, before the norm, from early ones `[..., D]`."""
        normed = self.tap_norm(states)
        x = normed + self.turn(normed)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> DrafterOutput:
        """Predicts along many chains of packed texts, each token after the text's own.

        A draft begins with the token after position i, which the first layers read. So its first prediction comes
        from the state at position i + 1, and that of depth d from the state at i + 1 + d.

        Args:
            taps: `[T, D]`, the target's hidden states after its first n layers.
            embeds, position_ids, document_ids: accepted for the pipeline; unused.
            starts: `[S]`, int64, the positions i at which a chain starts; `None` for the last but one.
            num_rolled: number of chains, the first of `starts`, with predictions beyond the first depth; `None` for
                all.
            labels: for training, passed to `loss_function(drafter, hidden_states, labels)`. Computed here so that
                wrappers of the forward (data parallel, sharded, mixed precision) see all that is trained.
        """
        last = len(taps) - 1
        starts = torch.tensor([last - 1], device=taps.device) if starts is None else starts
        rolled = len(starts) if num_rolled is None else num_rolled
        places = [starts + 1, *(starts[:rolled] + 1 + depth for depth in range(1, self.config.num_draft_steps))]
        drafts = self.imitated(taps[torch.cat(places).clamp(max=last)]).split([len(each) for each in places])
        loss = None if labels is None else self.loss_function(self, drafts, labels)
        return DrafterOutput(loss=loss, hidden_states=drafts)
