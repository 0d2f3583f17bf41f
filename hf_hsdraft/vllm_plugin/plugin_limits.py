"""Which hidden-state drafters the plugin supports, and the size of their state between steps. Does not import vLLM."""

from __future__ import annotations

from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig

CPU_MEMORY = 0.5  # share that vLLM takes on a CPU; its default of 92% fails where that is not free


def state_width(config: HSDraftConfig) -> int:
    """Returns how many values pass between draft steps: drafted hidden state, injector's state, number of the step."""
    injector = 2 * config.injector_hidden_size if config.injector == "path" else config.injector_rank
    return config.hidden_size + injector + 1


def check(config: HSDraftConfig) -> None:
    """Raises a ValueError for a drafter that the plugin does not support."""
    told = {
        "a selector as injector": config.injector == "selector",
        "trained output rows": config.head != "target",
        "several sets of parameters for its steps": config.num_step_modules > 1,
        "roll-out steps through a part of its layers": config.num_roll_layers < config.num_hidden_layers,
        "an output of the target's last layer": config.target_tap_layers[-1] >= config.target_num_hidden_layers,
    }
    if found := [name for name, is_so in told.items() if is_so]:
        raise ValueError(
            f"this drafter has {' and '.join(found)}, with which the plugin for vLLM does not draft: use it in "
            "generate(), or train one with the defaults of `hsdraft train`"
        )
