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
    """Pairs of a drafter and a model: those that can be planned, and those left out with the reason."""

    pairs: list[Pair] = field(default_factory=list)
    left_out: dict[Pair, str] = field(default_factory=dict)

    def leave_out(self, pair: Pair, reason: str) -> None:
        self.pairs.remove(pair)
        self.left_out[pair] = reason


def fitting(drafters: Mapping[str, Drafter], models: Mapping[str, Any], target: str, tokenizer: Any = None) -> Fits:
    """Returns which pairs fit. A drafter must fit the target or a middle model, not both.

    `models` holds the target, and middle models by the names of their drafters. Raises a DraftingRefused if a drafter
    fits no model here, or its tokens differ.
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
    if is_middle and not supposes(drafter):
        return f"a {type(drafter).__name__} cannot take back what a middle model told it"
    try:
        drafter.check(model)
    except ValueError as error:
        return str(error)
    return ""
