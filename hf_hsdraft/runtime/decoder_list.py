"""Finds the list of decoder layers in a model, whatever its attribute names."""

from __future__ import annotations

from typing import Any

from torch import nn

from .target_limits import decoder_layers, text_config


def decoder_list(model: Any) -> tuple[str, nn.ModuleList]:
    """Returns the name and the list of a model's decoder layers; raises a ValueError unless exactly one list fits.

    The list has as many entries as the text configuration has layers. Among several, such as lists of experts or of an
    image encoder, it is the one in the decoder whose layers have a `layer_idx`.
    """
    count = decoder_layers(text_config(model))
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    found = [(name, each) for name, each in lists if len(each) == count]
    start = _name_of_decoder(model)
    found = [pair for pair in found if not start or pair[0].startswith(f"{start}.")] or found
    if len(found) > 1:
        found = [(name, each) for name, each in found if any(hasattr(part, "layer_idx") for part in each.modules())]
        found = [pair for pair in found if not any(pair[0].startswith(f"{other}.") for other, _ in found)]
    if len(found) != 1:
        raise ValueError(
            f"the layers of {type(model).__name__} cannot be found: expected one list of {count} layers, as its "
            f"configuration has, found {len(found)}"
        )
    return found[0]


def _name_of_decoder(model: Any) -> str:
    """The name of the module that decodes text; empty if that is the model itself, or unknown."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return next((name for name, module in model.named_modules() if module is decoder), "")
