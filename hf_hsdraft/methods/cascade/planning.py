"""Measures the costs and acceptances that a hierarchy is planned from, and each drafter alone.

Everything is measured on this machine, on a few prompts, greedily, one text at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

from ...bench.calls import Inputs, Settings, synchronise, time_call, timed
from ...bench.systems import PLAIN, System, Variant, drafted_system
from ...core.refusals import DraftingRefused
from ...drafters.base.protocol import Drafter, WrappedDrafter
from ...engine.loop import Observer, Round
from ..language_model.lm_drafter import CausalLMDrafter
from .cascade_drafter import CascadeDrafter
from .hierarchy import DEEPEST, TARGET, Acceptance, Curve, Drafting, Levels, Plan
from .levels import LMReader, model_of
from .supposing import supposes

_COUNTS = (1, 2, 3, 5, 9, 13, 21)  # tokens of the forwards that are timed
_SPAN = 24  # tokens by which a model continues one of the target's texts; further on a middle model would diverge
_PLACES = 24  # places in the target's texts to continue from
_FEW = 20  # drafts below which a figure is rough
_ROUGH = ", so few that figures from these are rough: more prompts (--limit) or tokens (--max-new-tokens) help"
Pair = tuple[str, str]  # names of a drafter and of the model that verifies it
Place = tuple[list[int], int]  # a text, and by how many tokens the target continued it


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


def measured_drafter(drafter: Drafter) -> WrappedDrafter:
    """Returns a drafter of the longest chains, without n-grams in front and without packed weights."""
    wrapped = WrappedDrafter(drafter)
    wrapped.least_ngram_length = drafter.least_ngram_length
    options = wrapped.generation_config
    options.ngram_length, options.packed_weights = drafter.least_ngram_length, False
    options.num_assistant_tokens = options.tree_size = min(DEEPEST, drafter.num_draft_steps)
    options.beam_width = 1
    return wrapped


def acceptance_of(notes: Sequence[Note]) -> Acceptance:
    """Returns how far chains were accepted. A chain counts for j tokens if it has at least j."""
    longest = max(note.nodes for note in notes)
    drafted = [[note for note in notes if note.nodes >= count] for count in range(1, longest + 1)]
    shares = [fmean(note.accepted >= count for note in some) for count, some in enumerate(drafted, 1)]
    return Acceptance(tuple(shares) or (0.0,))


def drafting_of(notes: Sequence[Note]) -> Drafting:
    """Returns median seconds by depth, first drafts of a call excluded, and the lengths of the longest drafts."""
    deepest = max(note.asked for note in notes)
    counts = Counter(note.nodes for note in notes if note.asked == deepest)
    later = [note for note in notes if not note.first] or notes
    depths = sorted({note.asked for note in later})
    points = tuple((depth, median(note.seconds for note in later if note.asked == depth)) for depth in depths)
    return Drafting(Curve(points), {length: count / counts.total() for length, count in counts.items()})


def forward_curve(model: Any, ids: Sequence[int], repeats: int = 5) -> Curve:
    """Returns the seconds of a model's forwards over a few tokens; a ValueError if it cannot take tokens back."""
    CausalLMDrafter(model).check(model)
    reader = LMReader(model, 1, max(_COUNTS))
    seconds: dict[int, list[float]] = {count: [] for count in _COUNTS}
    for repeat in range(repeats + 1):
        for count in _COUNTS:
            new = [(7 * repeat + 3 * each) % reader.vocab_size for each in range(count)]
            _, spent = timed(model.device, reader.read, {0: [*ids, *new]}, {0: count})
            if repeat:  # the first ones warm up
                seconds[count].append(spent)
    return Curve(tuple((count, median(times)) for count, times in seconds.items()))


def plain_texts(target: Any, inputs: Sequence[Inputs], max_new_tokens: int) -> tuple[float, list[Place]]:
    """Decodes all prompts plainly; returns a step's seconds and places in the texts; a ValueError if all are short."""
    calls = [time_call(target, each, System(PLAIN), Settings(max_new_tokens)) for each in [inputs[0], *inputs]][1:]
    steps = sum(run.tokens - run.first_tokens for _, run in calls)
    places = []
    for each, (rows, _) in zip(inputs, calls, strict=True):
        text = [*each["input_ids"][0].tolist(), *rows[0]]
        starts = range(len(text) - len(rows[0]), len(text) - 2, _SPAN)  # the last token is never drafted
        places += [(text[:start], min(_SPAN, len(text) - start)) for start in starts]
    if not places:
        raise ValueError("the target's texts end at once: expected prompts with answers of three tokens or more")
    return sum(run.seconds - (run.first_seconds or 0.0) for _, run in calls) / steps, places


