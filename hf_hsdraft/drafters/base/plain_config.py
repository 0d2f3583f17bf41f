"""Configurations that are dataclasses, as transformers' callbacks describe a model by them."""

from __future__ import annotations

import inspect
import json
import textwrap
from dataclasses import asdict
from typing import Any

from ...core.checks import Limit, is_number, settings
from .travelling_config import any_special_tokens

FLAG = Limit(lambda value: isinstance(value, bool), "true or false")


def number(least: float = 0.0) -> Limit:
    return Limit(lambda value: is_number(value) and least <= value < 1e12, f"a number of {least:g} or more")


class PlainConfig:
    """What pipelines, and reports of training (TensorBoard, Weights & Biases), ask for. Its class is a dataclass."""

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Returns a configuration that a pipeline finds equal to any target's."""
        return any_special_tokens(self)

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


def described(kind: Any) -> Any:
    """Adds the docs of its fields to the docstring of a class, and says what its constructor takes."""
    if "\n    Attributes:\n" in (kind.__doc__ or ""):
        return kind
    lines = ["", "Attributes:"]
    for each in settings(kind):
        text = f"{each.name}: {each.metadata['doc']}."
        lines += textwrap.wrap(text, 116, initial_indent="    ", subsequent_indent="        ")
    kind.__doc__ = (kind.__doc__ or "").rstrip() + "\n    " + "\n    ".join(lines) + "\n    "
    if not hasattr(kind.__init__, "__wrapped__") and "kwargs" in inspect.signature(kind.__init__).parameters:
        named = inspect.Parameter.KEYWORD_ONLY
        fields = [inspect.Parameter(each.name, named, default=each.default) for each in settings(kind)]
        rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        kind.__init__.__signature__ = inspect.Signature([*fields, rest])
    return kind
