"""Which drafters can draft for which models of a hierarchy, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.refusals import DraftingRefused
from ...drafters.base.protocol import Drafter
from .levels import supposes

Pair = tuple[str, str]  # names of a drafter and of the model that verifies it


@dataclass
class Fits:
    """What can be planned.

    Attributes:
        pairs: of each drafter and each model that it can draft for.
        left_out: other pairs, with the reason.
    """

    pairs: list[Pair] = field(default_factory=list)
    left_out: dict[Pair, str] = field(default_factory=dict)

    def leave_out(self, pair: Pair, reason: str) -> None:
        """Plans a pair no longer."""
        self.pairs.remove(pair)
        self.left_out[pair] = reason


def fitting(drafters: Mapping[str, Drafter], models: Mapping[str, Any], target: str, tokenizer: Any = None) -> Fits:
    """Returns which pairs fit. A drafter has to fit the target or a middle model, not both.

    Args:
        drafters: by name.
        models: middle models by the names of their drafters, and the target.
        target: name of the target.
        tokenizer: the target's; `None` if it is not at hand.

    Raises:
        DraftingRefused: a drafter fits no model here, or its tokens are others.
    """
    fits = Fits()
    for name, drafter in drafters.items():
        for upper, model in models.items():
            if name != upper:
                reason = _misfit(drafter, model, upper != target)
                if reason:
                    fits.left_out[name, upper] = reason
                else:
                    fits.pairs.append((name, upper))
        above = [upper for lower, upper in fits.pairs if lower == name]
        if not above:
            reasons = "; ".join(f"{upper}: {fits.left_out[name, upper]}" for upper in models if upper != name)
            raise DraftingRefused(f"{name} fits no model here. {reasons}")
        drafter.warn_of_misfit(models[target if target in above else above[0]], tokenizer, all_processes=False)
    return fits


def _misfit(drafter: Drafter, model: Any, is_middle: bool) -> str:
    """Returns why a drafter cannot draft for a model; empty if it can."""
    if is_middle and not supposes(drafter):
        return f"a {type(drafter).__name__} cannot take back what a middle model told it"
    try:
        drafter.check(model)
    except ValueError as error:
        return str(error)
    return ""
