"""What a drafter sees of a remote target: its configuration, and the embedding rows that drafters borrow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from .messages import INPUT, OUTPUT, Hello


class TargetShell:
    """A target without layers; `tables` are `None` for drafters that borrow no rows."""

    training = False
    generation_config = None

    def __init__(
        self,
        hello: Hello,
        tables: Mapping[int, torch.Tensor] | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.config = _config_of(hello)
        self.name_or_path = hello.target
        self.dtype = getattr(torch, hello.dtype, torch.float32)
        self.device = device
        with torch.device("meta"):  # drafters that read no hidden states ask for sizes only
            self._input = nn.Embedding(hello.rows, hello.width)
            self._output = nn.Linear(hello.width, hello.rows, bias=False)
        if tables is not None:
            rows = tables[INPUT].to(device, self.dtype)
            self._input.weight = nn.Parameter(rows, requires_grad=False)
            output = rows if hello.tied else tables[OUTPUT].to(device, self.dtype)
            self._output.weight = nn.Parameter(output, requires_grad=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self._input

    def get_output_embeddings(self) -> nn.Linear:
        return self._output


def _config_of(hello: Hello) -> Any:
    """Parses the server's configuration; raises a ValueError if it cannot."""
    try:
        fields = json.loads(hello.config)
        kind = fields.pop("model_type", "")
        return AutoConfig.for_model(kind, **fields) if isinstance(kind, str) else PreTrainedConfig(**fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the server's target has a configuration that is not known here: {error}") from None
