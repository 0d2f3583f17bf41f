"""Checks that a target has the sizes that a drafter was made for."""

from __future__ import annotations

from typing import Any

from ...core.refusals import DraftingRefused
from ...runtime.target_limits import decoder_layers, text_config


def check_sizes(wanted: Any, target: Any) -> None:
    """Raises DraftingRefused if the target's sizes differ from those in the drafter's configuration `wanted`."""
    config = text_config(target)
    made_for = f"this drafter was trained for {wanted.target_name or 'another target'}"
    for name, found, expected in (
        ("vocab_size", config.vocab_size, wanted.vocab_size),
        ("hidden_size", config.hidden_size, wanted.target_hidden_size),
        ("num_hidden_layers", decoder_layers(config), wanted.target_num_hidden_layers),
    ):
        if found != expected:
            raise DraftingRefused(
                f"the target has {name}={found}, the drafter expects {expected}: {made_for}. Use a drafter of this "
                "target, or train one with `hsdraft train`."
            )
