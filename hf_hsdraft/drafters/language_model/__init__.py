"""Small language models with the target's tokenizer as drafters."""

from ..base.formats import Format, register_format
from .lm_drafter import CausalLMDrafter
from .lm_files import DRAFTING_OPTIONS, describe, fit, why_no_causal_lm, why_not_by_config

# Matched last: it is recognised only by not being another format.
register_format(
    Format(
        name="causal language model",
        rank=1000,
        matches=lambda checkpoint: not why_no_causal_lm(checkpoint),
        load=CausalLMDrafter.of_checkpoint,
        describe=describe,
        drafter=CausalLMDrafter,
        possible=lambda config: not why_not_by_config(config),
        listed=lambda checkpoint: (checkpoint.folder / DRAFTING_OPTIONS).is_file(),  # most models are not drafters
        fit=fit,
    )
)
