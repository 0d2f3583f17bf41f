"""Calculates the best hierarchy of drafters ("Hierarchical speculative decoding", 2510.19705).

Given the costs of forwards and drafts and the acceptance between each pair of levels, it tries all hierarchies and all
numbers of tokens, so it needs no shortest path. Rounds are assumed to be independent.

- tokens a round: what the target emits in one round, the bonus token included.
- speed-up: tokens a round, times the seconds of a plain step, divided by the seconds of a round.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

DEEPEST = 16  # tokens, of the longest drafts tried
TARGET = "target"
_DRAFTED = (1, 2, 3, 4, 5, 6, 8, 10, 12, DEEPEST)  # numbers of tokens tried for a first level
_HELD = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)  # numbers of tokens tried for a middle level
_NEGLIGIBLE = 1e-9  # a probability
Seconds = Callable[[float], float]  # of a forward or draft, by number of tokens


@dataclass(frozen=True)
class Curve:
    """Seconds by number of tokens: linear between and beyond `points`, which ascend; a single point is a constant."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, count: float) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        inner = [place for place, (number, _) in enumerate(self.points) if number <= count]
        low = min(inner[-1] if inner else 0, len(self.points) - 2)
        (begin, first), (end, last) = self.points[low : low + 2]
        return max(first + (last - first) * (count - begin) / (end - begin), 0.0)


@dataclass(frozen=True)
class Acceptance:
    """How far one model accepts the drafts of a level; one entry: each token, given that those before it are."""

    reached: tuple[float, ...]  # at j - 1: share of drafts of at least j tokens whose first j are all accepted

    def at_least(self, count: int) -> float:
        """Returns the share for j = `count`. It never rises, and beyond what is known it decays as it did so far."""
        known = self.reached[:count]
        return min(known, default=1.0) ** (count / max(len(known), 1))

    def expected(self, length: int) -> float:
        """Returns the mean number of accepted tokens of a draft of `length` tokens."""
        return sum(self.at_least(count) for count in range(1, length + 1))


@dataclass(frozen=True)
class Drafting:
    """A drafter as a first level: seconds of a draft, and the probability of each length of its longest drafts."""

    seconds: Seconds
    lengths: Mapping[int, float] = field(default_factory=lambda: {DEEPEST: 1.0})

    @property
    def counts(self) -> list[int]:
        most = max(*self.lengths, 1)
        return sorted({min(count, most) for count in _DRAFTED})


@dataclass(frozen=True)
class Levels:
    """Costs and acceptances that plans are calculated from, by names of drafters and models."""

    first: dict[str, Drafting]
    forwards: Mapping[str, Seconds]  # of the target and each possible middle model
    acceptances: dict[tuple[str, str], Acceptance]  # of a drafter by the model that verifies it
    rest: float = 0.0  # seconds of a round of the target besides forward and draft
    plain: float | None = None  # seconds of a plain step; None: those of a forward

    @property
    def step(self) -> float:
        return self.forwards[TARGET](1) if self.plain is None else self.plain

    @property
    def middles(self) -> list[str]:
        quick = [name for name, forward in self.forwards.items() if name != TARGET and forward(1) < self.step]
        return sorted(quick, key=lambda name: self.forwards[name](1))


@dataclass(frozen=True)
class Handed:
    """What a level passes up: the probability of each number of tokens, and the mean seconds it takes."""

    lengths: Mapping[int, float]
    seconds: float
    words: str

    def verifying(self, forward: Seconds) -> float:
        return sum(share * forward(length + 1) for length, share in self.lengths.items())


@dataclass(frozen=True)
class Plan:
    """A hierarchy and its expected speed over plain decoding; `lines` is the arithmetic."""

    names: tuple[str, ...]  # of the levels below the target, fastest first
    tokens: tuple[int, ...]  # that each passes up
    emitted: float
    seconds: float
    speed_up: float
    lines: tuple[str, ...]

    @property
    def title(self) -> str:
        return " > ".join(f"{name} ({count})" for name, count in zip(self.names, self.tokens, strict=True))


def _drafted(name: str, drafting: Drafting, tokens: int) -> Handed:
    cut: dict[int, float] = defaultdict(float)
    for length, share in drafting.lengths.items():
        cut[min(length, tokens)] += share
    seconds = drafting.seconds(tokens)
    return Handed(cut, seconds, f"{name} drafts {_mean(cut):.2f} tokens in {_ms(seconds)}")


