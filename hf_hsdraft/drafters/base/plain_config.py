"""Configurations that are dataclasses, with the methods that transformers expects of a model's configuration."""

from __future__ import annotations

import inspect
import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ...core.checks import Limit, check_fields, demand, integer, is_number, setting, settings
from .travelling_config import ANY, any_special_tokens

MOST_OF_TARGET = 4096  # layers
FLAG = Limit(lambda value: isinstance(value, bool), "true or false")


def number(least: float = 0.0) -> Limit:
    return Limit(lambda value: is_number(value) and least <= value < 1e12, f"a number of {least:g} or more")


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


@dataclass(frozen=True, kw_only=True)
class TargetSizes(PlainConfig):
    """What files tell of the target that their drafter was made for. Fields are checked on construction."""

    model_type: ClassVar[str] = "sizes_of_target"

    vocab_size: int | None = setting(
        "of the target; `None` where the drafter takes that of any target", limit=integer(2**22), optional=True
    )
    draft_vocab_size: int | None = setting(
        "V', the number of tokens that can be drafted; `None` for those of any target",
        None, limit=integer(2**22), optional=True
    )  # fmt: skip
    target_hidden_size: int = setting("width of the target's hidden states", limit=integer(2**17))
    target_num_hidden_layers: int | None = setting(
        "of the target, where it is known", None, integer(MOST_OF_TARGET), optional=True
    )
    target_name: str = setting("name of the target, where it is known", "")

    def __post_init__(self) -> None:
        check_fields(self)

    def check_drafted(self) -> None:
        """Raises a ValueError unless the drafted tokens are some of the target's."""
        size, drafted = self.vocab_size, self.draft_vocab_size
        valid = drafted is None if size is None else drafted is not None and drafted <= size
        demand(valid, "draft_vocab_size", drafted, f"the target has only vocab_size={size} tokens")

    @property
    def is_reduced(self) -> bool:
        """Whether only a part of the target's vocabulary can be drafted."""
        return self.draft_vocab_size is not None and self.draft_vocab_size != self.vocab_size


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
