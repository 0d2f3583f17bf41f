"""Measures what a plan of a hierarchy is calculated from: forwards, drafts, and how far drafts are accepted.

Everything is measured on the machine, on a few prompts, greedily, one text at a time. The target's weights are not
packed meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch

from ..drafters.causal_lm.lm_drafter import CausalLMDrafter
from ..drafters.protocol import Accepted, Ask, DraftCall, Drafter, Session
from ..trees.draft_tree import DraftTree
from .calls import ArrivalStreamer
from .hierarchy import Acceptance, Curve, Drafting, Levels
from .machine import synchronise
from .run import Inputs
from .wrapped_drafter import WrappedDrafter

DEEPEST = 10  # greatest number of tokens of a chain that is measured
_COUNTS = (1, 2, 3, 5, 9, 13, 21)  # tokens of the forwards that are timed
_SPAN = 12  # tokens that a middle model goes on by itself from the target's text: further on it would leave it
_PAIRS = 24  # places of the target's texts that it goes on from
_TIMED = 2  # prompts by which the shortest drafts are timed
TARGET = "target"


@dataclass(frozen=True)
class Note:
    """A draft and what became of it.

    Attributes:
        asked: greatest depth that was asked for.
        nodes: number of nodes.
        accepted: number of drafted tokens that were accepted.
        seconds: of the draft.
        first: whether it was the first one of its call, which reads the prompt too.
    """

    asked: int
    nodes: int
    accepted: int
    seconds: float
    first: bool = False


class NotedDrafter(WrappedDrafter):
    """A drafter whose drafts are timed and counted.

    Args:
        drafter: the drafter.
        depth: of the chains that it drafts; `None` for trees of its own sizes.

    Attributes:
        notes: of all drafts.
    """

    def __init__(self, drafter: Drafter, depth: int | None) -> None:
        super().__init__(drafter)
        self.least_ngram_length = drafter.least_ngram_length
        self.notes: list[Note] = []
        options = self.generation_config
        options.ngram_length, options.packed_weights = drafter.least_ngram_length, False
        if depth is not None:
            options.num_assistant_tokens = min(depth, drafter.num_draft_steps)
            options.tree_size, options.beam_width = options.num_assistant_tokens, 1

    def session(self, call: DraftCall) -> Session:
        return _NotedSession(super().session(call), self.notes, call.target.device)


class _NotedSession(Session):
    def __init__(self, session: Session, notes: list[Note], device: torch.device) -> None:
        self.free, self.takes_ngrams, self.kind = session.free, session.takes_ngrams, session.kind
        self._session, self._notes, self._device = session, notes, device
        self._first = True
        self._last: tuple[int, int, float] | None = None

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        synchronise(self._device)
        begin = time.perf_counter()
        trees = self._session.draft(asks)
        synchronise(self._device)
        self._last = asks[0].depth, len(trees[0]) - 1, time.perf_counter() - begin
        return trees

    def observe(self, news: Sequence[Accepted]) -> None:
        if self._last is not None:
            asked, nodes, seconds = self._last
            self._notes.append(Note(asked, nodes, news[0].num_drafted, seconds, self._first))
            self._first, self._last = False, None
        self._session.observe(news)

    def end(self) -> None:
        self._session.end()


def acceptance_of(notes: Sequence[Note]) -> Acceptance:
    """Returns how far chains were accepted. A chain counts for j tokens if it has as many."""
    reached = []
    for count in range(1, DEEPEST + 1):
        drafted = [note for note in notes if note.nodes >= count]
        if not drafted:
            break
        reached.append(sum(note.accepted >= count for note in drafted) / len(drafted))
    return Acceptance(tuple(reached) or (0.0,))


def lengths_of(notes: Sequence[Note], depth: int) -> dict[int, float]:
    """Returns how long chains were where so many tokens were asked for."""
    counts = Counter(note.nodes for note in notes if note.asked >= depth)
    return {length: count / counts.total() for length, count in sorted(counts.items())}


def seconds_of(notes: Sequence[Note], depth: int) -> float:
    """Returns the median seconds of the drafts of which so many tokens were asked for; 0 for none."""
    return median([note.seconds for note in notes if note.asked == depth and not note.first] or [0.0])


def forward_curve(model: Any, ids: Sequence[int], repeats: int = 5) -> Curve:
    """Returns the seconds of a model's forwards over some tokens after a text, as a middle model reads them.

    Args:
        model: a causal language model.
        ids: tokens of the text.
        repeats: how often each number of tokens is timed.

    Raises:
        ValueError: the model cannot take tokens back.
    """
    drafter = CausalLMDrafter(model)
    drafter.check(model)
    reader = drafter.reader(1, max(_COUNTS))
    seconds: dict[int, list[float]] = {count: [] for count in _COUNTS}
    for repeat in range(repeats + 1):
        for count in _COUNTS:
            new = [(7 * repeat + 3 * each) % reader.vocab_size for each in range(count)]
            synchronise(model.device)
            begin = time.perf_counter()
            reader.read({0: [*ids, *new]}, {0: count})
            synchronise(model.device)
            if repeat:  # the first ones warm up
                seconds[count].append(time.perf_counter() - begin)
    return Curve(tuple((count, median(times)) for count, times in seconds.items()))


@dataclass
class Measuring:
    """The measurements for a plan.

    Args:
        target: the target.
        drafters: by name.
        inputs: of the prompts.
        max_new_tokens: of each text.
        tell: told of each step, in words.

    Attributes:
        texts: of the target, prompts included.
    """

    target: Any
    drafters: Mapping[str, Drafter]
    inputs: Sequence[Inputs]
    max_new_tokens: int
    tell: Callable[[str], None] = lambda words: None
    texts: list[list[int]] = field(default_factory=list)

    def levels(self) -> Levels:
        """Measures all."""
        self.tell("plain decoding")
        plain = self._plain()
        models = {
            name: each.verifying_model for name, each in self.drafters.items() if each.verifying_model is not None
        }
        forwards = {}
        for name, model in {**models, TARGET: self.target}.items():
            self.tell(f"forwards of {name}")
            forwards[name] = forward_curve(model, self.texts[0])
        first, acceptances, trees, rests = {}, {}, {}, []
        for name, drafter in self.drafters.items():
            self.tell(f"drafts of {name} for {TARGET}")
            notes, rest = self._decode(drafter, DEEPEST)
            rests.append(rest - fmean(forwards[TARGET](note.nodes + 1) for note in notes) if notes else 0.0)
            acceptances[name, TARGET] = acceptance_of(notes)
            first[name] = self._drafting(drafter, notes)
            if drafter.generation_config.beam_width > 1:
                of_trees, _ = self._decode(drafter, None)
                trees[name] = _tree(of_trees)
        for name, middle in models.items():
            for below, drafter in self.drafters.items():
                if below != name and drafter.supposes and self._stands_below(drafter, middle, below, name, forwards):
                    self.tell(f"drafts of {below} for {name}")
                    acceptances[below, name] = acceptance_of(self._spans(drafter, middle))
        return Levels(first, forwards, acceptances, TARGET, plain, max(median(rests), 0.0), trees)

    @staticmethod
    def _stands_below(drafter: Drafter, model: Any, below: str, name: str, forwards: Mapping[str, Curve]) -> bool:
        quicker = below not in forwards or forwards[below](1) < forwards[name](1)
        try:
            drafter.check(model)
        except ValueError:
            return False
        return quicker

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

    def _decode(self, drafter: Drafter, depth: int | None, prompts: int | None = None) -> tuple[list[Note], float]:
        """Decodes prompts with a drafter; returns its drafts, and the mean seconds of a round without its draft."""
        noted, seconds, rounds = NotedDrafter(drafter, depth), 0.0, 0
        for each in self.inputs[:prompts]:
            done = self.target.generate(**each, **self._greedy, assistant_model=noted).statistics
            seconds += done.total_seconds - done.prefill_seconds - done.draft_seconds
            rounds += done.rounds
        return noted.notes, seconds / max(rounds, 1)

    def _drafting(self, drafter: Drafter, notes: Sequence[Note]) -> Drafting:
        depth = min(DEEPEST, drafter.num_draft_steps)
        short, _ = self._decode(drafter, 1, _TIMED)
        points = ((1, seconds_of(short, 1)), (depth, seconds_of(notes, depth)))
        lengths = lengths_of(notes, depth)
        asked = lengths.get(depth, 0.0) > 0.99  # it drafts as many tokens as it is asked for
        curve = Curve(points if depth > 1 else points[:1])
        return Drafting(curve, {} if asked else lengths, drafter.num_draft_steps)

    def _spans(self, drafter: Drafter, model: Any) -> list[Note]:
        """What a middle model accepts where it goes on by itself from places in the target's texts."""
        places = [
            (text, length)
            for text, each in zip(self.texts, self.inputs, strict=True)
            for length in range(each["input_ids"].shape[1], len(text), _SPAN)
        ]
        step = max(len(places) // _PAIRS, 1)
        noted = NotedDrafter(drafter, DEEPEST)
        call = {**self._greedy, "max_new_tokens": _SPAN, "pad_token_id": 0, "eos_token_id": None}
        for text, length in places[::step]:
            ids = torch.tensor([text[:length]], device=model.device)
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **call, assistant_model=noted)
        return noted.notes


def _tree(notes: Sequence[Note]) -> tuple[float, float, float]:
    """Tokens a round, nodes, and seconds of a draft, of a drafter that drafts trees."""
    if not notes:
        return 1.0, 0.0, 0.0
    seconds = median([note.seconds for note in notes if not note.first] or [0.0])
    return 1 + fmean(n.accepted for n in notes), fmean(n.nodes for n in notes), seconds
