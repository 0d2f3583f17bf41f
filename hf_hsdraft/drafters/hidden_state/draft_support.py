"""The seam of a hidden-state drafter: what the installed package adds to the code that travels with it."""

from __future__ import annotations

from typing import Any

from ..base.protocol import DraftCall
from .draft_session import HSDraftSession
from .network import HSDraftNetwork


class DraftSupport:
    """What a drafter has that runs by the code it brought.

    Its drafts are the same. Only the package makes them faster, and warns of a target that the drafter fits badly.
    """

    def session(self, drafter: HSDraftNetwork, call: DraftCall) -> HSDraftSession:
        """Returns what drafts in one call."""
        weights = drafter.borrow(call.target.get_input_embeddings(), call.target.get_output_embeddings())
        return HSDraftSession(drafter, weights, call.options, batch_size=call.rows, foresight=call.foresight)

    def warn_of_misfit(self, drafter: HSDraftNetwork, target: Any, tokenizer: Any, all_processes: bool) -> None:
        """See `Drafter.warn_of_misfit`."""


_registered = [DraftSupport()]


def support() -> DraftSupport:
    """Returns the support that is registered."""
    return _registered[-1]


def register_support(better: DraftSupport) -> None:
    """Puts another support in the place of this one."""
    _registered.append(better)
