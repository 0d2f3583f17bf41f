"""The public self-speculative drafter: loading, saving and use in `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from ...core.options import Option
from ...core.refusals import DraftingRefused
from ...drafters.base.draft_options import default_options
from ...drafters.base.protocol import Call, Drafter, Read, check_sizes, weights_of
from ...drafters.base.registry import register_drafter
from ...hub.pretrained_drafter import PretrainedDrafter
from .configuration_self import SelfDraftConfig
from .imitation_network import ImitationNetwork
from .layer_split import why_not_split
from .self_session import SelfSession

LAYER_REUSE = Option(
    "layer_reuse",
    True,
    lambda value: isinstance(value, bool),
    "True or False",
    "Whether verification continues from what the first layers have read of a draft, or reads it again.",
)


class SelfDrafter(ImitationNetwork, PretrainedDrafter, Drafter):
    """Drafting by the target's first layers, an imitation network and the target's head (FastVLM; LayerSkip).

    The layers read each drafted token in the target's cache, so everything in the prompt, images included, is known.
    Verification computes only the other layers. The drafter holds the imitation network, its configuration and, in
    `generation_config`, the drafting options, but no state of a call, so one drafter may serve several threads.
    """

    takes_tree_builders = True
    own_options = (LAYER_REUSE,)
    why_not_exported = "most of it are layers of the target, and no format of another project does so"

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(config)
        self.generation_config = self.default_generation_config()

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
