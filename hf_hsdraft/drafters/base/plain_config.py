"""Configurations that are dataclasses, with the methods that transformers expects of a model's configuration."""

from __future__ import annotations

import inspect
import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from ...core.checks import settings
from .travelling_config import ANY, any_special_tokens


class PlainConfig:
    """Base of configuration dataclasses, for pipelines and training reports (TensorBoard, Weights & Biases)."""

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Returns a configuration that pipelines find equal to any target's."""
        return any_special_tokens(self)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=dict) + "\n"


@dataclass(frozen=True, kw_only=True)
class AnyTarget(PlainConfig):
    """The configuration that transformers expects of an assistant, of a drafter for any target."""

    vocab_size: Any = ANY  # equal to any target's
    is_encoder_decoder: bool = False


def described(kind: Any) -> Any:
    """Adds field docs to a class's docstring, and fields to its constructor's signature."""
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
