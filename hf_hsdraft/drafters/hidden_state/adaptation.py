"""Learning during decoding: a bias for each token of the draft vocabulary, from what the target says of the text.

Long texts leave what a drafter was trained on. Then it expects some tokens more often than they come, and others less:
those of another language, of code, of the text's own subject. At the root of a draft, before any drafted token, the
drafter's distribution q and the target's p, which verification computes anyway, are for the same place. Over a text,

    bias(v) = w log((sum p(v) + a) / (sum q(v) + a))

makes the expected number of each token that of the target. It needs no gradient and no forward of the drafter. The bias
is added to the logits of all depths. It changes drafts only: what is accepted stays the target's.

A trial decides whether it is used: at each new root it ranks the emitted token with and without the bias, before
learning from that root. Everything is computed in `draft`, whose time the pace charges to the drafter's account.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.generation.logits_process import TemperatureLogitsWarper

from ...core.checks import printable
from ...core.options import Option
from ...verify.foresight import Race
from ..base.protocol import Accepted

FILE = "adaptation.safetensors"
_KEPT = "kept"
ADAPTATION = Option(
    "adaptation",
    False,
    lambda value: isinstance(value, bool) or value == _KEPT,
    "True, False, or 'kept'",
    "Whether the drafter learns from the text while it is decoded.",
)

RaceOf = Callable[[Sequence[int], int], Race | None]

_PRIOR = 0.1  # a: tokens that count for both before anything is seen
_WEIGHT = 1.0  # w
_LEAST_TRIALS = 16  # comparisons before the bias may be used
_LONG_TRIAL = 128  # comparisons in which each draft is learnt from
_STEP = 4  # later: drafts for each one that is learnt from
_RARE_STEP = 16  # the same where the bias was found useless
_FADING = 1 - 1 / 256  # of earlier comparisons, as texts change
_KEPT_TOKENS = 2000.0  # most tokens that a record counts at the start of a call


@dataclass
class TokenRecord:
    """How often the tokens of a draft vocabulary were expected, and how often the target wanted them.

    Attributes:
        expected, wanted: `[V']`, float32, sums of the drafter's and of the target's probabilities.
    """

    expected: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def empty(cls, size: int, device: torch.device | str = "cpu") -> TokenRecord:
        return cls(torch.zeros(size, device=device), torch.zeros(size, device=device))

    def bias(self) -> torch.Tensor:
        """Returns the bias `[V']`, float32."""
        return _WEIGHT * ((self.wanted + _PRIOR) / (self.expected + _PRIOR)).log()

    def scaled(self, most: float) -> TokenRecord:
        """Returns a copy that counts at most so many tokens."""
        share = min(most / max(float(self.expected.sum()), 1.0), 1.0)
        return TokenRecord(share * self.expected, share * self.wanted)

    def plus(self, other: TokenRecord, sign: float = 1.0) -> TokenRecord:
        return TokenRecord(self.expected + sign * other.expected, self.wanted + sign * other.wanted)

    def to(self, device: torch.device | str) -> TokenRecord:
        return TokenRecord(self.expected.to(device), self.wanted.to(device))

    def save(self, path: Path) -> None:
        """Writes the record, atomically."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        save_file({name: tensor.cpu().contiguous() for name, tensor in vars(self).items()}, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, size: int) -> TokenRecord:
        """Reads a record of a draft vocabulary of `size` tokens. Raises a ValueError for any other file."""
        shapes = dict.fromkeys(("expected", "wanted"), (size,))
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({printable(error)}): remove it, or save it again") from error
        fits = {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
        if not fits or not all(map(_are_counts, found.values())):
            raise ValueError(
                f"{path} does not fit: expected counts of 0 or more, float32, of the {size} tokens of this drafter's "
                "vocabulary; remove it, or save it again by this drafter"
            )
        return cls(**found)


def _are_counts(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and bool(((tensor >= 0) & tensor.isfinite()).all())


class Records:
    """The records that drafters keep for later calls, in memory."""

    def __init__(self) -> None:
        self._records: weakref.WeakKeyDictionary[Any, TokenRecord] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, drafter: Any) -> TokenRecord:
        """Returns a drafter's record: that of its calls, or in its folder, or an empty one.

        Raises a ValueError if the file in the folder is damaged or does not fit.
        """
        with self._lock:
            if drafter not in self._records:
                size, folder = drafter.config.draft_vocab_size, getattr(drafter, "loaded_from", None)
                stored = None if folder is None else Path(folder) / FILE
                if stored is not None and stored.is_file():
                    self._records[drafter] = TokenRecord.load(stored, size)
                else:
                    self._records[drafter] = TokenRecord.empty(size)
            return self._records[drafter]

    def add(self, drafter: Any, learnt: TokenRecord) -> None:
        """Adds what a call has learnt."""
        before = self.of(drafter)
        with self._lock:
            before = self._records.get(drafter, before)
            self._records[drafter] = before.plus(learnt.to("cpu")).scaled(_KEPT_TOKENS)

    def forget(self, drafter: Any) -> None:
        with self._lock:
            self._records[drafter] = TokenRecord.empty(drafter.config.draft_vocab_size)


RECORDS = Records()


def check_adaptation(drafter: Any, options: Mapping[str, Any]) -> None:
    """Raises a ValueError if the drafter's saved record is to be used and cannot be."""
    if options[ADAPTATION.name] == _KEPT:
        RECORDS.of(drafter)


@dataclass
class Trial:
    """Compares two rankings of the tokens that the target emits."""

    count: int = 0
    gain: float = 0.0  # sum of differences of reciprocal ranks; earlier ones fade

    def note(self, before: int, after: int) -> None:
        """Takes the ranks of an emitted token without and with the change, from 0."""
        self.gain = _FADING * self.gain + 1 / (1 + after) - 1 / (1 + before)
        self.count += 1

    @property
    def holds(self) -> bool:
        """Whether the change is to be used."""
        return self.count >= _LEAST_TRIALS and self.gain > 0.0

    @property
    def step(self) -> int:
        """Number of drafts for each one that is learnt from."""
        if self.count < _LONG_TRIAL:
            return 1
        return _STEP if self.holds else _RARE_STEP


@dataclass(frozen=True)
class _Drafted:
    """What was drafted at a root."""

    logits: torch.Tensor  # `[V']`, of the root's children, without the bias
    race: Race | None  # that decides the draw after the root, if it is foreseen


@dataclass(frozen=True)
class _Lesson:
    """What became of a draft: the token after its root, and the target's logits there `[V]`, if known."""

    drafted: _Drafted
    token: int
    logits: torch.Tensor | None


class Adaptation:
    """What one call has learnt of its texts; all rows share it.

    Args:
        vocab_ids: `[V']`, int64, token ids of the draft vocabulary.
        record: what earlier calls have learnt; None for nothing.
    """

    def __init__(self, vocab_ids: torch.Tensor, record: TokenRecord | None = None) -> None:
        self._ids, size = vocab_ids, len(vocab_ids)
        ids = vocab_ids.cpu()
        self._columns = torch.full((int(ids.max()) + 1,), -1).index_copy(0, ids, torch.arange(size))
        start = TokenRecord.empty(size) if record is None else record
        self._start = start.to(vocab_ids.device)
        self.record, self.trial = self._start.scaled(math.inf), Trial()  # a copy
        self._bias = self.record.bias()
        self._drafted: dict[int, _Drafted] = {}
        self._lessons: list[_Lesson] = []
        self._drafts = 0

    @classmethod
    def of(cls, drafter: Any, options: Mapping[str, Any], vocab_ids: torch.Tensor) -> Adaptation | None:
        """Returns the adaptation of a call; None if the options ask for none."""
        chosen = options[ADAPTATION.name]
        return cls(vocab_ids, RECORDS.of(drafter) if chosen == _KEPT else None) if chosen else None

    @property
    def learnt(self) -> TokenRecord:
        """What this call has added to the record."""
        return self.record.plus(self._start, sign=-1.0)

    def end(self, drafter: Any, options: Mapping[str, Any]) -> None:
        """Keeps for the drafter's later calls what was learnt, if the options say so."""
        if options[ADAPTATION.name] == _KEPT:
            RECORDS.add(drafter, self.learnt)

    def adapted(self, logits: torch.Tensor, rows: Sequence[int], race_of: RaceOf) -> torch.Tensor:
        """Learns from earlier drafts; returns the logits `[B, depth, V']` of a draft of some rows, with the bias.

        `race_of` returns the race of some rows to a depth, or None if no draws are foreseen.
        """
        for lesson in self._lessons:
            self._learn(lesson)
        if self._lessons:
            self._bias = self.record.bias()
            self._lessons = []
        self._drafts += 1
        if self._drafts % self.trial.step == 0:
            first = logits[:, 0]
            self._drafted = {row: _Drafted(first[place], race_of([row], 1)) for place, row in enumerate(rows)}
        return logits + self._bias.to(logits.dtype) if self.trial.holds else logits

    def observe(self, news: Sequence[Accepted]) -> None:
        """Takes what the target accepted; the next draft learns from it."""
        for each in news:
            drafted = self._drafted.pop(each.row, None)
            if drafted is not None:
                self._lessons.append(_Lesson(drafted, each.tokens[0], each.root_logits))

    def _learn(self, lesson: _Lesson) -> None:
        logits, column = lesson.drafted.logits.float(), self._column(lesson.token)
        if column >= 0:
            scores = _scores(logits, lesson.drafted.race)
            self.trial.note(
                _rank(scores, column), _rank(scores + self._bias / _temperature(lesson.drafted.race), column)
            )
        self.record.expected += logits.softmax(dim=-1)
        if lesson.logits is not None:
            target = lesson.logits.to(self._ids.device).float()
            self.record.wanted += (target[self._ids] - target.logsumexp(dim=-1)).exp()
        elif column >= 0:
            self.record.wanted[column] += 1.0

    def _column(self, token: int) -> int:
        """The column of a token in the draft vocabulary; -1 if it cannot be drafted."""
        return int(self._columns[token]) if token < len(self._columns) else -1


def _temperature(race: Race | None) -> float:
    warpers = () if race is None else race.warpers
    return math.prod(each.temperature for each in warpers if isinstance(each, TemperatureLogitsWarper))


def _scores(logits: torch.Tensor, race: Race | None) -> torch.Tensor:
    """Scores `[V']` whose greatest is the first choice: the logits, or in a race those that win it."""
    if race is None:
        return logits
    times = race.times[0][0]
    return logits / _temperature(race) - times[race.vocab_ids.to(times.device)].log().to(logits.device)


def _rank(scores: torch.Tensor, column: int) -> int:
    return int((scores > scores[column]).sum())
