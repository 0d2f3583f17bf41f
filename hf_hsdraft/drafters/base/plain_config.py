"""Configurations that are dataclasses, as transformers' callbacks describe a model by them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from .config_fields import settings


class PlainConfig:
    """What reports of training (TensorBoard, Weights & Biases) ask a configuration for. Its class is a dataclass."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name, those of nested dataclasses as dictionaries."""
        return asdict(self)  # type: ignore[call-overload]

    def to_json_string(self) -> str:
        """Returns the fields as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=dict) + "\n"


def most_of(kind: Any, name: str) -> int:
    """Returns the greatest value of a field of a configuration class."""
    [most] = [each.metadata["limit"].most for each in settings(kind) if each.name == name]
    return int(most)
