"""Registers the format of a language model with a steering beside it."""

from ...drafters.base.formats import Format, register_format
from ...drafters.language_model.lm_files import describe, why_no_causal_lm, why_not_by_config
from .steered_lm import SteeredLMDrafter, has_steering

register_format(
    Format(
        name="steered language model",
        rank=999,  # before plain language models, which nothing marks
        matches=lambda checkpoint: not why_no_causal_lm(checkpoint) and has_steering(checkpoint),
        load=SteeredLMDrafter.of_checkpoint,
        describe=lambda checkpoint: {**describe(checkpoint), "reads": "the text, and the target's hidden states"},
        drafter=SteeredLMDrafter,
        possible=lambda config: not why_not_by_config(config),
    )
)
