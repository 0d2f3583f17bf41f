"""Foresight: the random numbers of a text's next draws, known beforehand, so that drafts can use them.

`torch.multinomial` draws a token as the winner of a race: each token gets an exponential random time, divided by its
probability, and the least result wins. The times do not depend on the probabilities, and follow from the state of the
generator. A drafter can run the same race with its own probabilities. Its winner is the target's token far more often
than its most probable token is ("Coupling without Communication and Drafter-Invariant Speculative Decoding", Gumbel
sampling; "Speculative Decoding via Exponential Races"). The emitted tokens stay the target's own draws, with the same
random numbers, whatever was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn.functional import logsigmoid
from transformers import LogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper

from ..core.draft_tree import DraftTree
from ..core.forks import new_lock
from ..core.tensors import on_device

# Factor of the logits of a race; 1 would take the drafter's error for as large as a Gumbel variable - by hand.
RACE_SHARPNESS = 0.8
# Number of draws that n-grams look ahead
# - by hand: in 60 greedy texts 3% of the rounds accepted 8 tokens or more.
DRAWS_AHEAD = 8
# Number of times in a row that what was foreseen did not come, until a text is drafted without - by hand.
MOST_MISSES = 3

_FORESEEABLE = ("cpu", "cuda")
_USUAL_TIME = 0.56  # geometric mean of an exponential variable
_TAKING = new_lock()  # held while numbers are taken from a generator, which threads may share


@dataclass(frozen=True)
class _Numbers:
    """The random numbers of one draw."""

    times: torch.Tensor  # `[V]`, float32, exponential random times
    before: torch.Tensor  # state of the generator before the draw
    after: torch.Tensor  # state after it

    def fit(self, probabilities: torch.Tensor) -> bool:
        """Whether a draw from these probabilities uses these numbers, by dtype and shape."""
        return probabilities.dtype == self.times.dtype and probabilities.shape == (1, len(self.times))

    def winner(self, probabilities: torch.Tensor) -> int | None:
        """Returns the token that these numbers draw from `[1, V]`; `None` where nothing can be drawn."""
        speeds = probabilities / self.times
        first = speeds.argmax(dim=-1, keepdim=True)
        speed, token = torch.cat([speeds.gather(-1, first).double(), first.double()], dim=-1)[0].tolist()
        return int(token) if 0.0 < speed < math.inf else None


class Draws:
    """Draws the tokens of one text as `torch.multinomial` does, and foresees the random numbers of its next draws.

    A second generator runs ahead and makes the coming numbers, which is most of a draw's time. So a foreseen draw
    reuses them, and sets the generator to the state after the draw. The first foreseen draw still uses
    `torch.multinomial`; if that gives another token, so do all later draws.

    Args:
        generator: Other code may use it too: then the numbers are foreseen again. Another thread gets other numbers,
            unless it draws within microseconds of a draw made here.
        vocab_size: number of tokens to draw from.
    """

    def __init__(self, generator: torch.Generator, vocab_size: int) -> None:
        self._generator, self._vocab_size, self.device = generator, vocab_size, generator.device
        self._ahead = torch.Generator(generator.device)  # runs ahead of `generator`
        self._foreseen: list[_Numbers] = []  # for draws after the last settled one
        self._drawn: list[torch.Tensor] = []  # states of `generator` after each draw since then
        self._misses = 0  # consecutive draws that used other numbers than foreseen
        self._right: bool | None = None  # whether the first foreseen draw gave the foreseen token; `None` before it

    @classmethod
    def of_rows(
        cls, rows: int, device: torch.device, vocab_size: int, generator: torch.Generator | None = None
    ) -> list[Draws] | None:
        """Returns the draws of each row; `None` where `torch.multinomial` draws in an unknown way.

        A single text draws from the device's generator, as plain decoding does, or from `generator`. Each row of a
        batch has its own, seeded from the device's. With a shared one, a row's numbers would depend on how many tokens
        other rows accept, and so on what was foreseen.
        """
        if not _draws_are_races(device, vocab_size):
            return None
        if rows == 1:
            return [cls(_default_generator(device) if generator is None else generator, vocab_size)]
        seeds = torch.randint(2**63 - 1, (rows,), device=device).tolist()
        return [cls(torch.Generator(device).manual_seed(seed), vocab_size) for seed in seeds]

    @property
    def foreseeable(self) -> bool:
        """Whether the last draws were as foreseen. They are not if other code draws in between."""
        return self._misses < MOST_MISSES and self._right is not False

    def foresee(self, count: int) -> list[torch.Tensor]:
        """Returns the times `[V]`, float32, of each of the next `count` draws. The draws will use these tensors."""
        state = self._generator.get_state()
        if self._foreseen and not _same(state, self._foreseen[0].before):
            self._foreseen.clear()
        if len(self._foreseen) < count:
            state = self._foreseen[-1].after if self._foreseen else state
            self._ahead.set_state(state)
            while len(self._foreseen) < count:
                # In the shape of a draw, as numbers on a GPU depend on it.
                times = torch.empty(1, self._vocab_size, dtype=torch.float32, device=self.device)
                times.exponential_(generator=self._ahead)
                before, state = state, self._ahead.get_state()
                self._foreseen.append(_Numbers(times[0], before, state))
        return [numbers.times for numbers in self._foreseen[:count]]

    def __call__(self, probabilities: torch.Tensor) -> int:
        """Draws the next token from `[1, V]`."""
        place = len(self._drawn)
        numbers = self._foreseen[place] if place < len(self._foreseen) else None
        if numbers is not None and not numbers.fit(probabilities):
            numbers = None
            self._misses += 1
        if numbers is not None and self._right and self._take(numbers):
            token = numbers.winner(probabilities)
            if token is not None:
                self._misses = 0
                self._drawn.append(numbers.after)
                return token
            self._generator.set_state(numbers.before)  # nothing can be drawn: `torch.multinomial` raises
        token = int(torch.multinomial(probabilities, num_samples=1, generator=self._generator))
        after = self._generator.get_state()
        if numbers is not None:
            as_foreseen = _same(after, numbers.after)
            self._misses = 0 if as_foreseen else self._misses + 1
            if as_foreseen and self._right is None:
                self._right = token == numbers.winner(probabilities)
        self._drawn.append(after)
        return token

    def _take(self, numbers: _Numbers) -> bool:
        """Moves the generator past these numbers, unless they are not its next ones: then it returns False.

        Called before the draw, which may wait for a device: no other thread may get the same numbers meanwhile.
        """
        with _TAKING:
            if not _same(self._generator.get_state(), numbers.before):
                return False
            self._generator.set_state(numbers.after)
            return True

    def settle(self, count: int) -> None:
        """Keeps the first `count` draws since the last call. The others will be made again.

        There are others in batches whose rows stay in step, and under a lossy rule that looks ahead. Exact rules never
        set the device's own generator back.
        """
        if count < len(self._drawn):
            self._generator.set_state(self._drawn[count - 1])
        del self._foreseen[:count]
        self._drawn.clear()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two generator states are equal. No other Python thread runs during the comparison."""
    return one.numpy().tobytes() == other.numpy().tobytes()


