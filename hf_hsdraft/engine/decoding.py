"""The round: draft, verify, commit, reuse. One call of `generate()` from its prompts to its output."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.utils import logging

from ..acceleration.cpu.packing import Packing
from ..common.target_weights import TargetWeights
from ..common.tensors import on_device
from ..drafters.draft_options import DraftOptions
from ..drafters.hidden_state.candidate_generator import HSCandidateGenerator
from ..drafters.hidden_state.modeling_hsdraft import HSDrafter
from ..drafters.hidden_state.roll_out import RollOut
from ..drafters.hidden_state.static_roll_out import static_roll_out
from ..drafters.hidden_state.target_match import has_other_tokens, warn_of_mismatch, warn_of_poor_guesses
from ..drafters.hidden_state.working_weights import WorkingWeights, working_weights
from ..drafters.ngrams.cacheback import CachebackDrafter
from ..pace.pacing import KindOfCall, Pace, pace_for, slower_packed
from ..target.static_cache import with_draft_room
from ..target.target_ability import Ability, kind_of_call, known_ability
from ..target.target_limits import (
    check_inputs,
    furthest_position,
    furthest_read,
    slots_read_alike,
    text_config,
    why_drafts_end,
    why_in_step,
)
from ..target.target_outputs import TargetOutput
from ..target.target_probe import (
    PROBE_COLUMNS,
    PROBE_DEPTH,
    STEPS,
    Steps,
    ability_by,
    presumed_ability,
    tried_ability,
    tried_again,
)
from ..target.target_runtime import TargetRuntime
from ..trees.draft_tree import DraftTree
from ..verifiers.foresight import Foresight
from ..verifiers.verification import Verdict
from .call_output import Clock, DraftStatistics, HSDraftEncoderDecoderOutput, HSDraftGenerateOutput, as_output
from .decoded_texts import DecodedTexts, StepOutputs
from .row_processors import check_processors

logger = logging.get_logger(__name__)

_MOST_REMEMBERED = 2**14  # tokens of a prompt whose n-grams are kept: entering them takes time
_FEWER = 0.75  # of a batch's rows that still grow, from which on the ended ones leave it: that moves the cache
_ABREAST = 1  # tokens that a row of a batch may be ahead of the last one and still count as it
_MEMORY = "_hsdraft_memory"  # on a cache that outlives the call: what the drafter has read of the same text


def check_target(target: Any, drafter: HSDrafter | CachebackDrafter) -> None:
    """Raises a ValueError that names the field if `drafter` was made for another target."""
    if isinstance(drafter, CachebackDrafter):
        if drafter.most_token >= text_config(target).vocab_size:
            raise ValueError(
                f"the texts of this CachebackDrafter hold token {drafter.most_token}, the target's vocabulary has only "
                f"{text_config(target).vocab_size}: they have to be encoded by the target's tokenizer"
            )
        return
    config, wanted = text_config(target), drafter.config
    made_for = f"this drafter was trained for {wanted.target_name or 'another target'}"
    for name, expected in (
        ("vocab_size", wanted.vocab_size),
        ("hidden_size", wanted.target_hidden_size),
        ("num_hidden_layers", wanted.target_num_hidden_layers),
    ):
        found = getattr(config, name)
        if found != expected:
            raise ValueError(
                f"the target has {name}={found}, the drafter expects {expected}: {made_for}. Use a drafter of this "
                "target, or train one with `hsdraft train`."
            )


def _check_call(
    target: Any,
    drafter: HSDrafter | CachebackDrafter,
    input_ids: torch.Tensor,
    processors: Any,
    synced_gpus: bool,
    kwargs: dict[str, Any],
) -> None:
    """Everything known beforehand that would make the call fail or be wrong."""
    check_target(target, drafter)
    check_inputs(target)
    if not kwargs.get("use_cache"):
        raise ValueError("use_cache=False is not possible with a drafter: verification needs the target's cache")
    window = furthest_position(target)
    rotary = getattr(text_config(target), "rope_parameters", None)  # goes on beyond its window
    length = 0 if rotary else _positions_taken(target, input_ids, kwargs)
    if length > window:
        raise ValueError(f"the prompt has {length} tokens, the target's context window is {window}; shorten the prompt")
    if synced_gpus and any(isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor) for one in processors):
        raise ValueError(
            "guidance_scale is not possible with a drafter and synced_gpus=True: its forwards differ by process"
        )
    check_processors(processors, len(input_ids))


def _positions_taken(target: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> int:
    """How many of its positions the target needs for the prompts."""
    if target.config.is_encoder_decoder:
        return input_ids.shape[1]
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None:
        return int(positions.max()) + 1
    return input_ids.shape[1] if mask is None else int(mask.sum(dim=1).max())


def speculative_decoding(
    target: Any,
    drafter: HSDrafter | CachebackDrafter,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> HSDraftGenerateOutput | HSDraftEncoderDecoderOutput | torch.Tensor:
    """Decodes with a drafter ("Make Every Draft Count"); the output has the target's own distribution.

    Takes what `generate()` hands to a decoding method, and returns what it returns: `[B, length]` token ids, or with
    `return_dict_in_generate` an [`HSDraftGenerateOutput`].

    Raises:
        ValueError: target, drafter and call do not fit together; nothing has been streamed then.
    """
    _check_call(target, drafter, input_ids, logits_processor, synced_gpus, model_kwargs)
    options = DraftOptions.of(drafter, generation_config)
    if isinstance(drafter, HSDrafter) and (synced_gpus or has_other_tokens(drafter, tokenizer)):
        warn_of_mismatch(target, drafter, tokenizer)  # that reads a text: all processes do so, or none
    columns = options.shared_by(len(input_ids)).tree_size + 1
    model_kwargs = with_draft_room(target, model_kwargs, generation_config, input_ids, columns)
    runtime = TargetRuntime(target, drafter.config.target_tap_layers, model_kwargs)
    statistics = DraftStatistics() if generation_config.return_dict_in_generate else None
    clock = Clock(statistics, target.device)
    clock.start()
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    weights = drafter.borrow(*modules, with_head=False)
    texts = DecodedTexts(
        input_ids,
        generation_config,
        logits_processor,
        stopping_criteria,
        streamer,
        reject=options.verification == "rejection",
        vocab_ids=weights.vocab_ids,
    )
    clock.stop("draft_seconds")
    with runtime.released_on_error(), contextlib.ExitStack() as stack:
        call = _Call(target, drafter, weights, options, runtime, texts, synced_gpus, statistics, clock, stack)
        call.run(input_ids, generation_config, model_kwargs.get("inputs_embeds"))
    texts.end_stream()
    if isinstance(drafter, HSDrafter) and call.generator is not None and not synced_gpus:
        warn_of_poor_guesses(target, drafter, call.generator.guesses, call.generator.right_guesses)
    if statistics is None:
        return texts.sequences()
    clock.finish()
    new_tokens = texts.length() - texts.prompt_length
    statistics.new_tokens = sum(min(texts.new_tokens(row), new_tokens) for row in range(len(texts.rows)))
    return as_output(texts, runtime, statistics, generation_config, model_kwargs)


@dataclass
class _Call:
    """The rounds of one call, from the prompts' forward to the last."""

    target: Any
    drafter: HSDrafter | CachebackDrafter
    weights: TargetWeights
    options: DraftOptions
    runtime: TargetRuntime
    texts: DecodedTexts
    synced_gpus: bool
    statistics: DraftStatistics | None
    clock: Clock
    stack: contextlib.ExitStack  # what is to be given back when the call ends
    working: WorkingWeights | None = None  # of a trained drafter, once something may be drafted
    pace: Pace | None = None
    generator: HSCandidateGenerator | None = None
    foresight: Foresight | None = None
    closed: set[int] = field(default_factory=set)  # rows whose last token has been read
    read: list[int] = field(default_factory=list)  # rows that the target's forwards are of
    known_until: int = sys.maxsize  # length of text up to which is known what the target can do
    steps: Steps | None = None  # those that are read one by one, to try the target with them
    presumed: bool = False  # what the target can do was not tried yet: it may turn out that it cannot be drafted for
    packing: Packing | None = None
    packs: bool = False  # in this round, which takes longer for it

    def run(self, input_ids: torch.Tensor, generation_config: Any, inputs_embeds: torch.Tensor | None) -> None:
        runtime, texts, rows = self.runtime, self.texts, range(len(input_ids))
        self.read = list(rows)
        output = runtime.prefill(input_ids, generation_config)
        self.clock.stop("prefill_seconds")
        recorder = _Recorder(runtime, generation_config)
        self.foresight = texts.foresee(output.logits.shape[-1])
        texts.start(output.logits[:, -1])
        for row in rows:
            tree = DraftTree.root(-1)
            texts.emit(row, tree, texts.walk(row, tree, output.logits[row, -1:]), recorder.prompt(row))
        texts.end_batch()
        if self.statistics is not None:
            self.statistics.target_forwards, self.statistics.row_forwards = 1, len(rows)
        generator, rows_leave = None, False
        outlives = self.statistics is not None or getattr(runtime.cache, "_is_user_defined", False)
        if texts.active or self.synced_gpus:
            positions = _Positions.of(runtime, output.taps.shape[1], len(rows))
            generator = self.generator = self._generator(output, positions)
            several = len(rows) > 1 and not self.synced_gpus and not recorder.records
            rows_leave = several and runtime.let_rows_leave(keep=outlives)
            _read_prompts(generator, texts, output, positions, runtime.attended, inputs_embeds)
        if not self.presumed:
            texts.stream()
        done = not texts.active
        while self.target._has_unfinished_sequences(done, self.synced_gpus, device=input_ids.device):
            assert generator is not None
            if rows_leave:
                self._leave_ended(generator, positions)
            self._round(generator, positions, recorder)
            done = not texts.active
        texts.stream()
        if outlives and not self.synced_gpus:
            self._read_ends()
        if self.statistics is not None:
            self.statistics.packed_weights = runtime.packed
        runtime.finish(texts.sequences())
        if outlives and generator is not None and generator.trained and len(rows) == 1:
            setattr(runtime.cache, _MEMORY, generator.memory(runtime.length + 1))

    def _generator(self, output: TargetOutput, positions: _Positions) -> HSCandidateGenerator:
        options = self.options = _as_the_target_can(self, output, positions)
        rows, target = len(self.texts.rows), self.target
        if isinstance(self.drafter, HSDrafter):
            modules = target.get_input_embeddings(), target.get_output_embeddings()
            self.working = working_weights(self.drafter, *modules)
        furthest = max(positions.roots)
        asked_for = options.packed_weights if self.runtime.can_pack else False
        self.packing = Packing(target, asked_for, lambda: slower_packed(target, self._kind(furthest)))
        self.packs = self.packing.begin(max(map(self.texts.room, range(rows))))
        self.runtime.multiply_by(self.packing.weights)
        self.pace = self._pace(furthest)
        generator = HSCandidateGenerator(
            self.drafter, self.weights, options, rows, self.pace, self.working, self.foresight, self._roll_out(options)
        )
        if rows == 1:
            generator.resume(getattr(self.runtime.cache, _MEMORY, None), self.runtime.cached_before)
        return generator

    def _roll_out(self, options: DraftOptions) -> RollOut | None:
        """A compiled one where the target's forwards are, and the next call will find it again."""
        drafter, working, slots = self.drafter, self.working, self.runtime.slots
        config = self.runtime.compile_config
        if not isinstance(drafter, HSDrafter) or working is None or working.spare is None or config is None:
            return None
        elsewhere = drafter.device.type != self.target.device.type
        if slots is None or elsewhere or len(self.texts.rows) > 1 or options.depth == 0:
            return None
        return self.stack.enter_context(static_roll_out(drafter, working, slots, options.depth, config))

    def _read_ends(self) -> None:
        """Rows that ended in the last round, but not as the longest: plain decoding reads their ends too."""
        texts, runtime, before = self.texts, self.runtime, self.runtime.forwards
        rows = [row for row in self.read if row not in self.closed and texts.rows[row].ids.shape[1] < texts.length()]
        if not rows or not runtime.trees:
            return
        trees = [self._undrafted(row) for row in self.read]
        with runtime.undone_on_error():
            runtime.verify(trees, texts.batch())
            runtime.commit(trees, [[] if row in rows else None for row in self.read])
        if self.statistics is not None:
            self.statistics.target_forwards += runtime.forwards - before

    def _leave_ended(self, generator: HSCandidateGenerator, positions: _Positions) -> None:
        """Rows that have ended are read no more; sized by cost, the others' trees share what is verified."""
        staying = [row for row in self.read if row not in self.closed]
        if not staying or len(staying) > _FEWER * len(self.read):
            return
        self.runtime.keep_rows([self.read.index(row) for row in staying])
        share, self.read = len(staying) / len(self.read), staying
        if self.pace is not None:  # sizes that are fixed stay so
            self.pace = self._pace(self._furthest(positions), share)
            generator.share_among(len(staying), self.pace)

    def _furthest(self, positions: _Positions) -> int:
        return max(positions.roots[row] for row in self.read)

    def _pace(self, position: int, share: float = 1.0) -> Pace | None:
        """How much to draft, where that follows from costs: of this device, drafter, batch and length of text.

        Args:
            share: of the rows that were read until now, how many still are.
        """
        options = self._shared
        if options.tree_sizing == "fixed" or options.depth == 0:
            return None
        return pace_for(self.target, self.drafter, self._kind(position), options.costs, self.pace, share)

    @property
    def _shared(self) -> DraftOptions:
        """The options of each row that is read."""
        return self.options.shared_by(len(self.read))

    def _kind(self, position: int) -> KindOfCall:
        rows, drafter, options = len(self.read), self.drafter, self._shared
        draws = self.foresight.kind if self.foresight else None  # they take time, and drafts go by them
        costs: tuple[Any, ...] = (
            *kind_of_call(self.runtime),
            options.beam_width,
            (position >> 10).bit_length(),
            len(self.texts.rows),
            draws,
            self.runtime.compile_config is not None,
        )
        if isinstance(drafter, HSDrafter):
            config = drafter.config
            sizes = config.hidden_size, config.num_hidden_layers, config.draft_vocab_size
            costs = *costs, *sizes, drafter.dtype, drafter.device
        habits = draws, rows > 1, options.beam_width, options.ngram_length
        depth = options.depth if isinstance(drafter, HSDrafter) else 0
        return KindOfCall(costs, habits, depth, options.tree_size, rows, self.runtime.packed)

    def _keep_up(self, generator: HSCandidateGenerator, positions: _Positions) -> None:
        """Tries the target again once the texts are longer than what it can do is known for.

        Where it reads long texts otherwise, drafts become chains, or the rounds go on without any.
        """
        runtime, options = self.runtime, self.options
        if runtime.length < self.known_until or options.depth == 0 or not self.texts.active:
            return
        ragged = runtime.trees and len(self.read) > 1
        chains = not runtime.trees and not self.presumed
        known = known_ability(runtime, not self.synced_gpus, chains, ragged)
        if known is None:
            known = self._tried(positions, ragged)
        if known is None:
            return
        presumed, self.presumed, self.steps, self.known_until = self.presumed, False, None, known.until
        if presumed and not known.chains:
            raise _cannot(self.target, known)
        if known.trees or (known.chains and not runtime.trees):
            return
        if known.chains and not ragged:
            runtime.read_chains()
            self.options = options.as_chain()
        else:
            self.options = replace(options, depth=0)
        self.pace = self._pace(self._furthest(positions))
        generator.share_among(len(self.read), self.pace, self.options)
        if presumed:
            reason = known.reason
            _warn_of_chains(self.target, known)
        else:
            what = "chains are drafted" if self.options.depth else "nothing is drafted"
            reason = f"{what} beyond {runtime.length} tokens: {known.reason}"
            logger.warning_once(f"{type(self.target).__name__} reads long texts otherwise: {reason}.")
        if self.statistics is not None:
            self.statistics.reason = reason
            self.statistics.draft_kind = "chain" if self.options.depth else self.statistics.draft_kind

    def _tried(self, positions: _Positions, ragged: bool) -> Ability | None:
        """What a trial finds; `None` until there is one. So long nothing is drafted."""
        runtime, chains = self.runtime, not self.runtime.trees and not self.presumed
        if self.steps is not None:
            return ability_by(self.steps, chains) if self.steps.complete else None
        every = positions.reach(self.target)
        # All processes would have to try in the same round.
        if self.synced_gpus or not _trial_fits(runtime, min(every[row] for row in self.read)):
            return None
        if _tries_with_own_steps(self):
            self.steps = Steps.begin(runtime, self.texts.batch())
            return None
        return tried_again(runtime, self.texts.batch()[self.read], ragged, chains)

    def _round(self, generator: HSCandidateGenerator, positions: _Positions, recorder: _Recorder) -> None:
        runtime, texts, clock = self.runtime, self.texts, self.clock
        self._keep_up(generator, positions)
        active = texts.active
        clock.start()
        timer = time.perf_counter if self.pace is not None and self.pace.measures else float
        began = timer()
        trees = {row: self._undrafted(row) for row in self.read}
        place = {row: index for index, row in enumerate(self.read)}
        behind = self._behind(active)
        trees.update(zip(active, generator.draft(self._depths(active, positions), behind), strict=True))
        clock.stop("draft_seconds")
        drafted = timer()
        before = runtime.forwards
        with runtime.undone_on_error():
            output = runtime.verify(list(trees.values()), texts.batch())
            if self.steps is not None:
                self.steps.add([texts.last_token(0)], output.logits[:, 0])
            verdicts = {row: texts.walk(row, trees[row], output.logits[place[row]]) for row in active}
            if runtime.in_step and active:
                shortest = min(len(verdict.path) for verdict in verdicts.values())
                verdicts = {row: verdict.cut(trees[row], shortest) for row, verdict in verdicts.items()}
            clock.stop("verify_seconds")
            verified = timer()  # reading the choices has waited for the device
            for row, verdict in verdicts.items():
                texts.emit(row, trees[row], verdict, recorder.path(row, verdict.path))
            texts.end_batch()
            if not self.presumed:
                texts.stream()
            beyond = texts.beyond_end()
            paths = [self._path(row, verdicts, beyond[row]) for row in self.read]
            runtime.commit(list(trees.values()), paths)
        for row, verdict in verdicts.items():
            generator.settle([trees[row].tokens[node] for node in verdict.path], row, verdict.next_token)
            _read_path(generator, texts, output.taps[place[row]], positions, row, verdict)
        if runtime.in_step and active:  # rows that have ended are read on with the others
            for row in set(trees) - set(active):
                positions.roots[row] += 1 + shortest
        if active:
            emitted = 1 + sum(len(verdicts[row].path) for row in behind) / len(behind)
            nodes, depth = max(map(len, trees.values())) - 1, generator.drafted_depth
            if self.pace is not None:
                seconds = None if self.packs else verified - drafted
                self.pace.timed(nodes, emitted, seconds, depth, drafted - began)
            self._pack_when_it_pays(generator, positions)
        clock.stop("commit_seconds")
        if self.statistics is not None and active:
            self.statistics.target_forwards += runtime.forwards - before
            self.statistics.row_forwards += len(active) * (runtime.forwards - before)
            self.statistics.accepted_lengths += [verdicts[row].num_drafted for row in active]
            self.statistics.drafted_nodes += [len(trees[row]) - 1 for row in active]

    def _undrafted(self, row: int) -> DraftTree:
        """What is read of a row without a draft: its last token, unless plain decoding would not read that any more."""
        idle = row in self.closed or not self.texts.room(row)
        return (DraftTree.idle if idle else DraftTree.root)(self.texts.last_token(row))

    def _pack_when_it_pays(self, generator: HSCandidateGenerator, positions: _Positions) -> None:
        assert self.packing is not None
        self.packs = self.packing.after_round()
        if self.packing.weights is None or self.runtime.packed:
            return
        self.runtime.multiply_by(self.packing.weights)
        if self.pace is not None:
            self.pace = self._pace(self._furthest(positions))
            generator.share_among(len(self.read), self.pace)

    def _path(self, row: int, verdicts: dict[int, Verdict], beyond: int) -> list[int] | None:
        """What is kept of a row's tree; of one that has ended its root, once: plain decoding reads its end too.

        Args:
            beyond: tokens of the row that are beyond the end of the batch.
        """
        if row in verdicts:
            path = verdicts[row].path
            return path[: max(len(path) - beyond, 0)]
        if row in self.closed:
            return None
        self.closed.add(row)
        return []

    def _behind(self, active: list[int]) -> list[int]:
        """The rows that a batch waits for: it has ended when the last of them has."""
        lengths = {row: self.texts.new_tokens(row) for row in active}
        furthest = min(lengths.values(), default=0)
        return [row for row, length in lengths.items() if length - furthest <= _ABREAST]

    def _depths(self, active: list[int], positions: _Positions) -> dict[int, int]:
        """How deep to draft: no node beyond a text's greatest length, a forward's reach, or the cache's room."""
        most = min(self.runtime.deepest, self.known_until - self.runtime.length - 1)
        columns = self._shared.tree_size + 1 if self.runtime.trees else 0
        if self.options.depth == 0 or columns > slots_read_alike(self.target, self.runtime.length):
            most = 0
        reach = [min(each, most) for each in positions.reach(self.target)]
        depths = {row: max(min(self.texts.room(row) - 1, reach[row]), 0) for row in active}
        if self.runtime.in_step and depths:
            depths = dict.fromkeys(depths, max(min(*depths.values(), *reach), 0))
        return depths


