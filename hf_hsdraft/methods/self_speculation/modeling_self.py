"""The self-speculative drafter: its imitation network, loading, saving and use in `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...core.options import Option
from ...core.refusals import DraftingRefused
from ...core.tensors import RMSNorm
from ...drafters.base.decoder_layer import FeedForward
from ...drafters.base.draft_options import default_options
from ...drafters.base.protocol import Call, Drafter, Read, check_sizes, weights_of
from ...drafters.base.registry import register_drafter
from ...drafters.base.target_weights import DrafterOutput, StateNetwork
from ...hub.pretrained_drafter import PretrainedDrafter
from .configuration_self import SelfDraftConfig
from .layer_split import why_not_split
from .self_session import SelfSession

LAYER_REUSE = Option(
    "layer_reuse",
    True,
    lambda value: isinstance(value, bool),
    "True or False",
    "Whether verification continues from what the first layers have read of a draft, or reads it again.",
)


class ImitationBlock(FeedForward):
    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(self.norm(x))


class SelfDrafter(StateNetwork, PretrainedDrafter, Drafter):
    """Drafting by the target's first layers, an imitation network and the target's head (FastVLM; LayerSkip).

    The layers read each drafted token in the target's cache, so everything in the prompt, images included, is known.
    Verification computes only the other layers. The drafter holds the imitation network, its configuration and, in
    `generation_config`, the drafting options, but no state of a call, so one drafter may serve several threads.

    Let h_i be the target's hidden state after its first n layers at position i. The network imitates the last hidden
    state from it, position by position: a linear map with a residual, and gated blocks. A norm and the target's output
    rows then predict x_{i+1}. The first layers attend to the whole text, so the network has no attention.

    Letters in the shapes: T positions, S chains, D hidden size.
    """

    config_class = SelfDraftConfig
    config: SelfDraftConfig
    main_input_name = "taps"
    loss_function: Any = None
    _no_split_modules = ["ImitationBlock"]  # noqa: RUF012
    takes_tree_builders = True
    own_options = (LAYER_REUSE,)
    why_not_exported = "most of it are layers of the target, and no format of another project does so"

    def __init__(self, config: SelfDraftConfig) -> None:
        config.check()  # fields may have been set since it was built
        super().__init__(config)
        self.tap_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.turn = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(ImitationBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_head()
        self.post_init()
        self.generation_config = self.default_generation_config()

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
        """Predicts along many chains of packed texts, each token after the text's own; see `HSDrafter.forward`.

        A draft begins with the token after position i, which the first layers read. So its first prediction comes
        from the state at position i + 1 of `taps` `[T, D]`, and that of depth d from the state at i + 1 + d. Only the
        first `num_rolled` of `starts` get predictions beyond the first depth. `embeds` and ids are unused.
        """
        last = len(taps) - 1
        starts = torch.tensor([last - 1], device=taps.device) if starts is None else starts
        rolled = len(starts) if num_rolled is None else num_rolled
        places = [starts + 1, *(starts[:rolled] + 1 + depth for depth in range(1, self.config.num_draft_steps))]
        drafts = self.imitated(taps[torch.cat(places).clamp(max=last)]).split([len(each) for each in places])
        loss = None if labels is None else self.loss_function(self, drafts, labels)
        return DrafterOutput(loss=loss, hidden_states=drafts)

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return self.config.num_draft_steps

    def default_generation_config(self) -> GenerationConfig:
        config = self.config
        return default_options(config.num_draft_steps, config.tree_size, config.beam_width, self.own_options)

    def check(self, target: Any) -> None:
        check_sizes(self.config, target)
        reason = why_not_split(target)
        if reason:
            raise DraftingRefused(
                f"its first layers cannot draft: {reason}. To decode it plainly, leave assistant_model out."
            )

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        """Raises a DraftingRefused where all processes have to run the same forwards."""
        if all_processes:
            raise DraftingRefused.of_sharded("the first layers")

    def session(self, call: Call) -> SelfSession:
        weights = self.borrow(call.target.get_input_embeddings(), call.target.get_output_embeddings())
        return SelfSession(self, weights, call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        config = self.config
        head = config.draft_vocab_size * config.hidden_size
        layers = config.draft_layers * config.target_layer_weights
        return (
            Read(f"first {config.draft_layers} layers of the target", layers, depth, width, borrowed=True),
            Read("imitation network", weights_of(self.tap_norm, self.turn, self.layers), depth, width),
            Read("head", head, depth, width, borrowed=self.lm_head is None),
        )


__all__ = ["SelfDrafter"]


register_drafter(SelfDraftConfig.model_type, SelfDraftConfig, SelfDrafter)
