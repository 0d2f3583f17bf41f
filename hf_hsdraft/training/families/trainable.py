"""The families of drafters that can be trained. Families of methods are loaded on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.checks import few
from ...core.methods import Registry
from ..data.plan import TrainingPlan
from .family import TrainableFamily
from .hidden_state import HiddenStateFamily

TRAINABLE: Registry[TrainableFamily] = Registry("family", {HiddenStateFamily.name: HiddenStateFamily()})


def trainable(name: str, fields: Mapping[str, Any]) -> TrainableFamily:
    """Returns a family by its name.

    An unknown name, or a field of a drafter's configuration that belongs to another family only, is a ValueError.
    """
    if name not in TRAINABLE:
        raise ValueError(f"family={name!r} is unknown: expected one of {few(sorted(TRAINABLE))}")
    family = TRAINABLE[name]
    for field in sorted(fields.keys() - family.fields):
        owners = [other.name for other in TRAINABLE.values() if field in other.fields]
        if owners:
            raise ValueError(
                f"{field}={fields[field]!r} is invalid with family={name!r}, whose drafters have no such field: leave "
                f"it out, or train one of family {few(owners)}"
            )
    return family


def family_for(plan: TrainingPlan) -> TrainableFamily:
    """Returns the family that a plan names, without a target; a ValueError if it lacks what the plan asks for."""
    family = trainable(plan.family, plan.drafter)
    if plan.lora is not None and not family.takes_adapters:
        raise ValueError(
            f"lora={plan.lora} is invalid with family={family.name!r}, whose drafters load no adapters: leave it out, "
            "and all weights are trained"
        )
    if plan.init_from is None and not family.starts_afresh:
        raise ValueError(
            f"family={family.name!r} trains what is added to a finished language model: name the model by --init-from. "
            "`hsdraft train --family lm` makes one"
        )
    return family


def _most_special_first() -> list[TrainableFamily]:
    """Returns all families; subclasses' drafters come before those that they derive from."""
    return sorted(TRAINABLE.values(), key=lambda family: -len(family.drafter.__mro__))


def as_trained(drafter: Any) -> Any | None:
    """Converts a drafter to its training form; `None` if it can only draft."""
    for family in _most_special_first():
        try:
            taken = family.taken(drafter)
            if taken is not None:
                family.check_trainable(taken.config)
                return taken
        except ValueError:
            return None
    return None


def family_of(drafter: Any) -> TrainableFamily:
    """Returns the family of a drafter; a ValueError if drafters of this class cannot be trained."""
    for family in _most_special_first():
        if isinstance(drafter, family.drafter):
            return family
    raise ValueError(
        f"a {type(drafter).__name__} cannot be trained: expected a drafter of one of the families "
        f"{few(sorted(TRAINABLE))}"
    )