@dataclass
class _Positions:
    """Where the rows are in their texts, padding not counted.

    Attributes:
        prompt: `[B, n]`, positions of the prompts' taps; real: `[B, n]`, bool, which of them are no padding.
        roots: position of each row's last token.
        ahead: by how much the target's own position of that token is greater: by that of a caller's `position_ids`.
    """

    prompt: torch.Tensor
    real: torch.Tensor
    roots: list[int]
    ahead: list[int]

    @classmethod
    def of(cls, runtime: TargetRuntime, tapped: int, batch_size: int) -> _Positions:
        real = runtime.attended
        if real is None:
            real = torch.ones(batch_size, runtime.length, dtype=torch.bool)
        real = real.clone()
        real[:, -1] = True  # also of a prompt padded at the right: the first token was chosen there
        positions, roots = (real.long().cumsum(1) - 1).clamp(min=0), real.sum(dim=1).tolist()
        own = runtime.next_positions or roots
        ahead = [position - root for position, root in zip(own, roots, strict=True)]
        return cls(positions[:, -tapped:], real[:, -tapped:], roots, ahead)

    def of_root(self, row: int) -> set[int]:
        """Where a row's last token is: by its length and by the target's own positions, which both may have limits."""
        return {self.roots[row], self.roots[row] + self.ahead[row]}

    def reach(self, target: Any) -> list[int]:
        """For each row, how far beyond its last token a forward may read."""
        rows = range(len(self.roots))
        return [min(furthest_read(target, at) - at for at in self.of_root(row)) for row in rows]


