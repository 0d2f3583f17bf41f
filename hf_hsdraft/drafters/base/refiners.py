"""Refiners: methods that change draft logits by the path's tokens. `methods/refinement` has the only one.

Drafters that draft all depths at once take refiners. Each has an option of its name, its share in the logits; at 0, the
default, it is not loaded.
"""

from __future__ import annotations

from typing import Any

from ...core.checks import is_number
from ...core.methods import Registry
from ...core.options import Option
from .draft_options import DraftOptions
from .target_weights import TargetWeights

REFINERS: Registry[Any] = Registry("refiner")  # classes, see `Refiner` in `methods/refinement/refinement.py`
REFINER_OPTIONS = tuple(
    Option(
        name,
        0.0,
        lambda value: is_number(value) and 0.0 <= value < 1.0,
        f"a number from 0 (no {name}) to below 1",
        "Share of the refiner in the logits of drafted tokens.",
    )
    for name in REFINERS
)
NOT_REFINED = {option.name: option.default for option in REFINER_OPTIONS}


def _shares(options: DraftOptions) -> dict[str, float]:
    """Returns the shares above 0 by refiner."""
    shares = {option.name: options.own.get(option.name, 0.0) for option in REFINER_OPTIONS}
    return {name: share for name, share in shares.items() if share}


def why_not_refined(drafter: Any) -> str:
    """Returns why a drafter takes no refiner, as its `why_not_refined` says; empty if it takes one."""
    return getattr(drafter, "why_not_refined", "its depths are not drafted at once")


def check_refiners(drafter: Any, options: DraftOptions) -> None:
    """Raises a ValueError for a refiner that this drafter lacks or cannot take; `Refiner.of` checks the target."""
    for name, share in _shares(options).items():
        if why := why_not_refined(drafter):
            raise ValueError(f"{name}={share!r} is invalid for this drafter: {why}; set it to 0")
        REFINERS[name].check(drafter, share)


def refiner_of(drafter: Any, options: DraftOptions, weights: TargetWeights, rows: int) -> Any:
    """Returns the refiner of a call; None if the options ask for none."""
    for name, share in _shares(options).items():
        return REFINERS[name].of(drafter, share, weights, rows)
    return None


def leave_folder(drafter: Any) -> None:
    """Forgets the folder that a drafter was loaded from, with its recipe, figures and files of methods.

    Refiners are switched off in its drafting options, in place.
    """
    drafter.loaded_from = None
    for name, none in NOT_REFINED.items():
        if getattr(drafter.generation_config, name, none):
            setattr(drafter.generation_config, name, none)
