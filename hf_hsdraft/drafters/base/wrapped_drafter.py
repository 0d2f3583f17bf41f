"""A wrapper around a drafter, to measure or check a call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from ...verify.verdict import Verifier
from .draft_options import NO_HISTORY, DraftOptions
from .protocol import Call, Drafter, Session


class WrappedDrafter(Drafter):
    """Drafts like another drafter, with trees of fixed size, no n-grams and no history: every run drafts the same.

    Subclasses may override `session`. The wrapped drafter is not changed: options are copied. A `rule` verifies instead
    of the one that the options name.
    """

    def __init__(self, drafter: Any, rule: Verifier | None = None) -> None:
        self.config, self.device = drafter.config, getattr(drafter, "device", None)
        self.num_draft_steps = drafter.num_draft_steps
        self.takes_tree_builders, self.own_options = drafter.takes_tree_builders, drafter.own_options
        self.generation_config = copy.deepcopy(drafter.generation_config)
        options = self.generation_config
        options.tree_sizing, options.ngram_length, options.ngram_continuation = "fixed", 0, 0
        options.history = NO_HISTORY
        self._drafter, self._rule = drafter, rule

    def default_generation_config(self) -> GenerationConfig:
        return self._drafter.default_generation_config()

    def check_together(self, options: DraftOptions) -> None:
        self._drafter.check_together(options)

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return self._drafter.taps

    def taps_of(self, target: Any) -> Sequence[int]:
        return self._drafter.taps_of(target)

    def check(self, target: Any) -> None:
        self._drafter.check(target)

    def session(self, call: Call) -> Session:
        return self._drafter.session(call)

    def verifier(self, options: DraftOptions) -> Verifier:
        return self._drafter.verifier(options) if self._rule is None else self._rule
