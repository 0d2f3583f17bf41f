"""Finds the best hierarchy of drafters by calculation ("Hierarchical speculative decoding", 2510.19705).

It is given what forwards and drafts cost, and how far drafts are accepted between each pair of levels. It goes through
all hierarchies of these levels and all numbers of tokens, so it needs no shortest path. Rounds are taken as independent
of one another.

- tokens a round: what the target emits in one round, the bonus token included.
- speed-up: tokens a round, times the seconds of a plain step, divided by the seconds of a round.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_DRAFTED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # tokens of a first level that are tried
_HELD = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)  # tokens of a middle level that are tried
_NEGLIGIBLE = 1e-9  # a probability


@dataclass(frozen=True)
class Curve:
    """Seconds by a number of tokens: straight lines between the points, and beyond them.

    Attributes:
        points: pairs of a number and seconds, ascending; one pair means the same seconds everywhere.
    """

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
    """How far drafts of one level are accepted by another one.

    Attributes:
        reached: for j = 1, 2, ..., the share of drafts of j tokens or more whose first j tokens are all accepted.
    """

    reached: tuple[float, ...]

    def at_least(self, count: int) -> float:
        """Returns the share for j = `count`. Beyond what is known it falls on as it fell over the last known part."""
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
        """Returns the mean number of tokens that are accepted of a draft of so many."""
        return sum(self.at_least(count) for count in range(1, length + 1))

    @classmethod
    def even(cls, share: float, length: int = 32) -> Acceptance:
        """Returns that of drafts whose tokens are right by the same share, each after a right one."""
        return cls(tuple(share**count for count in range(1, length + 1)))


@dataclass(frozen=True)
class Handed:
    """What a level passes up.

    Attributes:
        lengths: probability of each number of tokens.
        seconds: mean seconds that it takes.
        words: how the numbers of tokens came about, in words.
    """

    lengths: Mapping[int, float]
    seconds: float
    words: str

    @property
    def mean(self) -> float:
        return sum(length * share for length, share in self.lengths.items())

    def verifying(self, forward: Curve) -> float:
        """Returns the mean seconds of a forward that verifies it."""
        return sum(share * forward(length + 1) for length, share in self.lengths.items())


@dataclass(frozen=True)
class Drafting:
    """A drafter as a first level.

    Attributes:
        seconds: of a draft, by its number of tokens.
        lengths: probability of each number of tokens of a draft that has no limit; empty if it has as many as asked.
        most: greatest number of tokens of a draft.
    """

    seconds: Curve
    lengths: Mapping[int, float] = field(default_factory=dict)
    most: int = _DRAFTED[-1]

    @property
    def counts(self) -> list[int]:
        """The numbers of tokens that are tried."""
        return sorted({min(count, self.most) for count in _DRAFTED})

    def handed(self, name: str, tokens: int) -> Handed:
        """Returns what a draft of at most so many tokens is."""
        cut: dict[int, float] = defaultdict(float)
        for length, share in (self.lengths or {tokens: 1.0}).items():
            cut[min(length, tokens)] += share
        seconds = self.seconds(tokens)
        return Handed(dict(cut), seconds, f"{name} drafts {_mean(cut):.2f} tokens in {_ms(seconds)}")


@dataclass(frozen=True)
class Levels:
    """What is known of some levels.

    Attributes:
        first: drafters by name.
        forwards: seconds of a forward of each model by its number of tokens, the target and possible middle models.
        acceptances: by the name of a drafter and of the model that verifies it.
        target: name of the target.
        plain: seconds of a plain step.
        rest: seconds of a round of the target besides forward and draft.
        trees: by name, drafters that also draft trees: tokens a round, nodes, and seconds of such a draft.
        rounds: number of measured rounds that a figure rests on, by what it is about; empty where all is assumed.
        left_out: pairs of a drafter and a model that are not planned, with the reason.
    """

    first: dict[str, Drafting]
    forwards: Mapping[str, Curve]
    acceptances: dict[tuple[str, str], Acceptance]
    target: str
    plain: float
    rest: float = 0.0
    trees: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    left_out: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def middles(self) -> list[str]:
        """Models that may stand in the middle, the quickest first. None is as slow as the target."""
        quick = [name for name, forward in self.forwards.items() if name != self.target and forward(1) < self.plain]
        return sorted(quick, key=lambda name: self.forwards[name](1))


@dataclass(frozen=True)
class Plan:
    """A hierarchy and what is expected of it.

    Attributes:
        names: levels below the target.
        tokens: number of tokens of each level; empty for a tree.
        emitted: tokens a round.
        seconds: of a round.
        speed_up: over plain decoding.
        lines: the arithmetic.
    """

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
    """Returns what a middle model passes up: it verifies what the level below hands it until it holds enough.

    A round adds 1 + j tokens with the probability that exactly j tokens are accepted. The numbers held are followed
    from round to round, until they are `tokens` or more.

    Args:
        lower: what the level below passes up each time.
        acceptance: of that by the model.
        forward: seconds of the model's forwards.
        name: of the model.
        tokens: number of tokens that it holds before it passes them up.
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
    """Returns what is expected of a hierarchy.

    Args:
        levels: what is known.
        names: the levels below the target, the quickest first.
        tokens: number of tokens of each.
    """
    handed = levels.first[names[0]].handed(names[0], tokens[0])
    for (lower, name), count in zip(itertools.pairwise(names), tokens[1:], strict=True):
        handed = verified(handed, levels.acceptances[lower, name], levels.forwards[name], name, count)
    acceptance, forward = levels.acceptances[names[-1], levels.target], levels.forwards[levels.target]
    emitted = 1.0 + sum(share * acceptance.expected(length) for length, share in handed.lengths.items())
    return _plan(levels, names, tokens, emitted, handed.seconds, handed.verifying(forward), handed.words)


def tree_drafting(levels: Levels, name: str) -> Plan:
    """Returns what is expected of a drafter alone that drafts trees."""
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
    """Returns the best plan of each drafter of the target alone, the best of all first."""
    best = []
    for name in (name for name in levels.first if (name, levels.target) in levels.acceptances):
        plans = [decoding(levels, (name,), (count,)) for count in levels.first[name].counts]
        plans += [tree_drafting(levels, name)] if name in levels.trees else []
        best.append(max(plans, key=lambda plan: plan.speed_up))
    return sorted(best, key=lambda plan: -plan.speed_up)


def cascades(levels: Levels) -> Iterator[Plan]:
    """Yields all hierarchies with at least one middle model, with all numbers of tokens that are tried."""
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
    """Returns the best hierarchy with a middle model; `None` if there can be none."""
    return max(cascades(levels), key=lambda plan: plan.speed_up, default=None)


def recommended(levels: Levels) -> Plan:
    """Returns the best plan of all: a hierarchy only where it is expected to be faster than each drafter alone."""
    plain = Plan((), (), 1.0, levels.plain, 1.0, ("speed-up: 1, by definition",))
    cascade = best_cascade(levels)
    candidates = [plain, *singles(levels), *([cascade] if cascade else [])]
    return max(candidates, key=lambda plan: plan.speed_up)  # of equal ones the first, which is the simpler one


def _mean(lengths: Mapping[int, float]) -> float:
    return sum(length * share for length, share in lengths.items())


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"