def _as_the_target_can(call: _Call, output: TargetOutput, positions: _Positions) -> DraftOptions:
    """The options as far as the target can follow them: chains where it reads no trees.

    Raises:
        ValueError: it reads no drafts at all.
    """
    target, runtime, texts, options = call.target, call.runtime, call.texts, call.options
    rows = len(positions.roots)
    doubling = not call.synced_gpus
    room = max(map(texts.room, range(rows)))
    furthest = max(max(positions.of_root(row)) for row in range(rows))
    slots = range(runtime.length, runtime.length + room + options.shared_by(rows).tree_size + 1)
    # Where the row that is furthest decides for all, they have to go in step, as in plain decoding.
    in_step = why_in_step(target, furthest + room + 1, slots) if rows > 1 else ""
    known = known_ability(runtime, doubling, chains=bool(in_step))
    reach = min(positions.reach(target))
    near = not _drafts_fit(runtime, reach) or (known is None and not _trial_fits(runtime, reach))
    short = known is None and room <= STEPS + 1  # not even the first text that is longer could gain by a trial
    if _any_process(near or short, call.synced_gpus, target.device):
        runtime.trees = False
        if call.statistics is not None:
            call.statistics.draft_kind = "chain"
            call.statistics.reason = why_drafts_end(target, max(positions.roots) + PROBE_DEPTH) or (
                "nothing is drafted so close to the last position that the target has or reads alike"
                if near
                else "nothing is drafted in so short a call before it is known what the target can do"
            )
        return replace(options, depth=0)
    if _any_process(known is None, call.synced_gpus, target.device):
        if _tries_with_own_steps(call):
            known, call.presumed = presumed_ability(runtime), True
        else:
            chains = bool(in_step)
            known = tried_ability(runtime, texts.batch(), output.logits[:, -1], doubling=doubling, chains=chains)
    assert known is not None
    ability, call.known_until = known, known.until
    if in_step:
        ability = replace(ability, trees=False, reason=in_step if ability.chains else ability.reason)
    if not ability.chains:
        raise _cannot(target, ability)
    if call.synced_gpus and runtime.recurrent:
        raise ValueError(
            f"{type(target).__name__} cannot be drafted for with synced_gpus=True: its recurrent layers are read again "
            "after rejections, and processes would run different numbers of forwards."
        )
    runtime.trees = ability.trees
    if ability.trees:
        runtime.prepare_trees()
    else:
        _warn_of_chains(target, ability)
        options = options.as_chain()
    runtime.make_room(options.shared_by(rows).tree_size + 1)
    if call.statistics is not None:
        call.statistics.draft_kind = "tree" if ability.trees and options.beam_width > 1 else "chain"
        end = why_drafts_end(target, furthest + room)
        call.statistics.reason = "; ".join(filter(None, (ability.reason, end)))
    return options


