"""Stands for a drafter without travelling code, where `hf_hsdraft` is not installed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .travelling_drafter import TravellingDrafter


class PlainDrafter(TravellingDrafter):
    """Decodes all calls plainly, and can be saved again."""

    has_network = False
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"."]  # the weights of the network
    _keys_to_ignore_on_load_missing: ClassVar[list[str]] = [r"."]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.place = torch.nn.Parameter(torch.zeros(()), requires_grad=False)  # a model has a device and a dtype
        self.post_init()
