"""What may be drafted in a call: trees, chains or nothing, how deep, and up to which length that is known.

It follows from what the target can do, which is tried where it is not known yet (`target_probe`), and from where its
positions or its cache end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from ..drafters.draft_options import DraftOptions
from ..target.target_limits import slots_read_alike, why_drafts_end, why_in_step
from ..target.target_probe import PROBE_COLUMNS, PROBE_DEPTH, known_ability, tried_ability, tried_again
from ..target.target_runtime import TargetRuntime
from .decoded_texts import DecodedTexts
from .text_positions import TextPositions

logger = logging.get_logger(__name__)


class DraftLimits:
    """The limits of a call's drafts.

    Args:
        runtime: of the target, after the prompts' forward.
        texts: of the call.
        positions: where the texts are.
        options: what the user asks for.
        synced_gpus: whether all processes have to run the same forwards.

    Attributes:
        options: what is left of the options: chains where the target reads no trees, a depth of 0 for no drafts.
        kind: `"tree"` or `"chain"`.
        reason: why it is not what was asked for; empty if it is.
    """

    def __init__(
        self,
        runtime: TargetRuntime,
        texts: DecodedTexts,
        positions: TextPositions,
        options: DraftOptions,
        synced_gpus: bool,
    ) -> None:
        self.options, self.kind, self.reason = options, "tree", ""
        self._runtime, self._texts, self._positions, self._synced_gpus = runtime, texts, positions, synced_gpus
        self._known_until = sys.maxsize  # length of text up to which is known what the target can do

    def find(self, logits: torch.Tensor) -> None:
        """Finds out what the target can do, before the first draft.

        Args:
            logits: `[B, V]`, of the first new tokens.

        Raises:
            ValueError: it reads no drafts at all.
        """
        runtime, target, rows = self._runtime, self._runtime.target, len(self._positions.roots)
        doubling = not self._synced_gpus
        known = known_ability(runtime, doubling)
        reach = min(self._positions.reach(target))
        near = not _drafts_fit(runtime, reach) or (known is None and not _trial_fits(runtime, reach))
        if self._in_any_process(near):
            self._draft_nothing()
            return
        if self._in_any_process(known is None):
            known = tried_ability(runtime, self._texts.batch(), logits, doubling=doubling)
        assert known is not None
        self._known_until = known.until
        end = self._positions.furthest() + max(map(self._texts.room, range(rows)))
        ability = known
        if ability.trees and rows > 1:
            columns = self.options.shared_by(rows).tree_size + 1
            slots = range(runtime.length, runtime.length + end - self._positions.furthest() + columns)
            in_step = why_in_step(target, end + 1, slots)
            if in_step:  # the row that is furthest decides for all, as in plain decoding
                ability = replace(ability, trees=False, reason=in_step)
        self._check(ability.chains, ability.reason)
        runtime.trees = ability.trees
        if ability.trees:
            runtime.prepare_trees()
        else:
            name = type(target).__name__
            logger.warning_once(f"{name} is drafted for with chains instead of trees: {ability.reason}.")
            self.options = self.options.as_chain()
        runtime.make_room(self.options.shared_by(rows).tree_size + 1)
        self.kind = "tree" if ability.trees and self.options.beam_width > 1 else "chain"
        self.reason = "; ".join(filter(None, (ability.reason, why_drafts_end(target, end))))

    def _draft_nothing(self) -> None:
        """For texts so close to a limit of the target that no draft fits."""
        self._runtime.trees = False
        self.options, self.kind = replace(self.options, depth=0), "chain"
        self.reason = why_drafts_end(self._runtime.target, max(self._positions.roots) + PROBE_DEPTH) or (
            "nothing is drafted so close to the last position that the target has or reads alike"
        )

    def _check(self, reads_drafts: bool, reason: str) -> None:
        name = type(self._runtime.target).__name__
        if not reads_drafts:
            raise ValueError(f"{name} cannot be drafted for: {reason}.")
        if self._synced_gpus and self._runtime.recurrent:
            raise ValueError(
                f"{name} cannot be drafted for with synced_gpus=True: its recurrent layers are read again after "
                "rejections, and processes would run different numbers of forwards."
            )

    def keep_up(self, rows: Sequence[int]) -> bool:
        """Tries the target again once the texts are longer than what it can do is known for.

        Where it reads long texts otherwise, drafts become chains, or the rounds go on without any. A batch whose rows
        are at different lengths goes on with trees of the root alone: these are read as plain decoding reads a batch.

        Args:
            rows: the texts that are read.

        Returns:
            whether the options have changed.
        """
        runtime = self._runtime
        if runtime.length < self._known_until or self.options.depth == 0 or not self._texts.active:
            return False
        known = known_ability(runtime, doubling=not self._synced_gpus)
        ragged = runtime.trees and len(rows) > 1
        if known is None:
            # All processes would have to try in the same round. Until a trial fits, nothing is drafted.
            every = self._positions.reach(runtime.target)
            if self._synced_gpus or not _trial_fits(runtime, min(every[row] for row in rows)):
                return False
            known = tried_again(runtime, self._texts.batch()[list(rows)], ragged)
        self._known_until = known.until
        if known.trees or (known.chains and not runtime.trees):
            return False
        if known.chains and not ragged:
            runtime.read_chains()
            self.options = self.options.as_chain()
            self.kind = "chain"
        else:
            self.options = replace(self.options, depth=0)
        what = "chains are drafted" if self.options.depth else "nothing is drafted"
        self.reason = f"{what} beyond {runtime.length} tokens: {known.reason}"
        logger.warning_once(f"{type(runtime.target).__name__} reads long texts otherwise: {self.reason}.")
        return True

    def depths(self, active: Sequence[int], sharing: int) -> dict[int, int]:
        """How deep to draft for each active text: no node beyond its greatest length, a forward's reach, or the cache.

        Args:
            sharing: number of texts that share the sizes of the options.
        """
        runtime = self._runtime
        most = min(runtime.deepest, self._known_until - runtime.length - 1)
        columns = self.options.shared_by(sharing).tree_size + 1 if runtime.trees else 0
        if self.options.depth == 0 or columns > slots_read_alike(runtime.target, runtime.length):
            most = 0
        reach = [min(each, most) for each in self._positions.reach(runtime.target)]
        depths = {row: max(min(self._texts.room(row) - 1, reach[row]), 0) for row in active}
        if runtime.in_step and depths:
            depths = dict.fromkeys(depths, max(min(*depths.values(), *reach), 0))
        return depths

    def _in_any_process(self, flag: bool) -> bool:
        """Whether it is so in any process, where all of them have to run the same forwards."""
        distributed: Any = torch.distributed
        if not (self._synced_gpus and distributed.is_available() and distributed.is_initialized()):
            return flag
        shared = torch.tensor(float(flag), device=self._runtime.target.device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
        return bool(shared)


def _drafts_fit(runtime: TargetRuntime, reach: int) -> bool:
    """Whether drafts as deep as a trial's may follow all texts, whose positions allow a depth of `reach`."""
    return min(reach, runtime.deepest) >= PROBE_DEPTH


def _trial_fits(runtime: TargetRuntime, reach: int) -> bool:
    """The same, and all slots that a trial takes are read alike."""
    return _drafts_fit(runtime, reach) and slots_read_alike(runtime.target, runtime.length) > PROBE_COLUMNS
