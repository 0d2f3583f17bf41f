"""Random numbers before they are used: what a text's next draws will go by, so that its drafts can go by it too.

`torch.multinomial` draws one token as the winner of a race: each token arrives after an exponential time of its own
over its probability, and the first one is drawn. The times do not depend on the probabilities, and the generator gives
them beforehand. A drafter that runs the same race with its own probabilities meets the target's token far more often
than by proposing what is likely ("Coupling without Communication and Drafter-Invariant Speculative Decoding", Gumbel
sampling; "Speculative Decoding via Exponential Races"). What is emitted stays the target's own draw at each position,
number by number, whatever was drafted.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import logsigmoid
from transformers import LogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper

from ..common.tensors import on_device
from ..common.tuning import TUNING
from ..trees.draft_tree import DraftTree

_FORESEEABLE = ("cpu", "cuda")
_USUAL_TIME = 0.56  # of a race: the geometric mean of an exponential variable
_TAKING = threading.Lock()  # numbers of a generator that threads share


@dataclass(frozen=True)
class _Numbers:
    """What one draw goes by: times `[V]`, and the generator's states before and after it."""

    times: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    def fit(self, probabilities: torch.Tensor) -> bool:
        """Whether they are those of a draw from these probabilities; others take other numbers."""
        return probabilities.dtype == self.times.dtype and probabilities.shape == (1, len(self.times))

    def winner(self, probabilities: torch.Tensor) -> int | None:
        """The token `torch.multinomial` draws by them from `[1, V]`; `None` where nothing can be drawn."""
        speeds = probabilities / self.times
        first = speeds.argmax(dim=-1, keepdim=True)
        speed, token = torch.cat([speeds.gather(-1, first).double(), first.double()], dim=-1)[0].tolist()
        return int(token) if 0.0 < speed < math.inf else None


class Draws:
    """The draws of one text, those of `torch.multinomial`; what they will go by is found out on another generator.

    Most of the time of a draw goes into its random numbers. So where they were foreseen, the draw is made by those and
    the generator set to where it would be. The first one that was foreseen is made by `torch.multinomial` all the same;
    if it came otherwise, so are all later ones.

    Args:
        generator: of the random numbers. Others may use it too: what was foreseen is looked up again then. Texts of
            other threads get numbers of their own, except for draws of others within microseconds of one made so.
        vocab_size: tokens that are drawn from.
    """

    def __init__(self, generator: torch.Generator, vocab_size: int) -> None:
        self._generator, self._vocab_size = generator, vocab_size
        self._ahead = torch.Generator(generator.device)  # runs ahead of the other one
        self._foreseen: list[_Numbers] = []  # of the draws after those settled
        self._drawn: list[torch.Tensor] = []  # states after the draws since the last that was settled
        self._misses = 0
        self._right: bool | None = None  # whether the first draw that was foreseen came so

    @classmethod
    def of_rows(cls, rows: int, device: torch.device, vocab_size: int) -> list[Draws] | None:
        """One for each row; `None` where draws are made in a way that is not known here.

        A single text draws from the device's own generator, as plain decoding does. Rows of a batch have generators of
        their own, seeded from that one: were it shared, which of its numbers a row gets would depend on how much was
        accepted in the others, and that on what they foresaw.
        """
        if not _draws_are_races(device, vocab_size):
            return None
        if rows == 1:
            return [cls(_default_generator(device), vocab_size)]
        seeds = torch.randint(2**63 - 1, (rows,), device=device).tolist()
        return [cls(torch.Generator(device).manual_seed(seed), vocab_size) for seed in seeds]

    @property
    def device(self) -> torch.device:
        return self._generator.device

    @property
    def foreseeable(self) -> bool:
        """Whether what was foreseen of late came; it does not where others draw between, or of other numbers."""
        return self._misses < TUNING.most_misses and self._right is not False

    def ahead(self, count: int) -> list[torch.Tensor]:
        """Exponential times `[V]`, float32, of each of the next `count` draws, which go by these very tensors."""
        state = self._generator.get_state()
        if self._foreseen and not _same(state, self._foreseen[0].before):
            self._foreseen.clear()
        if len(self._foreseen) < count:
            state = self._foreseen[-1].after if self._foreseen else state
            self._ahead.set_state(state)
            while len(self._foreseen) < count:
                # Of a row of a batch of one, as the call draws: on a GPU the numbers depend on the shape.
                times = torch.empty(1, self._vocab_size, dtype=torch.float32, device=self.device)
                times.exponential_(generator=self._ahead)
                before, state = state, self._ahead.get_state()
                self._foreseen.append(_Numbers(times[0], before, state))
        return [numbers.times for numbers in self._foreseen[:count]]

    def __call__(self, probabilities: torch.Tensor) -> int:
        """The next draw from `[1, V]`."""
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
            self._generator.set_state(numbers.before)
        token = int(torch.multinomial(probabilities, num_samples=1, generator=self._generator))
        after = self._generator.get_state()
        if numbers is not None:
            came = _same(after, numbers.after)
            self._misses = 0 if came else self._misses + 1
            if came and self._right is None:
                self._right = token == numbers.winner(probabilities)
        self._drawn.append(after)
        return token

    def _take(self, numbers: _Numbers) -> bool:
        """Takes numbers off the generator, if they are its next ones.

        Before they are used, which may wait for a device: texts of other threads are not to draw by them meanwhile.
        """
        with _TAKING:
            if not _same(self._generator.get_state(), numbers.before):
                return False
            self._generator.set_state(numbers.after)
            return True

    def settle(self, count: int) -> None:
        """Says that only the first `count` draws since the last time were used; the others will be made again.

        A single text uses all it draws, so nobody else's generator is set back; rows that go in step do not.
        """
        if count < len(self._drawn):
            self._generator.set_state(self._drawn[count - 1])
        del self._foreseen[:count]
        self._drawn.clear()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two states of generators are equal, found out without letting other threads of Python go on."""
    return one.numpy().tobytes() == other.numpy().tobytes()


@dataclass(frozen=True)
class Foresight:
    """What the drafts of a call may know of the draws to come.

    Attributes:
        draws: of each row.
        warpers: what is done to the target's scores `[n, V]` before they are drawn from, as far as it needs no text:
            temperature, top-k and the like.
        vocab_size: number of tokens that are drawn from.
    """

    draws: Sequence[Draws]
    warpers: Sequence[LogitsProcessor]
    vocab_size: int

    @property
    def kind(self) -> tuple[str, ...]:
        """What the costs of drafting depend on."""
        return tuple(type(warper).__name__ for warper in self.warpers)

    def race(self, rows: Sequence[int], depth: int, vocab_ids: torch.Tensor) -> Race | None:
        """The race of the next `depth` draws of some rows, among the tokens of a draft vocabulary `[V']`."""
        if not all(self.draws[row].foreseeable for row in rows):
            return None
        return Race([self.draws[row].ahead(depth) for row in rows], self.warpers, vocab_ids)

    def scored(self, trees: Mapping[int, DraftTree]) -> dict[int, DraftTree]:
        """Trees of rows, scored anew: of their nodes only their own probabilities are known.

        A token that arrives early wins more often. Were its probability the target's, its odds would change as much as
        its time does; but what was counted on a text mixes places where the token is nearly certain with places where
        it is nearly out of the question, and there time decides little. Nodes far from the root keep theirs.
        """
        drafted = {row: tree for row, tree in trees.items() if len(tree) > 1 and self.draws[row].foreseeable}
        times = self._times(drafted) if drafted else {}
        return {row: _scored(tree, times[row]) if row in times else tree for row, tree in trees.items()}

    def _times(self, trees: Mapping[int, DraftTree]) -> dict[int, list[float]]:
        """The times of each tree's nodes beside the root, fetched in one transfer."""
        device = self.draws[0].device
        nodes = [
            (token, depth - 1)
            for tree in trees.values()
            for token, depth in zip(tree.tokens[1:], tree.depths[1:], strict=True)
        ]
        picked, parts = on_device(nodes, device).split([len(tree) - 1 for tree in trees.values()]), []
        for (row, tree), part in zip(trees.items(), picked, strict=True):
            ahead = self.draws[row].ahead(min(max(tree.depths), TUNING.draws_ahead))
            tokens = part[:, 0].clamp(max=len(ahead[0]) - 1)  # one beyond is never drawn, so its score does not matter
            known = torch.stack([*(times[tokens] for times in ahead), torch.full_like(ahead[0][tokens], _USUAL_TIME)])
            parts.append(known.gather(0, part[None, :, 1].clamp(max=len(ahead)))[0])
        found = iter(torch.cat(parts).tolist())
        return {row: [next(found) for _ in tree.tokens[1:]] for row, tree in trees.items()}


