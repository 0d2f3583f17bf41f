"""The parts of a call's rounds: how they are made, and when they are changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.refusals import DraftingRefused
from ..core.tuning import TUNING
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import DraftCall, Drafter
from ..pace.pacing import CostPace, FixedPace, KindOfCall, pace_for, slower_packed
from ..runtime.target_ability import kind_of_call
from ..runtime.target_outputs import TargetOutput
from ..runtime.target_runtime import TargetRuntime
from .decoded_texts import DecodedTexts
from .draft_limits import DraftLimits
from .drafting import Drafting
from .local_target import LocalTarget, prompt_news
from .observers import Observer, PaceTimer, StatisticsKeeper
from .recorder import Recorder
from .round_loop import decode
from .text_positions import TextPositions

_MEMORY = "_hsdraft_memory"  # on a cache that outlives the call: what the drafter has read of the same text


@dataclass(frozen=True)
class Setting:
    """What a call is made of.

    Attributes:
        target: the model that verifies.
        drafter: what proposes.
        options: drafting options, as the user asks for them.
        runtime: of the target.
        texts: the texts that grow.
        recorder: of attentions and hidden states.
        synced_gpus: whether all processes have to run the same forwards.
        outlives: whether the target's cache is for more than this call.
        refused: see `DraftLimits`.
        stack: closes when the call ends.
        observers: told of each round, beside those that every call has.
    """

    target: Any
    drafter: Drafter
    options: DraftOptions
    runtime: TargetRuntime
    texts: DecodedTexts
    recorder: Recorder
    synced_gpus: bool
    outlives: bool
    refused: Callable[[DraftingRefused], None]
    stack: contextlib.ExitStack
    observers: Sequence[Observer] = ()


class Rounds:
    """The rounds of one call.

    Args:
        call: what it is made of.
        output: of the prompts' forward.
        inputs_embeds: `[B, length, D]`, for prompts that were given so.
        keeper: of the call's statistics.

    Raises:
        DraftingRefused: the target reads no drafts.
    """

    def __init__(
        self,
        call: Setting,
        output: TargetOutput,
        inputs_embeds: torch.Tensor | None,
        keeper: StatisticsKeeper,
    ) -> None:
        runtime, texts, rows = call.runtime, call.texts, len(call.texts.rows)
        self._call, self._statistics = call, keeper.statistics
        positions = TextPositions.of(runtime, output.taps.shape[1], rows)
        self._limits = DraftLimits(runtime, texts, positions, call.options, call.synced_gpus, call.refused)
        self._limits.find(output.logits[:, -1])
        taps = call.drafter.taps_of(call.target)
        self._target = LocalTarget(runtime, texts, self._limits, positions, call.recorder, taps)
        options, acceleration = self._limits.options, runtime.acceleration
        self.drafting = Drafting(
            call.drafter,
            DraftCall(
                call.target,
                rows,
                options,
                texts.foresight,
                runtime.slots.size,
                acceleration.compile_config,
                call.stack,
                runtime.first_layers,
            ),
            texts.prune,
        )
        if rows == 1:
            memory = getattr(runtime.cache, _MEMORY, None)
            if memory is not None:
                self.drafting.session.resume(memory, runtime.cached_before)
        room = max(map(texts.room, range(rows)))
        acceleration.begin(options.packed_weights, room, lambda: slower_packed(call.target, self._kind()))
        self._set_pace()
        timer = PaceTimer(self.drafting, acceleration, self._set_pace)
        self._observers: list[Observer] = [keeper, timer, *call.observers]
        several = rows > 1 and not call.synced_gpus and not call.recorder.records
        self._texts_leave = several and runtime.let_rows_leave(keep=call.outlives)
        self.drafting.observe(prompt_news(texts, output, positions, self._target.own_taps, inputs_embeds, runtime))

    def run(self) -> None:
        """Runs them until all texts have ended."""
        call, device = self._call, self._call.texts.rows[0].ids.device

        def goes_on() -> bool:
            return call.target._has_unfinished_sequences(not call.texts.active, call.synced_gpus, device=device)

        if not self._limits.presumed:
            call.texts.stream()
        try:
            decode(self._target, self.drafting, goes_on, self._before_round, self._observers)
        except BaseException:
            if self._limits.presumed:  # the cache holds what was emitted, so it is handed on too
                call.texts.stream()
            raise
        before = call.runtime.forwards
        if call.outlives and not call.synced_gpus:
            self._target.read_ends()
        self._statistics.target_forwards += call.runtime.forwards - before
        self._statistics.draft_kind, self._statistics.reason = self._limits.kind, self._limits.reason

    def leave_memory(self) -> None:
        """Leaves what the drafter has read of a single text on the cache, for a call that goes on from there."""
        runtime = self._call.runtime
        memory = self.drafting.session.memory(runtime.length + 1) if runtime.num_texts == 1 else None
        if memory is not None:
            setattr(runtime.cache, _MEMORY, memory)

    def _before_round(self) -> None:
        """Lets texts that have ended leave, and tries the target again where the texts have grown long."""
        staying = self._target.staying() if self._texts_leave else []
        if staying:
            share = len(staying) / len(self._target.read)
            self._target.keep(staying)
            self.drafting.keep(staying)
            self._set_pace(share)  # the others' trees share what is verified
        if self._limits.keep_up(self._target.read):
            self._set_pace()
            if self._limits.options.depth == 0 and len(self._call.texts.rows) > 1:
                self.drafting.rest()

    def _set_pace(self, share: float = 1.0) -> None:
        """Sets how much to draft: by costs of this device, drafter, batch and length of text, or fixed.

        Args:
            share: share of the texts read until now that go on.
        """
        options, before = self._limits.options.shared_by(len(self._target.read)), self.drafting.pace
        if options.tree_sizing == "fixed" or options.depth == 0:
            self.drafting.pace = FixedPace()
            return
        former = before if isinstance(before, CostPace) else None
        call = self._call
        self.drafting.pace = pace_for(call.target, call.drafter, self._kind(), options.costs, former, share)

    def _kind(self) -> KindOfCall:
        """What costs and habits of the rounds depend on."""
        rows, session, runtime = len(self._target.read), self.drafting.session, self._call.runtime
        options = self._limits.options.shared_by(rows)
        foresight = self._call.texts.foresight
        draws = foresight.warper_names if foresight else None  # they take time, and drafts go by them
        # Options of a family's own change what a draft costs and how often it is right, as reuse does. A threshold
        # leaves nodes out after they were drafted: that changes what a depth gains, and the cost of no part.
        own = options.verification, repr(sorted(options.own.items()))
        costs = (
            *kind_of_call(runtime),
            options.beam_width,
            (self._target.furthest() // TUNING.cost_length).bit_length(),
            runtime.num_texts,
            draws,
            runtime.acceleration.compile_config is not None,
            *own,
            type(session).__qualname__,
            *session.kind,
        )
        ngrams = options.ngram_length, options.ngram_continuation
        habits = draws, rows > 1, options.beam_width, *ngrams, options.threshold, *own
        depth = 0 if session.free else options.depth
        return KindOfCall(costs, habits, depth, options.tree_size, rows, runtime.acceleration.packed)
