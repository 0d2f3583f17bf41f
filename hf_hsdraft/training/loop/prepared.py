"""Checks of a run that need no target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...hub.drafter_files import CONFIG
from ...hub.fetching import find_folder, loading
from ..data.gather import check_not_empty, most_in_sources
from ..data.kinds import chosen_kinds
from ..data.plan import TrainingPlan
from ..families.trainable import family_for
from ..loss.objectives import WHOLE_LOSSES
from .arguments import DrafterTrainingArguments, training_arguments


def prepared(
    plan: TrainingPlan, arguments: Mapping[str, Any], device_type: str
) -> tuple[TrainingPlan, DrafterTrainingArguments]:
    """Checks a plan and the arguments of its run, which differ from the family's defaults, and completes both.

    Raises:
        ValueError: plan and arguments do not fit together.
        TypeError: there is no such argument.
        OSError: there is no such drafter to start from.
    """
    plan.check_invents()
    chosen_kinds(plan.kinds)
    args = training_arguments(Path(plan.out), {**family_for(plan).arguments, **arguments}, device_type)
    family_for(plan).check_policy(args.data_policy)
    if args.objective in WHOLE_LOSSES:
        plan = replace(plan, drafter={**plan.drafter, **WHOLE_LOSSES[args.objective].fields})
        family_for(plan)  # raises for fields that such a drafter lacks
    if plan.init_from is not None:
        with loading(plan.init_from):
            find_folder(plan.init_from, (CONFIG,))
    for path in plan.prompts:
        check_not_empty(path)
    if (most := most_in_sources(plan)) is not None:
        plan.check_amount(most)
    return plan, args
