"""Small language models with the target's tokenizer as drafters, steered ones, and parts of the target itself."""

from ...methods.layer_skip.layer_skip import LayerSkipConfig, LayerSkipDrafter
from ...methods.steering.steered_lm import SteeredLMDrafter, has_steering
from ..base.formats import Format, register_format
from ..base.registry import register_drafter
from .lm_drafter import CausalLMDrafter
from .lm_files import DRAFTING_OPTIONS, describe, why_no_causal_lm, why_not_by_config

register_format(
    Format(
        name="steered language model",
        rank=999,
        matches=lambda checkpoint: not why_no_causal_lm(checkpoint) and has_steering(checkpoint),
        load=SteeredLMDrafter.of_checkpoint,
        describe=lambda checkpoint: {**describe(checkpoint), "reads": "the text, and the target's hidden states"},
        drafter=SteeredLMDrafter,
        possible=lambda config: not why_not_by_config(config),
    )
)
# Asked last: it has no mark of its own, only that of no other format.
register_format(
    Format(
        name="causal language model",
        rank=1000,
        matches=lambda checkpoint: not why_no_causal_lm(checkpoint),
        load=CausalLMDrafter.of_checkpoint,
        describe=describe,
        drafter=CausalLMDrafter,
        possible=lambda config: not why_not_by_config(config),
        listed=lambda checkpoint: (checkpoint.folder / DRAFTING_OPTIONS).is_file(),  # most models are no drafters
    )
)
register_drafter(LayerSkipConfig.model_type, LayerSkipConfig, LayerSkipDrafter)