def _scored(tree: DraftTree, times: Sequence[float]) -> DraftTree:
    scores = [0.0]
    for node, time in enumerate(times, 1):
        parent = tree.parents[node]
        against = math.expm1(tree.scores[parent] - tree.scores[node]) * math.sqrt(time / _USUAL_TIME)
        scores.append(scores[parent] - math.log1p(max(against, 0.0)))
    return DraftTree(tree.tokens, tree.parents, tree.depths, tuple(scores))


@dataclass(frozen=True)
class Race:
    """The race at each depth of a draft.

    Attributes:
        times: of each row and depth `[V]`.
        warpers: see `Foresight`.
        vocab_ids: `[V']`, or `[B, V']` of each row, the tokens behind the columns of what is asked for.
    """

    times: Sequence[Sequence[torch.Tensor]]
    warpers: Sequence[LogitsProcessor]
    vocab_ids: torch.Tensor

    def among(self, columns: torch.Tensor) -> Race:
        """The same for a part of the draft vocabulary, `[C]`, or `[B, C]` of each row."""
        return Race(self.times, self.warpers, self.vocab_ids[columns])

    def __call__(self, level: int, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[B, n, V']` of winning at depth `level`, of the drafter's logits there.

        The greatest of logits less the logarithms of times wins. The drafter's logits are off by errors, so any other
        token wins with some probability too. For the same reason the target may keep what a warper leaves out of them,
        and the other way round: the further above the least that is kept, the surer.
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
        return (TUNING.race_sharpness * (scaled - times[:, None].to(logits.device).log())).log_softmax(dim=-1)


@cache
def _draws_are_races(device: torch.device, vocab_size: int) -> bool:
    """Whether `torch.multinomial` draws so, and uses up the same random numbers; tried once for a device."""
    if device.type not in _FORESEEABLE:
        return False
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(4):
        probabilities = torch.rand(1, vocab_size, dtype=torch.float32, device=device, generator=generator)
        probabilities /= probabilities.sum()
        draws = Draws(generator, vocab_size)
        draws.ahead(1)
        draws(probabilities)
        if not draws._right:
            return False
    return True


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
