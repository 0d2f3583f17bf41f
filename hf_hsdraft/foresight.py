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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch
from torch.nn.functional import logsigmoid
from transformers import LogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper

from .draft_tree import DraftTree
from .tree_masks import on_device

_FORESEEABLE = ("cpu", "cuda")
_SURENESS = 0.8  # of a race by the drafter's logits; 1 would be an error of the size of a Gumbel variable in each
_USUAL_TIME = 0.56  # of a race: the geometric mean of an exponential variable


@dataclass(frozen=True)
class _Numbers:
    """What one draw goes by: times `[1, V]`, and the generator's state after it."""

    times: torch.Tensor
    after: torch.Tensor


class Draws:
    """The draws of one text, in its order; foreseen or not, each is what `torch.multinomial` would have drawn.

    Args:
        generator: of the random numbers; others may use it between the draws.
        vocab_size: tokens that are drawn from.
    """

    def __init__(self, generator: torch.Generator, vocab_size: int) -> None:
        self._generator, self._vocab_size = generator, vocab_size
        self._foreseen: list[_Numbers] = []  # of the next draws after those settled
        self._begin = generator.get_state()  # before the first of them
        self._drawn: list[torch.Tensor] = []  # states after the draws since the last that was settled

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

    def ahead(self, count: int) -> list[torch.Tensor]:
        """Exponential times `[V]`, float32, of each of the next `count` draws."""
        generator, now = self._generator, self._generator.get_state()
        if not torch.equal(now, self._begin):  # somebody else has drawn
            self._foreseen, self._begin = [], now
        if len(self._foreseen) < count:
            generator.set_state(self._foreseen[-1].after if self._foreseen else now)
            while len(self._foreseen) < count:
                times = torch.empty(1, self._vocab_size, device=generator.device).exponential_(generator=generator)
                self._foreseen.append(_Numbers(times, generator.get_state()))
            generator.set_state(now)
        return [numbers.times[0] for numbers in self._foreseen[:count]]

    def __call__(self, probabilities: torch.Tensor) -> int:
        """The next draw from `[1, V]`, float32.

        Raises:
            RuntimeError: they are no probabilities, as `torch.multinomial` says.
        """
        place, now = len(self._drawn), self._generator.get_state()
        token = None
        numbers = self._foreseen[place] if place < len(self._foreseen) else None
        if numbers is not None and self._is_for(numbers, probabilities, now):
            first = (probabilities / numbers.times).max(dim=-1)
            value, column = torch.cat([first.values.double(), first.indices.double()]).tolist()
            if value > 0.0:  # and not NaN
                token = int(column)
                self._generator.set_state(numbers.after)
        if token is None:
            del self._foreseen[place:]
            token = int(torch.multinomial(probabilities, num_samples=1, generator=self._generator))
        self._drawn.append(self._generator.get_state())
        return token

    def _is_for(self, numbers: _Numbers, probabilities: torch.Tensor, now: torch.Tensor) -> bool:
        """Whether a draw from these would use these numbers; a generator that others have used has moved on."""
        before = self._drawn[-1] if self._drawn else self._begin
        alike = probabilities.dtype == numbers.times.dtype and probabilities.shape == numbers.times.shape
        return alike and torch.equal(now, before)

    def settle(self, count: int) -> None:
        """Says that only the first `count` draws since the last time were used; the others will be made again."""
        if count < len(self._drawn):
            self._generator.set_state(self._drawn[count - 1])
        self._begin = self._drawn[count - 1]
        del self._foreseen[:count]
        self._drawn.clear()


