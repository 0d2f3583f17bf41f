"""What may be drafted in a call: trees, chains or nothing, how deep, and up to which length that is known.

It follows from what the target can do, which is tried if unknown (`target_probe`), and from where its positions or its
cache end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import logging

from ..core.refusals import DraftingRefused
from ..core.tensors import device_of
from ..drafters.base.protocol import Call
from ..runtime.target_ability import Ability, doubtful_ability, known_ability, postpones_trials, trial_is_due
from ..runtime.target_limits import furthest_read, slots_read_alike, why_drafts_end, why_in_step
from ..runtime.target_probe import (
    PROBE_COLUMNS,
    PROBE_DEPTH,
    ability_by,
    presumed_ability,
    tried_ability,
    tried_again,
)
from ..runtime.target_runtime import TargetRuntime
from ..runtime.target_steps import STEPS, Steps

logger = logging.get_logger(__name__)


def refuse(refusal: DraftingRefused) -> None:
    raise refusal


@dataclass
class TextPositions:
    prompt: torch.Tensor  # `[B, n]`, int64, positions of the prompts' taps
    real: torch.Tensor  # `[B, n]`, bool, False for padding
    roots: list[int]  # position of each text's last token
    ahead: list[int]  # offset between the caller's `position_ids` and the text length, for each text

    @classmethod
    def of(cls, runtime: TargetRuntime, tapped: int, batch_size: int) -> TextPositions:
        """Positions after the prompts' forward, which gave taps of the last `tapped` positions."""
        real = runtime.rows.attended
        if real is None:
            real = torch.ones(batch_size, runtime.length, dtype=torch.bool)
        real = real.clone()
        real[:, -1] = True  # also of a prompt padded at the right: the first token was chosen there
        positions, roots = (real.long().cumsum(1) - 1).clamp(min=0), real.sum(dim=1).tolist()
        own = runtime.rows.next_positions or roots
        ahead = [position - root for position, root in zip(own, roots, strict=True)]
        return cls(positions[:, -tapped:], real[:, -tapped:], roots, ahead)

    def of_root(self, row: int) -> set[int]:
        """A text's last position by its length and by the target's own positions: both may have limits."""
        return {self.roots[row], self.roots[row] + self.ahead[row]}

    def furthest(self) -> int:
        return max(max(self.of_root(row)) for row in range(len(self.roots)))

    def reach(self, target: Any) -> list[int]:
        """For each text, how far beyond its last token a forward may read."""
        rows = range(len(self.roots))
        return [min(furthest_read(target, at) - at for at in self.of_root(row)) for row in rows]


