"""What the configuration of a target says of the part that decodes text. Nothing here needs a new transformers."""

from __future__ import annotations

from typing import Any


def text_config(target: Any) -> Any:
    """The configuration of the part of a target that decodes text."""
    return target.config.get_text_config(decoder=True)


def decoder_layers(config: Any) -> int:
    """Number of layers of a target's decoder, by the configuration of its text; T5 counts the encoder's apart."""
    layers = getattr(config, "num_decoder_layers", None)
    return layers if isinstance(layers, int) and layers else config.num_hidden_layers
