"""The configuration of a hidden-state drafter as vLLM reads it."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig


class HSDraftVllmConfig(SpeculatorsConfig):
    """What vLLM asks the configuration of a draft model for.

    vLLM hands one vector a position from each forward of a draft model to the next, of width `hidden_size`. Here it
    holds more than the drafted hidden state, see `state_width`.

    Args:
        fields: what the drafter's config.json holds.

    Attributes:
        drafter: those fields, for `HSDraftConfig`.

    Raises:
        ValueError: the drafter is of a kind that the plugin does not draft with.
    """

    model_type = "hsdraft"

    def __init__(self, **fields: Any) -> None:
        if "target_tap_layers" not in fields:  # as transformers makes one to compare with
            super().__init__(**fields)
            return
        own = fields.get("drafter") or fields
        config = HSDraftConfig.from_dict(own)
        check(config)
        super().__init__(
            architectures=["HSDraftForVllm"],
            drafter=own,
            dtype=fields.get("dtype"),
            draft_vocab_size=config.draft_vocab_size,
            eagle_aux_hidden_state_layer_ids=list(config.target_tap_layers),
            head_dim=config.head_dim,
            hidden_size=state_width(config),
            max_position_embeddings=2**31 - 1,  # its positions are those of the target, whatever their number
            num_attention_heads=config.num_attention_heads,
            num_hidden_layers=config.num_hidden_layers,
            num_key_value_heads=config.num_key_value_heads,
            target_hidden_size=config.target_hidden_size,
            target_tap_layers=list(config.target_tap_layers),
            vocab_size=config.vocab_size,
        )


def injector_width(config: HSDraftConfig) -> int:
    """Returns the size of an injector's state."""
    return 2 * config.injector_hidden_size if config.injector == "path" else config.injector_rank


def state_width(config: HSDraftConfig) -> int:
    """Returns the number of values that go from one draft step to the next.

    These are the drafted hidden state, the injector's state, and the number of the step.
    """
    return config.hidden_size + injector_width(config) + 1


def check(config: HSDraftConfig) -> None:
    """Raises a ValueError for a drafter that the plugin does not draft with."""
    told = {
        "a selector as injector": config.injector == "selector",
        "output rows of its own": config.head != "target",
        "several sets of parameters for its steps": config.num_step_modules > 1,
        "roll-out steps through a part of its layers": config.num_roll_layers < config.num_hidden_layers,
        "an output of the target's last layer": config.target_tap_layers[-1] >= config.target_num_hidden_layers,
    }
    if found := [name for name, is_so in told.items() if is_so]:
        raise ValueError(
            f"this drafter has {' and '.join(found)}, with which the plugin for vLLM does not draft: use it in "
            "generate(), or train one with the defaults of `hsdraft train`"
        )
