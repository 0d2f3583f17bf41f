"""Measures the costs and acceptances that a hierarchy is planned from.

Everything is measured on this machine, on a few prompts, greedily, one text at a time, with the target's weights
unpacked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch

from ...bench.calls import ArrivalStreamer
from ...bench.machine import synchronise, timed
from ...bench.prompts import Inputs
from ...core.refusals import DraftingRefused
from ...drafters.base.protocol import Drafter, WrappedDrafter
from ...drafters.language_model.lm_drafter import CausalLMDrafter
from ...engine.loop import Observer, Round
from .hierarchy import Acceptance, Curve, Drafting, Levels
from .levels import model_of, reader_of
from .supposing import supposes

DEEPEST = 10  # longest chain measured
_COUNTS = (1, 2, 3, 5, 9, 13, 21)  # tokens of the forwards that are timed
_SPAN = 12  # tokens that a middle model continues a target's text; further on it would diverge
_PAIRS = 24  # places in the target's texts to continue from
_TIMED = 2  # prompts that time the shortest drafts
TARGET = "target"
Pair = tuple[str, str]  # names of a drafter and of the model that verifies it


def misfits(drafters: Mapping[str, Drafter], models: Mapping[str, Any], tokenizer: Any = None) -> dict[Pair, str]:
    """Returns why each pair does not fit, or "". A drafter must fit the target or a middle model, not both.

    `models` holds the target, and middle models by the names of their drafters. Raises a DraftingRefused if a drafter
    fits no model here, or its tokens differ.
    """
    found: dict[Pair, str] = {}
    for name, drafter in drafters.items():
        reasons = {upper: _misfit(drafter, model, upper) for upper, model in models.items() if upper != name}
        found |= {(name, upper): reason for upper, reason in reasons.items()}
        above = [upper for upper, reason in reasons.items() if not reason]
        if not above:
            told = "; ".join(f"{upper}: {reason}" for upper, reason in reasons.items())
            raise DraftingRefused(f"{name} fits no model here. {told}")
        drafter.warn_of_misfit(models[TARGET if TARGET in above else above[0]], tokenizer, all_processes=False)
    return found


def _misfit(drafter: Drafter, model: Any, name: str) -> str:
    if name != TARGET and not supposes(drafter):
        return f"a {type(drafter).__name__} cannot take back what a middle model told it"
    try:
        drafter.check(model)
    except ValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Note:
    """A draft and its outcome."""

    asked: int  # depth
    nodes: int
    accepted: int  # tokens
    seconds: float
    first: bool = False  # of its call, so that it has read the prompt too


def measured_drafter(drafter: Drafter, depth: int | None) -> WrappedDrafter:
    """Returns a drafter of chains of `depth`, or of trees of the default sizes if None, without n-grams in front."""
    wrapped = WrappedDrafter(drafter)
    wrapped.least_ngram_length = drafter.least_ngram_length
    options = wrapped.generation_config
    options.ngram_length, options.packed_weights = drafter.least_ngram_length, False
    if depth is not None:
        options.num_assistant_tokens = min(depth, drafter.num_draft_steps)
        options.tree_size, options.beam_width = options.num_assistant_tokens, 1
    return wrapped


class Notes(Observer):
    """Notes the drafts of calls with one text. It is passed as the streamer."""

    def __init__(self, device: torch.device) -> None:
        self.drafts: list[Note] = []
        self._device, self._first, self._since, self._seconds = device, True, 0.0, 0.0

    def began(self) -> None:
        synchronise(self._device)
        self._since = time.perf_counter()

    def drafted(self) -> None:
        synchronise(self._device)
        self._seconds = time.perf_counter() - self._since

    def ended(self, done: Round) -> None:
        if done.asks[0].depth > 0:
            self.drafts.append(Note(done.asks[0].depth, done.nodes[0], done.accepted[0], self._seconds, self._first))
            self._first = False

    def put(self, tokens: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        self._first = True


def acceptance_of(notes: Sequence[Note]) -> Acceptance:
    """Returns how far chains were accepted. A chain counts for j tokens if it has at least j."""
    reached = []
    for count in range(1, DEEPEST + 1):
        drafted = [note for note in notes if note.nodes >= count]
        if not drafted:
            break
        reached.append(sum(note.accepted >= count for note in drafted) / len(drafted))
    return Acceptance(tuple(reached) or (0.0,))


def lengths_of(notes: Sequence[Note], depth: int) -> dict[int, float]:
    """Returns the distribution of chain lengths where at least `depth` tokens were asked for."""
    counts = Counter(note.nodes for note in notes if note.asked >= depth)
    return {length: count / counts.total() for length, count in sorted(counts.items())}


def seconds_of(notes: Sequence[Note], depth: int) -> float:
    """Returns the median seconds of drafts of depth `depth`, first ones excluded; 0 if there are none."""
    return median([note.seconds for note in notes if note.asked == depth and not note.first] or [0.0])


def forward_curve(model: Any, ids: Sequence[int], repeats: int = 5) -> Curve:
    """Returns the seconds of a causal language model's forwards over a few tokens after a text.

    They are read as by a middle model. Raises a ValueError if the model cannot take tokens back.
    """
    drafter = CausalLMDrafter(model)
    drafter.check(model)
    reader = reader_of(drafter, 1, max(_COUNTS))
    seconds: dict[int, list[float]] = {count: [] for count in _COUNTS}
    for repeat in range(repeats + 1):
        for count in _COUNTS:
            new = [(7 * repeat + 3 * each) % reader.vocab_size for each in range(count)]
            _, spent = timed(model.device, reader.read, {0: [*ids, *new]}, {0: count})
            if repeat:  # the first ones warm up
                seconds[count].append(spent)
    return Curve(tuple((count, median(times)) for count, times in seconds.items()))


@dataclass
class Measuring:
    """The measurements for a plan; `tell` is called with a description of each step.

    `texts` holds the target's texts, prompts included.
    """

    target: Any
    drafters: Mapping[str, Drafter]
    inputs: Sequence[Inputs]
    max_new_tokens: int
    tell: Callable[[str], None] = lambda words: None
    tokenizer: Any = None
    texts: list[list[int]] = field(default_factory=list)

    def levels(self) -> Levels:
        """Measures everything; before that, a DraftingRefused if a drafter fits neither target nor middle model."""
        middles = {name: model_of(each) for name, each in self.drafters.items()}
        models = {name: model for name, model in middles.items() if model is not None} | {TARGET: self.target}
        why_not = misfits(self.drafters, models, self.tokenizer)
        self.tell("plain decoding")
        plain = self._plain()
        forwards = {}
        for name, model in models.items():
            self.tell(f"forwards of {name}")
            forwards[name] = forward_curve(model, self.texts[0])
        leave_out_slow(why_not, forwards, plain)
        pairs = [pair for pair, reason in why_not.items() if not reason]
        left_out = {pair: reason for pair, reason in why_not.items() if reason}
        levels = Levels({}, forwards, {}, TARGET, plain, left_out=left_out)
        rests = self._above_target(levels, [below for below, upper in pairs if upper == TARGET])
        for below, name in pairs:
            if name != TARGET:
                self.tell(f"drafts of {below} for {name}")
                self._note(levels, (below, name), self._spans(self.drafters[below], models[name]))
                if below not in levels.first:  # it does not fit the target, so the middle model's texts time it
                    notes, _ = self._decode(self.drafters[below], DEEPEST, model=models[name])
                    levels.first[below] = self._drafting(self.drafters[below], notes, models[name])
        return replace(levels, rest=max(median(rests or [0.0]), 0.0))

    def _above_target(self, levels: Levels, names: Sequence[str]) -> list[float]:
        """Measures drafters with the target; returns the mean seconds of the rest of a round for each."""
        rests = []
        for name in names:
            drafter = self.drafters[name]
            self.tell(f"drafts of {name} for {TARGET}")
            notes, rest = self._decode(drafter, DEEPEST)
            if notes:
                rests.append(rest - fmean(levels.forwards[TARGET](note.nodes + 1) for note in notes))
            self._note(levels, (name, TARGET), notes)
            levels.first[name] = self._drafting(drafter, notes)
            if drafter.generation_config.beam_width > 1:
                of_trees, _ = self._decode(drafter, None)
                levels.trees[name] = _tree(of_trees)
                levels.rounds[f"trees of {name}"] = len(of_trees)
        return rests

    @staticmethod
    def _note(levels: Levels, pair: tuple[str, str], notes: Sequence[Note]) -> None:
        levels.acceptances[pair] = acceptance_of(notes)
        levels.rounds[f"{pair[0]} for {pair[1]}"] = len(notes)

    def _plain(self) -> float:
        """Decodes all prompts without a drafter; returns the seconds of a step."""
        seconds, steps = 0.0, 0
        for index, each in enumerate([self.inputs[0], *self.inputs]):
            streamer = ArrivalStreamer()
            output = self.target.generate(**each, **self._greedy, streamer=streamer)
            synchronise(self.target.device)
            end = time.perf_counter()
            if index and streamer.first is not None:  # the first one warms up
                seconds, steps = seconds + end - streamer.first, steps + len(streamer.sizes) - 1
                self.texts.append(output.sequences[0].tolist())
        return seconds / max(steps, 1)

    @property
    def _greedy(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}

    def _decode(
        self, drafter: Drafter, depth: int | None, prompts: int | None = None, model: Any = None
    ) -> tuple[list[Note], float]:
        """Decodes prompts with a drafter; returns its drafts and the mean seconds of a round without its draft.

        `model` decodes, or the target if it is None.
        """
        model = model or self.target
        call = {**self._greedy, "assistant_model": measured_drafter(drafter, depth), "streamer": Notes(model.device)}
        seconds, rounds = 0.0, 0
        for each in self.inputs[:prompts]:
            done = model.generate(**{name: value.to(model.device) for name, value in each.items()}, **call).statistics
            seconds += done.total_seconds - done.prefill_seconds - done.draft_seconds
            rounds += done.rounds
        return call["streamer"].drafts, seconds / max(rounds, 1)

    def _drafting(self, drafter: Drafter, notes: Sequence[Note], model: Any = None) -> Drafting:
        depth = min(DEEPEST, drafter.num_draft_steps)
        short, _ = self._decode(drafter, 1, _TIMED, model)
        points = ((1, seconds_of(short, 1)), (depth, seconds_of(notes, depth)))
        lengths = lengths_of(notes, depth)
        asked = lengths.get(depth, 0.0) > 0.99  # it drafts as many tokens as asked
        curve = Curve(points if depth > 1 else points[:1])
        return Drafting(curve, {} if asked else lengths, drafter.num_draft_steps)

    def _spans(self, drafter: Drafter, model: Any) -> list[Note]:
        """What a middle model accepts when it continues by itself from places in the target's texts."""
        places = [
            (text, length)
            for text, each in zip(self.texts, self.inputs, strict=True)
            for length in range(each["input_ids"].shape[1], len(text), _SPAN)
        ]
        step = max(len(places) // _PAIRS, 1)
        notes, drafts = Notes(model.device), measured_drafter(drafter, DEEPEST)
        call = {**self._greedy, "max_new_tokens": _SPAN, "pad_token_id": 0, "eos_token_id": None, "streamer": notes}
        for text, length in places[::step]:
            ids = torch.tensor([text[:length]], device=model.device)
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **call, assistant_model=drafts)
        return notes.drafts


def leave_out_slow(why_not: dict[Pair, str], forwards: Mapping[str, Curve], plain: float) -> None:
    """Says why of pairs in which the middle model would save nothing."""
    for (below, name), reason in why_not.items():
        if reason or name == TARGET:
            continue
        if forwards[name](1) >= plain:
            why_not[below, name] = f"a forward of {name} takes as long as a plain step of the target"
        elif below in forwards and forwards[below](1) >= forwards[name](1):
            why_not[below, name] = f"a forward of {below} takes as long as one of {name}"


def _tree(notes: Sequence[Note]) -> tuple[float, float, float]:
    """Tokens a round, nodes, and seconds of a draft, for a drafter of trees."""
    if not notes:
        return 1.0, 0.0, 0.0
    seconds = median([note.seconds for note in notes if not note.first] or [0.0])
    return 1 + fmean(n.accepted for n in notes), fmean(n.nodes for n in notes), seconds
