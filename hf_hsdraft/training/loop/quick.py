"""A run of five minutes, loading and leaving included: a drafter to look at, not to keep.

Short greedy answers to prompts for which the target writes no texts first, and a small draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.plan import TrainingPlan
from .run_folder import ended_untrained

_PLAN: dict[str, Any] = {
    "temperatures": (0.0,), "max_new_tokens": 96, "max_length": 256, "cache_taps": True, "answer_batch_size": 32,
    "eval_conversations": 16, "eval_prompts": 8,
}  # fmt: skip
_KINDS = {"question": 1.0, "writing": 1.0, "code": 1.0, "mathematics": 1.0}
_ARGUMENTS: dict[str, Any] = {
    "max_minutes": 4.75,
    "learning_rate": 1e-3,
    "eval_steps": 10**6,
    "eval_new_tokens": 32,
    "logging_steps": 10,
}
_OTHER_LIMITS = ("max_steps", "num_train_epochs", "max_training_minutes")
_DRAFT_VOCABULARY = 8192  # few answers would choose more


def quick(given: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[TrainingPlan, dict[str, Any]]:
    """Returns the plan and the arguments of a quick run.

    Args:
        given: fields of the plan that are kept as they are, `out` among them.
        arguments: fields of `DrafterTrainingArguments` that are kept.
    """
    own = TrainingPlan(**given)
    fields, further = {**_PLAN, **given}, {**_ARGUMENTS, **arguments}
    if any(arguments.get(name) is not None for name in _OTHER_LIMITS):
        further.pop("max_minutes")
    elif "max_minutes" not in arguments:  # a run that ended with an untrained drafter goes on for as long again
        further["max_minutes"] += ended_untrained(Path(own.out)).get("limits", {}).get("max_minutes", 0.0)
    if own.invents and not own.openings:
        fields["kinds"] = given.get("kinds") or _KINDS
    if own.family == "hidden-state" and own.init_from is None:
        fields["drafter"] = {"draft_vocab_size": _DRAFT_VOCABULARY, **own.drafter}
    return TrainingPlan(**fields), further