class DraftLimits:
    """The limits of a call's drafts, found after the prompts' forward.

    Args:
        tapped: number of prompt positions that have taps.
        refused: called if the target turns out to read no drafts. If it does not raise, the texts grow without drafts.
        untriable: why no trial can tell whether it does; nothing is drafted then. Empty otherwise.

    Attributes:
        options: the effective options: chains where the target reads no trees, depth 0 for no drafts.
        kind: `"tree"` or `"chain"`.
        reason: why it is not what was asked for; empty if it is.
        presumed: whether the target has not been tried yet: it may turn out that it cannot be drafted for.
        known_until: text length up to which the target's ability is known.
        steps: tokens read in single steps, to try the target; `None` if none are wanted.
        ends: for each text, the furthest position to which a draft may reach, as of `look_ahead`.
        alike_until: first cache slot beyond those that the target reads alike, as of `look_ahead`.
    """

    def __init__(
        self, call: Call, tapped: int, refused: Callable[[DraftingRefused], None] = refuse, untriable: str = ""
    ) -> None:
        self._runtime, self._texts, self._synced_gpus = call.runtime, call.texts, call.synced_gpus
        self.positions = TextPositions.of(call.runtime, tapped, call.rows)
        self.options, self.kind, self.reason = call.options, "tree", ""
        self._refused, self._untriable = refused, untriable
        call.runtime.drafts = _largest(call)
        self.presumed = False
        self.known_until = sys.maxsize
        self.steps: Steps | None = None
        self.look_ahead()

    def find(self, logits: torch.Tensor) -> None:
        """Finds out what the target can do, by `logits` `[B, V]` for the first new tokens, before the first draft.

        Raises a DraftingRefused if it reads no drafts at all.
        """
        runtime, rows, doubling = self._runtime, len(self.positions.roots), not self._synced_gpus
        if self._untriable:
            logger.warning_once(f"Nothing is drafted for {type(runtime.target).__name__}: {self._untriable}.")
            self._draft_nothing(self._untriable)
            return
        if runtime.refusal is not None:
            self._refused(runtime.refusal)
            self._draft_nothing(str(runtime.refusal))
            return
        room = max(map(self._texts.room, range(rows)))
        in_step = self._why_in_step(room)
        known = known_ability(runtime, doubling, chains=bool(in_step))
        reason = self._why_nothing(known is None, room)
        if self._in_any_process(bool(reason)):
            self._draft_nothing(reason or "another process cannot draft, and all of them run the same forwards")
            return
        if known is None and not in_step and self._tries_late and not trial_is_due(runtime, room):
            known = doubtful_ability(runtime)
            if known is None:
                self._draft_nothing("it is not known yet what the target can do, and a trial takes some rounds")
                return
        if self._in_any_process(known is None):
            if self._tries_with_own_steps:
                known, self.presumed = presumed_ability(runtime), True
                runtime.acceleration.off = True  # it may be refused, and its steps are the text
            else:
                known = tried_ability(runtime, self._texts.batch(), logits, doubling=doubling, chains=bool(in_step))
        assert known is not None
        self.known_until = known.until
        ability = known
        if in_step:  # the furthest row decides for all, as in plain decoding
            ability = replace(known, trees=False, reason=in_step if known.chains else known.reason)
        refusal = self._refusal(ability)
        if refusal is not None:
            if self._tries_late and postpones_trials(runtime.target):  # earlier batches were decoded plainly too
                logger.warning_once(f"Batches are decoded plainly: {refusal}")
            else:
                self._refused(refusal)
            self._draft_nothing(str(refusal))
            return
        runtime.trees = ability.trees
        if ability.trees:
            runtime.prepare_trees()
        else:
            self._warn_of_chains(ability)
            self.options = self.options.as_chain()
        runtime.make_room(self.options.shared_by(rows).tree_size + 1)
        self.kind = "tree" if ability.trees and self.options.beam_width > 1 else "chain"
        end = why_drafts_end(runtime.target, self.positions.furthest() + room)
        self.reason = "; ".join(filter(None, (ability.reason, end)))

    def _why_in_step(self, room: int) -> str:
        """Why the rows of a batch have to accept equally many tokens; empty if they need not."""
        runtime, rows = self._runtime, len(self.positions.roots)
        if rows == 1:
            return ""
        slots = range(runtime.length, runtime.length + room + self.options.shared_by(rows).tree_size + 1)
        return why_in_step(runtime.target, self.positions.furthest() + room + 1, slots)

    def _why_nothing(self, unknown: bool, room: int) -> str:
        """Why nothing can be drafted in a call of `room` more tokens; empty if something may.

        `unknown` says whether the target has to be tried.
        """
        target, reach = self._runtime.target, min(self.positions.reach(self._runtime.target))
        if not _drafts_fit(self._runtime, reach) or (unknown and not _trial_fits(self._runtime, reach)):
            return why_drafts_end(target, max(self.positions.roots) + PROBE_DEPTH) or (
                "nothing is drafted so close to the last position that the target has or reads alike"
            )
        # A trial reads single tokens, and the last token of a call is never drafted: no draft would follow.
        if unknown and self._tries_with_own_steps and room <= STEPS + 1:
            return "nothing is drafted in so short a call before it is known what the target can do"
        return ""

    @property
    def _tries_with_own_steps(self) -> bool:
        """Whether a trial uses tokens of the call, which are read in single steps for it.

        Not in a batch, where rows end and leave; nor across processes, which have to try in the same round; nor over a
        static cache, where steps are compiled; nor where sizes are fixed or costs are given: there the first call has
        to draft as all others do, as its drafts are compared with theirs and drawn trees take random numbers.
        """
        single = len(self._texts.rows) == 1 and self._runtime.slots.size is None
        repeats = self.options.tree_sizing == "fixed" or self.options.costs is not None
        return single and not self._synced_gpus and not repeats

    @property
    def _tries_late(self) -> bool:
        """Whether a trial has to pay first: in a batch, where it reads tokens that the call does not need."""
        repeats = self.options.tree_sizing == "fixed" or self.options.costs is not None
        return len(self._texts.rows) > 1 and not self._synced_gpus and not repeats

    def _draft_nothing(self, reason: str) -> None:
        """From here on the texts grow as in plain decoding."""
        self._runtime.trees, self._runtime.acceleration.off = False, True
        self.options, self.kind, self.reason = replace(self.options, depth=0), "chain", reason

    def _refusal(self, ability: Ability) -> DraftingRefused | None:
        """The refusal of a target that reads no drafts, or `None`."""
        name = type(self._runtime.target).__name__
        if not ability.chains:
            return DraftingRefused(f"{name} cannot be drafted for: {ability.reason}.")
        if self._synced_gpus and self._runtime.recurrent:
            return DraftingRefused(
                f"{name} cannot be drafted for with synced_gpus=True: its recurrent layers are read again after "
                "rejections, and processes would run different numbers of forwards."
            )
        return None

    def _warn_of_chains(self, ability: Ability) -> None:
        name = type(self._runtime.target).__name__
        logger.warning_once(f"{name} is drafted for with chains instead of trees: {ability.reason}.")

    def look_ahead(self) -> None:
        """Finds how far drafts may reach, which holds until a text or the cache has grown beyond that."""
        target, length = self._runtime.target, self._runtime.length
        reach = zip(self.positions.roots, self.positions.reach(target), strict=True)
        self.ends = [root + each for root, each in reach]
        self.alike_until = length + slots_read_alike(target, length)

    def keep_up(self, rows: Sequence[int]) -> bool:
        """Tries the target once there are tokens to try it with, and again beyond `known_until` or after a refusal.

        If it misreads them, drafts become chains, or the rounds continue without drafts. A batch whose rows have
        different lengths then reads trees of the root alone, as plain decoding reads a batch. Returns whether the
        options have changed. Raises a DraftingRefused if the first trial finds that the target reads no drafts at all.
        """
        runtime = self._runtime
        if runtime.refusal is not None:
            self.presumed, self.steps = False, None
            self._refused(runtime.refusal)
            runtime.read_chains()
            self._draft_nothing(str(runtime.refusal))
            return True
        ragged = runtime.trees and len(self._texts.rows) > 1  # counts rows that have left too
        chains = not runtime.trees and not self.presumed
        known = known_ability(runtime, not self._synced_gpus, chains, ragged) or self._tried(rows, ragged, chains)
        if known is None:
            return False
        refusal = self._refusal(known) if self.presumed else None
        if refusal is not None:
            self._refuse(refusal)
        first, self.presumed, self.steps, self.known_until = self.presumed, False, None, known.until
        if first and known.chains:
            runtime.acceleration.off = False
        if known.trees or (known.chains and not runtime.trees):
            return False
        if known.chains and not ragged:
            runtime.read_chains()
            self.options, self.kind = self.options.as_chain(), "chain"
        else:
            self.options = replace(self.options, depth=0)
            runtime.acceleration.off = True
        if refusal is not None:
            self.reason = str(refusal)
        elif first:
            self.reason = known.reason
            self._warn_of_chains(known)
        else:
            what = "chains are drafted" if self.options.depth else "nothing is drafted"
            self.reason = f"{what} beyond {runtime.length} tokens: {known.reason}"
            logger.warning_once(f"{type(runtime.target).__name__} reads long texts otherwise: {self.reason}.")
        return True

    def _refuse(self, refusal: DraftingRefused) -> None:
        """Reports a refusal in the middle of a call; if that ends the call, what was read is undone."""
        try:
            self._refused(refusal)
        except DraftingRefused:
            if self.steps is not None:
                self.steps.rewind()
            raise

    def _tried(self, rows: Sequence[int], ragged: bool, chains: bool) -> Ability | None:
        """What a trial finds; `None` until one is possible. Until then nothing is drafted."""
        runtime = self._runtime
        if self.steps is not None:
            return ability_by(self.steps, chains) if self.steps.complete else None
        every = self.positions.reach(runtime.target)
        # All processes would have to try in the same round.
        if self._synced_gpus or not _trial_fits(runtime, min(every[row] for row in rows)):
            return None
        if self._tries_with_own_steps:
            self.steps = Steps.begin(runtime, self._texts.batch())
            return None
        return tried_again(runtime, self._texts.batch()[list(rows)], ragged, chains)

    def _in_any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process, where all have to run the same forwards."""
        distributed: Any = torch.distributed
        if not (self._synced_gpus and distributed.is_available() and distributed.is_initialized()):
            return flag
        shared = torch.tensor(float(flag), device=device_of(self._runtime.target))
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
        return bool(shared)


def _largest(call: Call) -> tuple[int, int]:
    """Number of columns of a call's largest forwards, rounded up so that most calls share trials, and drafts' depth."""
    options = call.options.shared_by(call.rows)
    columns = call.rows * (options.tree_size + 1)
    return 1 << (columns - 1).bit_length(), options.depth + options.ngram_continuation


def _drafts_fit(runtime: TargetRuntime, reach: int) -> bool:
    """Whether drafts as deep as a trial's may follow all texts, whose positions allow a depth of `reach`."""
    return min(reach, runtime.deepest) >= PROBE_DEPTH


def _trial_fits(runtime: TargetRuntime, reach: int) -> bool:
    """Whether such drafts fit and all slots that a trial takes are read alike."""
    return _drafts_fit(runtime, reach) and slots_read_alike(runtime.target, runtime.length) > PROBE_COLUMNS
