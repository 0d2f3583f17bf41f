"""Finds the list of decoder layers in a model, whatever its names."""

from __future__ import annotations

from typing import Any

from torch import nn

from .text_configs import decoder_layers, text_config


def decoder_list(model: Any) -> tuple[str, nn.ModuleList]:
    """Returns the list of a model's decoder layers, and its name.

    It is as long as the configuration of the text says. Where several lists are, such as those of experts or of an
    encoder for pictures, it is the one within the decoder whose layers count the slots of a cache.

    Args:
        model: a model of transformers that generates text.

    Raises:
        ValueError: there is no such list, or it cannot be told from others.
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
    """Returns the name of the module that decodes text; an empty string if it is the model itself, or not told."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return next((name for name, module in model.named_modules() if module is decoder), "")