def _tries_with_own_steps(call: _Call) -> bool:
    """Whether a trial is made with tokens of the call, which are read one by one for it.

    In a batch rows end and leave. Processes have to try in the same round. Steps over a static cache are compiled.
    """
    return len(call.texts.rows) == 1 and not call.synced_gpus and call.runtime.slots is None


def _cannot(target: Any, ability: Ability) -> ValueError:
    return ValueError(f"{type(target).__name__} cannot be drafted for: {ability.reason}.")


def _warn_of_chains(target: Any, ability: Ability) -> None:
    logger.warning_once(f"{type(target).__name__} is drafted for with chains instead of trees: {ability.reason}.")


def _drafts_fit(runtime: TargetRuntime, reach: int) -> bool:
    """Whether drafts as deep as a trial's may follow all texts, whose positions allow a depth of `reach`."""
    return min(reach, runtime.deepest) >= PROBE_DEPTH


def _trial_fits(runtime: TargetRuntime, reach: int) -> bool:
    """The same, and all slots that a trial takes are read alike."""
    return _drafts_fit(runtime, reach) and slots_read_alike(runtime.target, runtime.length) > PROBE_COLUMNS


def _any_process(flag: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Whether it is so in any process, where all of them have to run the same forwards."""
    if not (synced_gpus and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return flag
    shared = torch.tensor(float(flag), device=device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return bool(shared)


def _read_prompts(
    generator: HSCandidateGenerator,
    texts: DecodedTexts,
    output: TargetOutput,
    positions: _Positions,
    attended: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
) -> None:
    """Hands the prompts' taps to the drafter, each with the token that follows."""
    count = output.taps.shape[1]
    for row, text in enumerate(texts.rows):
        known = text.ids[0, :-1]
        if attended is not None and len(known) == attended.shape[1]:  # what is padding is known
            known = known[attended[row].to(known.device)]
        generator.remember([*known[-_MOST_REMEMBERED:].tolist(), texts.last_token(row)], row)
        real = positions.real[row].nonzero().flatten()
        taps, places = output.taps[row, real.to(output.taps.device)], positions.prompt[row, real]
        embeds = None
        if inputs_embeds is not None and text.ids.shape[1] <= count:
            first = generator.weights.embed(text.ids[0, -1:])
            after = inputs_embeds[row, inputs_embeds.shape[1] - count + 1 :].to(first.device, first.dtype)
            embeds = torch.cat([after, first])[real.to(first.device)]
            generator.read(taps, text.ids[0, -1:], places, row, embeds)
            continue
        generator.read(taps, text.ids[0, -count:][real.to(text.ids.device)], places, row)


def _read_path(
    generator: HSCandidateGenerator,
    texts: DecodedTexts,
    taps: torch.Tensor,
    positions: _Positions,
    row: int,
    verdict: Verdict,
) -> None:
    """Hands the taps of a root and its accepted path to the drafter, of those of its tree `[nodes, taps * D]`."""
    emitted = len(verdict.path) + 1
    nodes = on_device([0, *verdict.path], taps.device)
    places = torch.arange(positions.roots[row], positions.roots[row] + emitted)
    tokens = texts.rows[row].emitted
    generator.read(taps[nodes], torch.tensor(tokens), places, row)
    generator.remember(tokens, row)
    positions.roots[row] += emitted


class _Recorder:
    """Collects attentions and hidden states of each emitted token, where they are asked for."""

    def __init__(self, runtime: TargetRuntime, config: Any) -> None:
        wanted = config.return_dict_in_generate
        self._runtime = runtime
        self._states = bool(wanted and config.output_hidden_states)
        self._attentions = bool(wanted and config.output_attentions)

    def prompt(self, row: int) -> list[StepOutputs]:
        return [self._runtime.prompt_outputs(row, self._states, self._attentions)] if self.records else []

    def path(self, row: int, path: list[int]) -> list[StepOutputs]:
        if not self.records:
            return []
        nodes = [0, *path]
        return [
            self._runtime.node_outputs(row, nodes[: index + 1], self._states, self._attentions)
            for index in range(len(nodes))
        ]

    @property
    def records(self) -> bool:
        return self._states or self._attentions
