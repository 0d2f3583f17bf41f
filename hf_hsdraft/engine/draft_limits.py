"""What may be drafted in a call: trees, chains or nothing, how deep, and up to which length that is known."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import logging

from ..core.refusals import DraftingRefused
from ..core.tensors import device_of
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Call
from ..runtime.findings import LEAST_DEPTH, STEPS, Finding, Size, find_out
from ..runtime.module_hooks import experience_of
from ..runtime.target_limits import furthest_read, refusal, slots_read_alike, why_drafts_end, why_in_step
from ..runtime.target_runtime import TargetRuntime

# Number of tokens that calls may emit for which a trial pays, also where weights are packed and layers compiled
# - measured: a trial takes as long as 15 to 22 plain rounds (SmolLM2-135M, bfloat16), and drafting saves a quarter
# to half of a round a token, packed 0.4, compiled two thirds.
TRIAL_ROOM = 48
TRIAL_ROOM_PACKED = 40
TRIAL_ROOM_COMPILED = 24
TRIAL_NUMBERS = 2**24  # number of numbers of a target whose trial takes no time - measured

logger = logging.get_logger(__name__)


def refuse(refusal: DraftingRefused) -> None:
    raise refusal


@dataclass
class TextPositions:
    """Where the texts of a call, or of a running batch, are."""

    prompt: torch.Tensor  # `[B, n]`, int64, positions of the prompts' taps
    real: torch.Tensor  # `[B, n]`, bool, False for padding
    roots: list[int]  # position of each text's last token; 0 for places without a text
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

    @classmethod
    def of_places(cls, rows: int) -> TextPositions:
        """Positions of texts that join later, at `rows` places."""
        return cls(torch.empty(rows, 0), torch.empty(rows, 0), [0] * rows, [0] * rows)

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
    """The limits of the drafts of a call, found after the prompts' forward, or of a running batch (`keep_up` alone).

    Args:
        positions: of the texts, which `LocalTarget` keeps up to date.
        refused: called if the target turns out to read no drafts. If it does not raise, the texts grow without drafts.
        untriable: why no trial can tell whether it does; nothing is drafted then. Empty otherwise.

    Attributes:
        options: the effective options: chains where the target reads no trees, depth 0 for no drafts.
        kind: `"tree"` or `"chain"`.
        reason: why it is not what was asked for; empty if it is.
        known_until: text length up to which the target's ability is known.
        deepest: depth of drafts up to which it is known.
        ends: for each text, the furthest position to which a draft may reach, as of `look_ahead`.
        alike_until: first cache slot beyond those that the target reads alike, as of `look_ahead`.
    """

    def __init__(
        self,
        call: Call,
        positions: TextPositions,
        refused: Callable[[DraftingRefused], None] = refuse,
        untriable: str = "",
    ) -> None:
        self._runtime, self._texts, self._synced_gpus = call.runtime, call.texts, call.synced_gpus
        self.positions, self._rows = positions, call.rows
        self.options, self.kind, self.reason = call.options, "tree", ""
        self._refused, self._untriable, self._size = refused, untriable, draft_size(call.options, call.rows)
        self._wanted = call.options
        self.known_until, self.deepest = 0, sys.maxsize
        self.look_ahead()

    def find(self) -> None:
        """Finds out what the target can do, before the first draft.

        Raises a DraftingRefused if it reads no drafts at all.
        """
        runtime, rows = self._runtime, range(len(self.positions.roots))
        if self._untriable:
            logger.warning_once(f"Nothing is drafted for {type(runtime.target).__name__}: {self._untriable}.")
            self._draft_nothing(self._untriable)
            return
        if runtime.refusal is not None:
            self._refuse(runtime.refusal)
            return
        room = max(map(self._texts.room, rows))
        in_step = self._why_in_step(room)
        # Fixed sizes and given costs mean that every call drafts alike.
        alike = self.options.tree_sizing == "fixed" or self.options.costs is not None
        pays = alike or _wins_back(runtime.target, room, _trial_room(runtime))
        found = self._found(rows, pays or self._synced_gpus, self._in_any_process, chains=bool(in_step))
        if found is None:
            self._draft_nothing(self._why_nothing(pays))
            return
        refused = self._why_refused(found)
        if refused is not None:
            self._refuse(refused)
            return
        if in_step:  # the furthest row decides for all, as in plain decoding
            found = replace(found, reason=in_step)
        runtime.trees, self.known_until, self.deepest = found.trees, found.until, found.depth
        if found.trees:
            runtime.prepare_trees()
        else:
            name = type(runtime.target).__name__
            logger.warning_once(f"{name} is drafted for with chains instead of trees: {found.reason}.")
            self.options = self.options.as_chain()
        runtime.make_room(self.options.shared_by(len(rows)).tree_size + 1)
        self.kind = "tree" if found.trees and self.options.beam_width > 1 else "chain"
        end = why_drafts_end(runtime.target, self.positions.furthest() + room)
        self.reason = "; ".join(filter(None, (found.reason, end)))

    def _found(
        self, rows: Sequence[int], tries: bool, in_any: Callable[[bool], bool], chains: bool, ragged: bool = False
    ) -> Finding | None:
        """See `find_out`, for these texts."""
        every, runtime, doubling = self.positions.reach(self._runtime.target), self._runtime, not self._synced_gpus
        texts, reach = self._texts.of_rows(rows), min(every[row] for row in rows)
        return find_out(runtime, texts, self._size, reach, chains, ragged, tries, doubling, in_any)

    def _why_in_step(self, room: int) -> str:
        """Why the rows of a batch have to accept equally many tokens; empty if they need not."""
        runtime, rows = self._runtime, len(self.positions.roots)
        if rows == 1:
            return ""
        slots = range(runtime.length, runtime.length + room + self.options.shared_by(rows).tree_size + 1)
        return why_in_step(runtime.target, self.positions.furthest() + room + 1, slots)

    def _why_nothing(self, pays: bool) -> str:
        if end := why_drafts_end(self._runtime.target, max(self.positions.roots) + LEAST_DEPTH):
            return end
        if self._synced_gpus:
            return "nothing is drafted where a process is so close to the last position that its target has"
        close = "so close to the last position that the target has or reads alike"
        return f"nothing is drafted {close if pays else 'in so short a call before it is known what the target can do'}"

    def _draft_nothing(self, reason: str) -> None:
        """From here on the texts grow as in plain decoding."""
        self._runtime.trees, self._runtime.acceleration.off = False, True
        self.options, self.kind, self.reason = replace(self.options, depth=0), "chain", reason

    def _refuse(self, refused: DraftingRefused) -> None:
        """Reports a refusal. If that does not end the call, nothing is drafted from here on."""
        self._refused(refused)
        self._draft_nothing(str(refused))

    def _why_refused(self, found: Finding) -> DraftingRefused | None:
        """The refusal of a target that reads no drafts, or `None`."""
        if not found.chains:
            return refusal(self._runtime.target, f"{found.reason}.")
        if self._synced_gpus and self._runtime.recurrent:
            return DraftingRefused(
                f"{type(self._runtime.target).__name__} cannot be drafted for with synced_gpus=True: its recurrent "
                "layers are read again after rejections, and processes would run different numbers of forwards."
            )
        return None

    def look_ahead(self) -> None:
        """Finds how far drafts may reach, which holds until a text or the cache has grown beyond that."""
        target, length = self._runtime.target, self._runtime.length
        self.ends = list(map(operator.add, self.positions.roots, self.positions.reach(target)))
        self.alike_until = length + slots_read_alike(target, length)

    def begin_again(self) -> None:
        """Forgets that drafts were misread, of texts that have left since."""
        self.options, self.kind, self.reason, self.known_until = self._wanted, "tree", "", 0
        self._runtime.acceleration.off = False

    def keep_up(self, rows: Sequence[int]) -> bool:
        """Finds out what the target can do beyond `known_until`, or after it has lost slots of the cache.

        If it misreads drafts, these become chains, or the rounds continue without drafts. A batch whose rows have
        different lengths then reads trees of the root alone, as plain decoding reads a batch. Returns whether the
        options have changed.
        """
        runtime = self._runtime
        if runtime.refusal is not None:
            self._refuse(runtime.refusal)
            runtime.read_chains()
            return True
        ragged = runtime.trees and len(self._texts.rows) > 1  # counts rows that have left too
        # Not across processes: all would have to try in the same round.
        found = self._found(rows, not self._synced_gpus, bool, chains=not runtime.trees, ragged=ragged)
        if found is None:
            return False
        self.known_until, self.deepest = found.until, found.depth
        if found.trees or (found.chains and not runtime.trees):
            return False
        chains = found.chains and self._rows == 1  # rows of a batch may differ in length
        if chains:
            runtime.read_chains()
            self.options, self.kind = self.options.as_chain(), "chain"
        else:
            self.options, runtime.acceleration.off = replace(self.options, depth=0), True
        what = "chains are drafted" if chains else "nothing is drafted"
        self.reason = f"{what} beyond {runtime.length} tokens: {found.reason}"
        logger.warning_once(f"{type(runtime.target).__name__} reads long texts otherwise: {self.reason}.")
        return True

    def _in_any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process, where all have to run the same forwards."""
        distributed: Any = torch.distributed
        if not (self._synced_gpus and distributed.is_available() and distributed.is_initialized()):
            return flag
        shared = torch.tensor(float(flag), device=device_of(self._runtime.target))
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
        return bool(shared)


def _trial_room(runtime: TargetRuntime) -> int:
    """Number of tokens of a call for which a trial of the target pays, by how much its rounds save."""
    if not runtime.acceleration.copied:
        return TRIAL_ROOM
    return min(TRIAL_ROOM, TRIAL_ROOM_COMPILED if experience_of(runtime.target).programs else TRIAL_ROOM_PACKED)


def _wins_back(target: Any, room: int, least: int) -> bool:
    """Whether drafts of a call of `room` tokens pay for a trial, as those of `least` tokens do.

    Where all calls are shorter, one tries in the end.
    """
    if room <= STEPS + 1:
        return False
    if room < least and sum(weight.numel() for weight in target.parameters()) >= TRIAL_NUMBERS:
        known = experience_of(target)
        known.untried += room
        return known.untried >= TRIAL_ROOM
    return True


def draft_size(options: DraftOptions, rows: int) -> Size:
    """The size of the drafts of a batch. A text that remains of it may have a whole tree."""
    shared, chain = options.shared_by(rows), options.as_chain().shared_by(rows).tree_size
    tokens = max(options.tree_size + 1, rows * (max(shared.tree_size, chain) + 1))
    return Size(shared.tree_size + 1, tokens, options.tree_size, chain)
