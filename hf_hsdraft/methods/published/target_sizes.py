"""What configurations of drafters in published formats tell of their target."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from ...core.checks import Limit, are_ascending, check_fields, demand, integer, is_number, misfit_of, setting
from ...drafters.base.plain_config import PlainConfig
from ...drafters.base.registry import Fit, TargetInfo, fit_of
from ...runtime.target_limits import decoder_layers, text_config

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


def misfit(config: Any, target: Any) -> str:
    """Returns which size of a target (anything with a `config`) is not that of a drafter's configuration, or "".

    Sizes that the configuration leaves open fit all; tables may have a `padding` of further tokens.
    """
    found = text_config(target)
    size, layers = config.vocab_size, decoder_layers(found)
    fits = size is None or found.vocab_size < size <= found.vocab_size + getattr(config, "padding", 0)
    sizes = SimpleNamespace(
        vocab_size=found.vocab_size if fits else size,
        target_hidden_size=config.target_hidden_size or found.hidden_size,
        target_num_hidden_layers=config.target_num_hidden_layers or layers,
    )
    if wrong := misfit_of(sizes, target):
        return wrong
    taps = config.taps_of(layers) if hasattr(config, "taps_of") else ()
    if are_ascending(taps, 0, layers):
        return ""
    told = f"the target has num_hidden_layers={layers}, the drafter reads its hidden states {list(taps)}"
    if getattr(config, "target_tap_layers", taps) is not None:
        return told
    name = "eagle_config.eagle_aux_hidden_state_layer_ids"
    return f"{told}, the default, for which these are too few layers: name others in its config.json ({name})"


def fit_by_sizes(config: Any, target: TargetInfo, named: Collection[str]) -> Fit | None:
    """As `fit_of`, for configurations that may leave sizes open."""
    return None if misfit(config, target) else fit_of(config, target, named)
