"""The support that only the package gives a hidden-state drafter; this module does not travel."""

from __future__ import annotations

from typing import Any

from ...core.tensors import device_of
from ..base.protocol import DraftCall
from .candidate_generator import HSCandidateGenerator
from .draft_support import DraftSupport
from .network import HSDraftNetwork
from .quick_weights import QuickWeights, quick_weights
from .roll_out import RollOut
from .static_roll_out import static_roll_out
from .target_match import has_other_tokens, warn_of_mismatch


class PackageSupport(DraftSupport):
    """All the support there is: see [`DraftSupport`] for what a drafter does without it."""

    def session(self, drafter: HSDraftNetwork, call: DraftCall) -> HSCandidateGenerator:
        """Returns a session that multiplies by weights laid out for the device, and counts its guesses."""
        modules = call.target.get_input_embeddings(), call.target.get_output_embeddings()
        working = quick_weights(drafter, *modules)
        return HSCandidateGenerator(
            drafter,
            drafter.borrow(*modules, with_head=False),
            call.options,
            batch_size=call.rows,
            working=working,
            foresight=call.foresight,
            roll_out=_compiled_roll_out(drafter, call, working),
            target=call.target,
        )

    def warn_of_misfit(self, drafter: HSDraftNetwork, target: Any, tokenizer: Any, all_processes: bool) -> None:
        if all_processes or has_other_tokens(drafter, tokenizer):
            warn_of_mismatch(target, drafter, tokenizer)  # that reads a text: all processes do so, or none


def _compiled_roll_out(drafter: HSDraftNetwork, call: DraftCall, working: QuickWeights) -> RollOut | None:
    """A compiled roll-out where the target's forwards are compiled, and the next call will find it again."""
    if working.spare is None or call.compile_config is None or call.slots is None:
        return None
    if drafter.device.type != device_of(call.target).type or call.rows > 1 or call.options.depth == 0:
        return None
    made = static_roll_out(drafter, working, call.slots, call.options.depth, call.compile_config)
    return call.stack.enter_context(made)