def _verified(lower: Handed, acceptance: Acceptance, forward: Seconds, name: str, tokens: int) -> Handed:
    """Returns what a middle model passes up once it holds at least `tokens` tokens of the level below.

    A round adds 1 + j tokens with the probability that exactly j tokens are accepted. The distribution of held
    tokens is followed from round to round. `acceptance` and `forward` are the model's.
    """
    gains: dict[int, float] = defaultdict(float)
    for length, share in lower.lengths.items():
        for count in range(length + 1):
            beyond = acceptance.at_least(count + 1) if count < length else 0.0
            gains[1 + count] += share * (acceptance.at_least(count) - beyond)
    going, rounds = {0: 1.0}, 0.0
    done: dict[int, float] = defaultdict(float)
    while going:
        rounds += sum(going.values())
        following: dict[int, float] = defaultdict(float)
        for (held, share), (gain, chance) in itertools.product(going.items(), gains.items()):
            (done if held + gain >= tokens else following)[held + gain] += share * chance
        going = {held: share for held, share in following.items() if share > _NEGLIGIBLE}
    verifying = lower.verifying(forward)
    seconds = rounds * (lower.seconds + verifying)
    words = (
        f"{lower.words}; {name} verifies it in {_ms(verifying)} and adds {_mean(gains):.2f} tokens; after "
        f"{rounds:.2f} such rounds it holds {_mean(done):.2f} tokens: {rounds:.2f} x ({_ms(lower.seconds)} + "
        f"{_ms(verifying)}) = {_ms(seconds)}"
    )
    return Handed(done, seconds, words)


def decoding(levels: Levels, names: Sequence[str], tokens: Sequence[int]) -> Plan:
    """Returns the expected speed of a hierarchy, given its levels below the target, fastest first, and their tokens."""
    handed = _drafted(names[0], levels.first[names[0]], tokens[0])
    for (lower, name), count in zip(itertools.pairwise(names), tokens[1:], strict=True):
        handed = _verified(handed, levels.acceptances[lower, name], levels.forwards[name], name, count)
    acceptance = levels.acceptances[names[-1], TARGET]
    emitted = 1.0 + sum(share * acceptance.expected(length) for length, share in handed.lengths.items())
    verifying = handed.verifying(levels.forwards[TARGET])
    seconds = handed.seconds + verifying + levels.rest
    speed_up = emitted * levels.step / seconds
    lines = (
        handed.words,
        f"{TARGET} verifies it in {_ms(verifying)}, and emits {emitted:.3f} tokens a round",
        f"a round: {_ms(handed.seconds)} + {_ms(verifying)} + {_ms(levels.rest)} for the rest = {_ms(seconds)}",
        f"speed-up: {emitted:.3f} x {_ms(levels.step)} / {_ms(seconds)} = {speed_up:.3f}",
    )
    return Plan(tuple(names), tuple(tokens), emitted, seconds, speed_up, lines)


def cascades(levels: Levels) -> Iterator[Plan]:
    """Yields every hierarchy with one or two middle models, with every number of tokens tried."""
    for count in (1, 2):
        for middles in itertools.combinations(levels.middles, count):
            for first in levels.first:
                names = (first, *middles)
                pairs = itertools.pairwise((*names, TARGET))
                if first in middles or not all(pair in levels.acceptances for pair in pairs):
                    continue
                for tokens in itertools.product(levels.first[first].counts, *[_HELD] * count):
                    if all(low <= high for low, high in itertools.pairwise(tokens[1:])):
                        yield decoding(levels, names, tokens)


def best_cascade(levels: Levels) -> Plan | None:
    return max(cascades(levels), key=lambda plan: plan.speed_up, default=None)


def best_single(levels: Levels, name: str) -> Plan:
    """Returns the best plan of one drafter alone, of chains."""
    plans = [decoding(levels, (name,), (count,)) for count in levels.first[name].counts]
    return max(plans, key=lambda plan: plan.speed_up)


def _mean(lengths: Mapping[int, float]) -> float:
    return sum(length * share for length, share in lengths.items())


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"
