"""The public SpecFormer drafter: loading, saving and use in `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from ...drafters.base.draft_options import DraftOptions, default_options
from ...drafters.base.protocol import Call, Drafter, Read, check_sizes, weights_of
from ...drafters.base.refiners import REFINER_OPTIONS, check_refiners
from ...drafters.base.registry import register_drafter
from ...hub.pretrained_drafter import PretrainedDrafter
from .configuration_specformer import SpecFormerConfig
from .specformer_network import SpecFormerNetwork
from .specformer_session import SpecFormerSession


class SpecFormerDrafter(SpecFormerNetwork, PretrainedDrafter, Drafter):
    """A drafter that computes all slots at once, after attention over the accepted positions ("SpecFormer").

    A draft takes one forward of two attentions and a feed-forward block, whatever its depth and the batch size. The
    drafter holds weights, configuration and, in `generation_config`, the drafting options, but no state of a call,
    so one drafter may serve several threads.
    """

    takes_tree_builders = True
    own_options = REFINER_OPTIONS
    why_not_exported = "its slots are made of one position by one product, and no format of another project does so"

    def __init__(self, config: SpecFormerConfig) -> None:
        super().__init__(config)
        self.generation_config = self.default_generation_config()

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return tuple(self.config.target_tap_layers)

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return self.config.num_draft_steps

    @property
    def why_not_refined(self) -> str:
        return "its slots are frames, and the children of a node are not those of one slot" if self.config.ctc else ""

    def default_generation_config(self) -> GenerationConfig:
        config = self.config
        return default_options(config.num_draft_steps, config.tree_size, config.beam_width, self.own_options)

    def check_together(self, options: DraftOptions) -> None:
        check_refiners(self, options)

    def check(self, target: Any) -> None:
        check_sizes(self.config, target)

    def session(self, call: Call) -> SpecFormerSession:
        weights = self.borrow(call.target.get_input_embeddings(), call.target.get_output_embeddings())
        return SpecFormerSession(self, weights, call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        config, head = self.config, self.config.draft_vocab_size * self.config.hidden_size
        depth = config.num_draft_steps if config.ctc else depth  # all frames count
        return (
            Read("fusion", weights_of(self.fuse), 1, 1),
            Read("attention to the text", weights_of(self.context_attn), 1, 1),
            Read("slots", weights_of(self.expand) * depth // config.num_draft_steps, 1, 1),
            Read("slot layers", weights_of(self.layers), 1, depth),
            Read("head", head, 1, depth, borrowed=self.lm_head is None),
        )


__all__ = ["SpecFormerDrafter"]


register_drafter(SpecFormerConfig.model_type, SpecFormerConfig, SpecFormerDrafter)
