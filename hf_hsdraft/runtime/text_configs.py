"""Text configurations of targets. Works with older versions of transformers."""

from __future__ import annotations

from typing import Any


def text_config(target: Any) -> Any:
    """The configuration of the part of a target that decodes text."""
    return target.config.get_text_config(decoder=True)


def decoder_layers(config: Any) -> int:
    """Number of decoder layers in a text configuration; T5 has a separate field for the encoder's."""
    layers = getattr(config, "num_decoder_layers", None)
    return layers if isinstance(layers, int) and layers else config.num_hidden_layers
