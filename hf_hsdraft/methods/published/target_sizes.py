"""What configurations of drafters in published formats tell of their target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.checks import Limit, check_fields, demand, integer, is_number, setting
from ...drafters.base.plain_config import PlainConfig

MOST_OF_TARGET = 4096  # layers
FLAG = Limit(lambda value: isinstance(value, bool), "true or false")


def number(least: float = 0.0) -> Limit:
    return Limit(lambda value: is_number(value) and least <= value < 1e12, f"a number of {least:g} or more")


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