@dataclass(frozen=True)
class Foresight:
    """What the drafts of a call may know of coming draws."""

    draws: Sequence[Draws]  # of each row
    warpers: Sequence[LogitsProcessor]  # processors of scores `[n, V]` that ignore the text: temperature, top-k, ...
    vocab_size: int

    @property
    def warper_names(self) -> tuple[str, ...]:
        """The cost of drafting depends on them."""
        return tuple(type(warper).__name__ for warper in self.warpers)

    def race(self, rows: Sequence[int], depth: int, vocab_ids: torch.Tensor) -> Race | None:
        """Returns the races of the next `depth` draws among tokens `[V']`; `None` if they cannot be foreseen."""
        if not all(self.draws[row].foreseeable for row in rows):
            return None
        return Race([self.draws[row].foresee(depth) for row in rows], self.warpers, vocab_ids)

    def scored(self, trees: Mapping[int, DraftTree]) -> dict[int, DraftTree]:
        """Returns the trees of some rows with scores that take the coming draws into account.

        For n-grams, where only the node's probability is known. A token with a short time is drawn more often. If the
        probability were the target's at this place, the odds against the node would be proportional to its time. But it
        was counted over many places: at some the token is nearly certain, at others nearly impossible, and there the
        time decides little. So the odds change by the square root of the time. Nodes more than `DRAWS_AHEAD`
        draws ahead keep their odds.
        """
        drafted = {row: tree for row, tree in trees.items() if len(tree) > 1 and self.draws[row].foreseeable}
        times = self._times(drafted) if drafted else {}
        return {row: _scored(tree, times[row]) if row in times else tree for row, tree in trees.items()}

    def _times(self, trees: Mapping[int, DraftTree]) -> dict[int, list[float]]:
        """Times of each tree's nodes besides the root. They leave the device in one transfer."""
        all_nodes = [node for tree in trees.values() for node in zip(tree.tokens[1:], tree.depths[1:], strict=True)]
        split = on_device(all_nodes, self.draws[0].device).split([len(tree) - 1 for tree in trees.values()])
        parts = []
        for (row, tree), nodes in zip(trees.items(), split, strict=True):
            foreseen = self.draws[row].foresee(min(max(tree.depths), DRAWS_AHEAD))
            tokens = nodes[:, 0].clamp(max=self.vocab_size - 1)  # tokens beyond are never drawn
            times = [of_draw[tokens] for of_draw in foreseen]
            known = torch.stack([*times, torch.full_like(times[0], _USUAL_TIME)])
            parts.append(known.gather(0, (nodes[None, :, 1] - 1).clamp(max=len(foreseen)))[0])
        found = iter(torch.cat(parts).tolist())
        return {row: [next(found) for _ in tree.tokens[1:]] for row, tree in trees.items()}