@dataclass(frozen=True)
class Foresight:
    """What the drafts of a call may know of the draws to come.

    Attributes:
        draws: of each row.
        warpers: what is done to the target's scores `[n, V]` before they are drawn from, as far as it needs no text:
            temperature, top-k and the like.
    """

    draws: Sequence[Draws]
    warpers: Sequence[LogitsProcessor]

    def race(self, rows: Sequence[int], depth: int, vocab_ids: torch.Tensor) -> Race:
        """The race of the next `depth` draws of some rows, among the tokens of a draft vocabulary `[V']`."""
        return Race([self.draws[row].ahead(depth) for row in rows], self.warpers, vocab_ids)

    def scored(self, tree: DraftTree, row: int) -> DraftTree:
        """A tree scored anew, of whose nodes only their own probabilities are known.

        A token that arrives early wins more often. Were its probability the target's, its odds would change as much as
        its time does; but what was counted on a text mixes places where the token is nearly certain with places where
        it is nearly out of the question, and there time decides little.
        """
        levels: list[list[int]] = [[] for _ in range(max(tree.depths))]
        for node in range(1, len(tree)):
            levels[tree.depths[node] - 1].append(node)
        if not levels:
            return tree
        of_nodes = []
        for nodes, times in zip(levels, self.draws[row].ahead(len(levels)), strict=True):
            tokens = [min(tree.tokens[node], len(times) - 1) for node in nodes]
            of_nodes.append(times[on_device(tokens, times.device)])
        scores = [0.0] * len(tree)
        for node, time in zip(chain.from_iterable(levels), torch.cat(of_nodes).tolist(), strict=True):
            parent = tree.parents[node]
            against = math.expm1(tree.scores[parent] - tree.scores[node]) * math.sqrt(time / _USUAL_TIME)
            scores[node] = scores[parent] - math.log1p(max(against, 0.0))
        return DraftTree(tree.tokens, tree.parents, tree.depths, tuple(scores))


@dataclass(frozen=True)
class Race:
    """The race at each depth of a draft.

    Attributes:
        times: of each row and depth `[V]`.
        warpers: see `Foresight`.
        vocab_ids: `[V']`, the tokens behind the columns of what is asked for.
    """

    times: Sequence[Sequence[torch.Tensor]]
    warpers: Sequence[LogitsProcessor]
    vocab_ids: torch.Tensor

    def among(self, columns: torch.Tensor) -> Race:
        """The same for a part of the draft vocabulary."""
        return Race(self.times, self.warpers, self.vocab_ids[columns])

    def __call__(self, level: int, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[B, n, V']` of winning at depth `level`, of the drafter's logits there.

        The greatest of logits less the logarithms of times wins. The drafter's are off by errors, so any other one wins
        with some probability too; and what a warper leaves out of them the target may keep, the less they are the less.
        """
        logits, scaled = logits.float(), logits.float()
        kept = scaled.flatten(0, 1)
        for warper in self.warpers:
            kept = warper(None, kept)
            if isinstance(warper, TemperatureLogitsWarper):
                scaled = scaled / warper.temperature
        left_out = kept.view(logits.shape) == -torch.inf
        least = logits.masked_fill(left_out, torch.inf).amin(dim=-1, keepdim=True)
        kept_too = torch.where(left_out.any(dim=-1, keepdim=True), logsigmoid(logits - least), 0.0)
        times = torch.stack([row[level - 1][self.vocab_ids.to(row[level - 1].device)] for row in self.times])[:, None]
        won = scaled + kept_too - times.to(logits.device).log()
        return (_SURENESS * won).log_softmax(dim=-1)


@cache
def _draws_are_races(device: torch.device, vocab_size: int) -> bool:
    """Whether `torch.multinomial` draws so, and uses up the same random numbers; tried once for a device."""
    if device.type not in _FORESEEABLE:
        return False
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(4):
        probabilities = torch.randn(1, vocab_size, device=device, generator=generator).softmax(dim=-1)
        draws = Draws(generator, vocab_size)
        before = generator.get_state()
        drawn, after = torch.multinomial(probabilities, 1, generator=generator), generator.get_state()
        generator.set_state(before)
        [times] = draws.ahead(1)
        if int((probabilities / times).argmax()) != int(drawn) or not torch.equal(draws._foreseen[0].after, after):
            return False
        generator.set_state(after)
    return True


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
