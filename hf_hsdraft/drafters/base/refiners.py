"""Interface of refiners, methods that change draft logits by the path's tokens, such as `methods/refinement`.

Drafters that draft all depths at once take refiners. Each has an option of its name, its share in the logits; at 0, the
default, it is not loaded.

Letters in the shapes: as in `TokenBias`; S is the size of a refiner's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...core.checks import is_number
from ...core.methods import Registry
from ...core.options import Option
from ...core.tensors import Transform
from .draft_options import DraftOptions
from .target_weights import TargetWeights


class Refinement(Protocol):
    @property
    def state_size(self) -> int:
        """S."""

    def advance(self, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Returns the states `[B, n, S]` of nodes from their parents' states; None for roots."""

    def __call__(self, level: int, logits: torch.Tensor, states: torch.Tensor, up: Transform) -> torch.Tensor:
        """Returns refined logits `[B, n, C]` of the children at depth `level` of nodes with `states` `[B, n, S]`.

        `logits` `[B, n or 1, C]` are the drafter's; `up` is from `among` for the same columns.
        """

    def among(self, columns: torch.Tensor | None) -> Transform:
        """Returns the last product for columns `[B, C]`; None for all columns."""


class Refiner(Protocol):
    @classmethod
    def check(cls, drafter: Any, share: float) -> None:
        """Raises a ValueError if the drafter lacks what this refiner needs."""

    @classmethod
    def of(cls, drafter: Any, share: float, weights: TargetWeights, rows: int) -> Refiner:
        """Returns the refiner of a call; raises an OSError or ValueError for missing, damaged or unfit files."""

    def observe(self, row: int, tokens: Sequence[int]) -> None:
        """Takes further tokens of a row; the last one is the root of its next draft."""

    def refinement(self, rows: Sequence[int]) -> Refinement:
        """Returns the refinement of the next drafts of these rows."""


REFINERS: Registry[type[Refiner]] = Registry("refiner")
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


def refiner_of(drafter: Any, options: DraftOptions, weights: TargetWeights, rows: int) -> Refiner | None:
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
