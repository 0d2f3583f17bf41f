"""Calculates the best hierarchy of drafters ("Hierarchical speculative decoding", 2510.19705).

Given the costs of forwards and drafts and the acceptance between each pair of levels, it tries all hierarchies and all
numbers of tokens, so it needs no shortest path. Rounds are assumed to be independent.

- tokens a round: what the target emits in one round, the bonus token included.
- speed-up: tokens a round, times the seconds of a plain step, divided by the seconds of a round.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_DRAFTED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # numbers of tokens tried for a first level
_HELD = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)  # numbers of tokens tried for a middle level
_NEGLIGIBLE = 1e-9  # a probability


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
    """How far one model accepts the drafts of a level."""

    reached: tuple[float, ...]  # at j - 1: share of drafts of at least j tokens whose first j are all accepted

    def at_least(self, count: int) -> float:
        """Returns the share for j = `count`, extrapolated with the decay of the last known part."""
        known = self.reached
        if count == 0:
            return 1.0
        if count <= len(known):
            return min(known[:count])
        half = (len(known) + 1) // 2
        before = known[half - 1] if half < len(known) else 1.0
        ratio = (min(known) / before) ** (1.0 / max(len(known) - half, 1)) if before else 0.0
        return min(known) * min(ratio, 1.0) ** (count - len(known))

    def expected(self, length: int) -> float:
        """Returns the mean number of accepted tokens of a draft of `length` tokens."""
        return sum(self.at_least(count) for count in range(1, length + 1))

    @classmethod
    def even(cls, share: float, length: int = 32) -> Acceptance:
        """Returns the acceptance where each token is right with probability `share`, given that those before it are."""
        return cls(tuple(share**count for count in range(1, length + 1)))


@dataclass(frozen=True)
class Handed:
    """What a level passes up: the probability of each number of tokens, and the mean seconds it takes."""

    lengths: Mapping[int, float]
    seconds: float
    words: str

    def verifying(self, forward: Curve) -> float:
        return sum(share * forward(length + 1) for length, share in self.lengths.items())


@dataclass(frozen=True)
class Drafting:
    """A drafter as a first level."""

    seconds: Curve
    lengths: Mapping[int, float] = field(default_factory=dict)  # probabilities; empty: always as long as asked
    most: int = _DRAFTED[-1]

    @property
    def counts(self) -> list[int]:
        return sorted({min(count, self.most) for count in _DRAFTED})

    def handed(self, name: str, tokens: int) -> Handed:
        cut: dict[int, float] = defaultdict(float)
        for length, share in (self.lengths or {tokens: 1.0}).items():
            cut[min(length, tokens)] += share
        seconds = self.seconds(tokens)
        return Handed(dict(cut), seconds, f"{name} drafts {_mean(cut):.2f} tokens in {_ms(seconds)}")


@dataclass(frozen=True)
class Levels:
    """Costs and acceptances that plans are calculated from, by names of drafters and models."""

    first: dict[str, Drafting]
    forwards: Mapping[str, Curve]  # of the target and each possible middle model
    acceptances: dict[tuple[str, str], Acceptance]  # of a drafter by the model that verifies it
    target: str
    plain: float  # seconds of a plain step
    rest: float = 0.0  # seconds of a round of the target besides forward and draft
    trees: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # tokens a round, nodes, draft seconds
    rounds: dict[str, int] = field(default_factory=dict)  # measured for each figure; empty where all is assumed
    left_out: Mapping[tuple[str, str], str] = field(default_factory=dict)  # pairs as above, with the reason

    @property
    def middles(self) -> list[str]:
        quick = [name for name, forward in self.forwards.items() if name != self.target and forward(1) < self.plain]
        return sorted(quick, key=lambda name: self.forwards[name](1))


@dataclass(frozen=True)
class Plan:
    """A hierarchy and its expected speed over plain decoding; `tokens` is empty for a tree, `lines` the arithmetic."""

    names: tuple[str, ...]
    tokens: tuple[int, ...]
    emitted: float
    seconds: float
    speed_up: float
    lines: tuple[str, ...]

    @property
    def title(self) -> str:
        if not self.names:
            return "plain decoding"
        if not self.tokens:
            return f"{self.names[0]}, trees"
        return " > ".join(f"{name} ({count})" for name, count in zip(self.names, self.tokens, strict=True))


def verified(lower: Handed, acceptance: Acceptance, forward: Curve, name: str, tokens: int) -> Handed:
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
    return Handed(dict(done), seconds, words)


def decoding(levels: Levels, names: Sequence[str], tokens: Sequence[int]) -> Plan:
    """Returns the expected speed of a hierarchy, given its levels below the target, fastest first, and their tokens."""
    handed = levels.first[names[0]].handed(names[0], tokens[0])
    for (lower, name), count in zip(itertools.pairwise(names), tokens[1:], strict=True):
        handed = verified(handed, levels.acceptances[lower, name], levels.forwards[name], name, count)
    acceptance, forward = levels.acceptances[names[-1], levels.target], levels.forwards[levels.target]
    emitted = 1.0 + sum(share * acceptance.expected(length) for length, share in handed.lengths.items())
    return _plan(levels, names, tokens, emitted, handed.seconds, handed.verifying(forward), handed.words)


def tree_drafting(levels: Levels, name: str) -> Plan:
    """Returns the expected speed of a single drafter that drafts trees."""
    emitted, nodes, seconds = levels.trees[name]
    words = f"{name} drafts trees of {nodes:.1f} nodes in {_ms(seconds)}"
    return _plan(levels, (name,), (), emitted, seconds, levels.forwards[levels.target](nodes + 1), words)


def _plan(
    levels: Levels,
    names: Sequence[str],
    tokens: Sequence[int],
    emitted: float,
    drafting: float,
    verifying: float,
    words: str,
) -> Plan:
    seconds = drafting + verifying + levels.rest
    speed_up = emitted * levels.plain / seconds
    lines = (
        words,
        f"{levels.target} verifies it in {_ms(verifying)}, and emits {emitted:.3f} tokens a round",
        f"a round: {_ms(drafting)} + {_ms(verifying)} + {_ms(levels.rest)} for the rest = {_ms(seconds)}",
        f"speed-up: {emitted:.3f} x {_ms(levels.plain)} / {_ms(seconds)} = {speed_up:.3f}",
    )
    return Plan(tuple(names), tuple(tokens), emitted, seconds, speed_up, lines)


def singles(levels: Levels) -> list[Plan]:
    """Returns the best plan of each drafter alone, fastest first."""
    best = []
    for name in (name for name in levels.first if (name, levels.target) in levels.acceptances):
        plans = [decoding(levels, (name,), (count,)) for count in levels.first[name].counts]
        plans += [tree_drafting(levels, name)] if name in levels.trees else []
        best.append(max(plans, key=lambda plan: plan.speed_up))
    return sorted(best, key=lambda plan: -plan.speed_up)


def cascades(levels: Levels) -> Iterator[Plan]:
    """Yields every hierarchy with one or two middle models, with every number of tokens tried."""
    for count in (1, 2):
        for middles in itertools.combinations(levels.middles, count):
            for first in levels.first:
                names = (first, *middles)
                pairs = itertools.pairwise((*names, levels.target))
                if first in middles or not all(pair in levels.acceptances for pair in pairs):
                    continue
                for tokens in itertools.product(levels.first[first].counts, *[_HELD] * count):
                    if all(low <= high for low, high in itertools.pairwise(tokens[1:])):
                        yield decoding(levels, names, tokens)


def best_cascade(levels: Levels) -> Plan | None:
    return max(cascades(levels), key=lambda plan: plan.speed_up, default=None)


def recommended(levels: Levels) -> Plan:
    """Returns the best plan: a hierarchy only if it is expected to beat plain decoding and each drafter alone."""
    plain = Plan((), (), 1.0, levels.plain, 1.0, ("speed-up: 1, by definition",))
    cascade = best_cascade(levels)
    candidates = [plain, *singles(levels), *([cascade] if cascade else [])]
    return max(candidates, key=lambda plan: plan.speed_up)  # the first of equals, which is the simplest


def _mean(lengths: Mapping[int, float]) -> float:
    return sum(length * share for length, share in lengths.items())


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"