def drafts_in(places: Sequence[Place], drafter: Drafter, model: Any) -> tuple[list[Note], float]:
    """Lets a model continue from places; returns a drafter's drafts, and the mean seconds of a round without draft."""
    notes, seconds, rounds = Notes(model.device), 0.0, 0
    call: dict[str, Any] = {"assistant_model": measured_drafter(drafter), "streamer": notes}
    call |= {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0, "eos_token_id": None}
    for text, length in places[:: max(len(places) // _PLACES, 1)]:
        ids = torch.tensor([text], device=model.device)
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **call)
        done = output.statistics
        seconds += done.total_seconds - done.prefill_seconds - done.draft_seconds
        rounds += done.rounds
    return notes.drafts, seconds / max(rounds, 1)


def measured_levels(
    target: Any,
    drafters: Mapping[str, Drafter],
    inputs: Sequence[Inputs],
    max_new_tokens: int,
    tokenizer: Any = None,
    tell: Callable[[str], None] = lambda words: None,
) -> tuple[Levels, list[str]]:
    """Measures everything; returns it with lines on pairs left out and drafts measured.

    `tell` is called with a description of each step. Before any work, a DraftingRefused if a drafter fits neither the
    target nor a middle model.
    """
    middles = {name: model_of(each) for name, each in drafters.items()}
    models = {name: model for name, model in middles.items() if model is not None} | {TARGET: target}
    why_not = misfits(drafters, models, tokenizer)
    tell("plain decoding")
    plain, places = plain_texts(target, inputs, max_new_tokens)
    forwards = {}
    for name, model in models.items():
        tell(f"forwards of {name}")
        forwards[name] = forward_curve(model, places[-1][0])
    levels, rests, lines = Levels({}, forwards, {}, plain=plain), list[float](), []
    for (below, upper), misfit in why_not.items():
        slow = f"a forward of {upper} takes as long as a plain step of the target"
        reason = misfit or ("" if upper in (*levels.middles, TARGET) else slow)
        if reason:
            lines.append(f"left out: {below} for {upper}: {reason.split('. ')[0]}")
        if reason or (upper == TARGET and below not in levels.middles):
            continue
        tell(f"drafts of {below} for {upper}")
        notes, rest = drafts_in(places, drafters[below], models[upper])
        lines.append(f"drafts of {below} for {upper}: {len(notes)}{_ROUGH if len(notes) < _FEW else ''}")
        levels.acceptances[below, upper] = acceptance_of(notes)
        levels.first.setdefault(below, drafting_of(notes))
        if upper == TARGET:
            rests.append(rest - fmean(forwards[TARGET](note.nodes + 1) for note in notes))
    return replace(levels, rest=max(median(rests or [0.0]), 0.0)), lines


def arithmetic(levels: Levels, cascade: Plan | None) -> list[str]:
    """Returns lines on all costs and acceptances, and on the best hierarchy."""
    lines = [f"a plain step: {1000 * levels.step:.4g} ms"]
    curves = {f"forward of {name}": forward for name, forward in levels.forwards.items()}
    curves |= {f"draft of {name}": drafting.seconds for name, drafting in levels.first.items()}
    for what, curve in curves.items():
        if isinstance(curve, Curve):
            points = ", ".join(f"{count}: {1000 * seconds:.4g}" for count, seconds in curve.points)
            lines.append(f"{what}, ms by tokens: {points}")
    for (lower, upper), acceptance in levels.acceptances.items():
        shares = ", ".join(f"{share:.2f}" for share in acceptance.reached)
        lines.append(f"{upper} accepts at least 1, 2, ... tokens of {lower} in shares of: {shares}")
    if cascade is None:
        return [*lines, "no hierarchy: no model here is quicker than the target and can verify another drafter"]
    return [*lines, "", f"{cascade.title}:", *(f"  {line}" for line in cascade.lines)]


def saved_title(plan: Plan) -> str:
    return f"{plan.title}, as saved"


def cascade_of(plan: Plan, drafters: Mapping[str, Drafter]) -> CascadeDrafter:
    """Returns the drafter of a plan with its default options: it drafts what pays, up to the plan."""
    return CascadeDrafter([drafters[name] for name in plan.names], plan.tokens).eval()


def systems_of(drafters: Mapping[str, Drafter], target: Any, cascade: Plan | None = None) -> list[System]:
    """Returns each drafter alone, as by default, and a hierarchy: exactly as calculated, and as it is saved."""
    fitting = {name: each for name, each in drafters.items() if not _misfit(each, target, TARGET)}
    found = [drafted_system(Variant(f"{name}, own defaults", "default"), each) for name, each in fitting.items()]
    if cascade is not None:
        made, fixed = cascade_of(cascade, drafters), {"packed_weights": False, "tree_sizing": "fixed"}
        found += [
            System(title, {"assistant_model": made}, made, options, ours=True)
            for title, options in ((cascade.title, fixed), (saved_title(cascade), {}))
        ]
    return found


def recommended(speed_ups: Mapping[str, float], cascade: Plan | None) -> str:
    """Returns the name of the fastest system, as measured; a hierarchy's missing speed-up is as calculated."""
    expected = {} if cascade is None else {saved_title(cascade): cascade.speed_up}
    known = {**expected, **speed_ups}
    return max((name for name in known if cascade is None or name != cascade.title), key=known.__getitem__)