def _scored(tree: DraftTree, times: Sequence[float]) -> DraftTree:
    scores = [0.0]
    for node, time in enumerate(times, 1):
        parent = tree.parents[node]
        odds_against = math.expm1(tree.scores[parent] - tree.scores[node]) * math.sqrt(time / _USUAL_TIME)
        scores.append(scores[parent] - math.log1p(max(odds_against, 0.0)))
    return replace(tree, scores=tuple(scores))


@dataclass(frozen=True)
class Race:
    """The races that decide the draws at each depth of a draft."""

    times: Sequence[Sequence[torch.Tensor]]  # `[V]` for each row and depth
    warpers: Sequence[LogitsProcessor]  # see `Foresight`
    vocab_ids: torch.Tensor  # `[V']`, or `[B, V']` by row, int64, the token id of each column of the logits

    def among(self, columns: torch.Tensor) -> Race:
        """Returns the races among some columns only: `[C]`, or `[B, C]` for each row."""
        return Race(self.times, self.warpers, self.vocab_ids[columns])

    def __call__(self, level: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities `[B, n, V']` that tokens are drawn at depth `level`, by the drafter's logits.

        The token with the greatest difference of its logit and the logarithm of its time wins. The drafter's logits are
        only close to the target's, so another token may win. For the same reason the target's warpers may remove other
        tokens: a token is the more likely to stay, the higher its logit is above the least that stays here.
        """
        logits, scaled = logits.float(), logits.float()
        kept = scaled.flatten(0, 1)
        for warper in self.warpers:
            kept = warper(None, kept)
            if isinstance(warper, TemperatureLogitsWarper):
                scaled = scaled / warper.temperature
        if any(not isinstance(warper, TemperatureLogitsWarper) for warper in self.warpers):
            left_out = kept.view(logits.shape) == -torch.inf
            least = logits.masked_fill(left_out, torch.inf).amin(dim=-1, keepdim=True)
            scaled = scaled + torch.where(left_out.any(dim=-1, keepdim=True), logsigmoid(logits - least), 0.0)
        ids = self.vocab_ids.expand(len(self.times), -1)
        times = torch.stack([row[level - 1][of.to(row[0].device)] for row, of in zip(self.times, ids, strict=True)])
        return (RACE_SHARPNESS * (scaled - times[:, None].to(logits.device).log())).log_softmax(dim=-1)


@cache
def _draws_are_races(device: torch.device, vocab_size: int) -> bool:
    """Whether `torch.multinomial` draws by such a race, with the same random numbers. Tried once per device."""
    if device.type not in _FORESEEABLE:
        return False
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(4):
        probabilities = torch.rand(1, vocab_size, dtype=torch.float32, device=device, generator=generator)
        probabilities /= probabilities.sum()
        draws = Draws(generator, vocab_size)
        draws.foresee(1)
        draws(probabilities)
        if not draws._right:
            return False
    return True


def _default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.multinomial` uses on a device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
