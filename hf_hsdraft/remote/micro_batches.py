"""Micro-batches: the one thread that runs the target, over as many waiting texts at once as may share a forward.

A batch is read when it is full, when no other text is likely to send a draft soon, or when it has waited long enough.
Prompts are read in pieces between two batches, one piece at a time, round-robin over the texts, so a long prompt delays
neither drafts nor short prompts for long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.draft_tree import DraftTree
from ..core.forks import new_lock
from ..runtime.cache_slots import make_room
from .messages import packed_states
from .sessions import ServerLimits
from .tree_reader import TreeReader, TreesRead
from .verified_text import VerifiedText
from .wire import log_failure

_FORWARDS_A_PIECE, _LEAST_PIECE = 2, 32  # by hand
# Part of the last forward that a batch waits for texts - by hand: a quarter, for any text, brought 1.5 to 1.7 times
# the tokens/s of 2 ms with 16 devices that came back in time, and 0.8 times where they did not.
_BATCH_WAIT = 0.5
# Part of a forward's fixed time that its columns may add, which limits drafts where many texts share it; number of
# forwards after which costs are known - by hand: with tau of 1.5 drafts gain as long as they add less.
_DRAFTS_SHARE = 0.5
_COSTS_KNOWN = 16
# Weight of the newest time that a text was away in the mean; number of times the mean, and seconds besides, after
# which it is late - by hand.
_NEWEST_AWAY = 0.3
_LATEST_AWAY = 1.5
_LATE_SLACK = 0.002


@dataclass(frozen=True)
class Verified:
    """Outcome of verifying a tree; fields as in `messages.Accepted`."""

    tokens: list[int]
    drafted: int
    reach: int
    finished: bool
    taps: bytes
    batch: int
    seconds: float


@dataclass(frozen=True)
class PieceRead:
    """Outcome of reading a piece of a prompt: packed hidden states, and the first token after the last piece."""

    taps: bytes
    first: Verified | None


@dataclass(frozen=True)
class Job:
    """One step of a text."""

    text: VerifiedText
    # to verify; `None` to read the next piece of the prompt, and emit the first token after the last one
    tree: DraftTree | None
    done: Callable[[Any], None]  # called with the outcome: `Verified`, `PieceRead` or the error
    came: float = field(default_factory=time.monotonic)


@dataclass
class _Habit:
    """When a text was answered (`None` while it waits for an answer), and the running mean of its seconds away."""

    answered: float | None = None
    away: float | None = None


class Arrivals:
    """Notes how long each text is away between an answer and its next draft."""

    def __init__(self) -> None:
        self._habits: weakref.WeakKeyDictionary[VerifiedText, _Habit] = weakref.WeakKeyDictionary()

    def answered(self, text: VerifiedText, now: float) -> None:
        self._habits.setdefault(text, _Habit()).answered = now

    def asked(self, text: VerifiedText, now: float) -> None:
        habit = self._habits.setdefault(text, _Habit())
        if habit.answered is not None:
            away = now - habit.answered
            habit.away = away if habit.away is None else habit.away + _NEWEST_AWAY * (away - habit.away)
            habit.answered = None

    def ended(self, text: VerifiedText) -> None:
        self._habits.pop(text, None)

    @property
    def away(self) -> int:
        """Number of texts that were answered and have not sent their next draft."""
        return sum(habit.answered is not None for habit in list(self._habits.values()))

    def next(self, now: float, until: float) -> float | None:
        """Returns when a batch should stop waiting for another text, at most `until`; `None` if none is expected.

        Texts without a measured habit, and those that are late, are not waited for.
        """
        known = []
        for habit in list(self._habits.values()):
            if habit.answered is not None and habit.away is not None:
                late = habit.answered + _LATEST_AWAY * habit.away + _LATE_SLACK
                if habit.answered + habit.away <= until and now < late:
                    known.append(min(late, until))
        return min(known, default=None)


@dataclass
class BatchStatistics:
    """Totals since the thread began."""

    forwards: int = 0
    sizes: dict[int, int] = field(default_factory=dict)  # number of forwards by number of texts
    tokens: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    verify_seconds: float = 0.0  # of all verifying forwards, updating the caches included
    # columns, columns_squared, columns_seconds: sums over forwards, for `fitted_line`; columns are texts times the
    # nodes of the largest tree
    columns: int = 0
    columns_squared: int = 0
    columns_seconds: float = 0.0
    failures: int = 0  # number of prompts and trees that could not be read

    def add(self, texts: int, nodes: int, tokens: int, seconds: float) -> None:
        columns = texts * nodes
        self.forwards += 1
        self.sizes[texts] = self.sizes.get(texts, 0) + 1
        self.tokens += tokens
        self.verify_seconds += seconds
        self.columns += columns
        self.columns_squared += columns**2
        self.columns_seconds += columns * seconds

    def worthwhile_columns(self) -> float:
        """Returns how many columns a forward should have at most, by the costs measured so far."""
        if self.forwards < _COSTS_KNOWN:
            return math.inf
        sums = self.columns, self.columns_squared, self.verify_seconds, self.columns_seconds
        fixed, column = fitted_line([self.forwards, *sums])
        return _DRAFTS_SHARE * fixed / column if column else math.inf


def fitted_line(counts: Sequence[float]) -> tuple[float, float]:
    """Fits seconds over columns by least squares; returns intercept and slope, neither negative.

    `counts`: number of forwards, and the sums of columns, their squares, seconds, and columns times seconds.
    """
    n, x, xx, t, xt = counts
    spread = n * xx - x * x
    slope = max((n * xt - x * t) / spread, 0.0) if n > 1 and spread > 0 else 0.0
    return max((t - slope * x) / max(n, 1), 0.0), slope


class MicroBatches:
    """The thread that runs the target. A tree with more columns than a forward may have is read alone."""

    def __init__(self, reader: TreeReader, limits: ServerLimits) -> None:
        self._reader, self._most, self._columns = reader, limits.max_batch, limits.max_columns
        self._wait, self._piece, self._arrivals = limits.wait_seconds, limits.piece, Arrivals()
        self._statistics, self._last_seconds = BatchStatistics(), 0.0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._prompts: deque[Job] = deque()
        self._trees: deque[Job] = deque()
        self._ended = False
        self._lock = new_lock()  # held to change `running`, and statistics
        self.running = True  # whether it takes jobs
        self._thread = threading.Thread(target=self._run, name="micro-batches", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job; its `done` is called on the thread, or here if the thread has ended."""
        with self._lock:
            if self.running:
                self._jobs.put(job)
                return
        job.done(_stopped())

    def close(self) -> None:
        """Ends the thread after the current forward."""
        self._jobs.put(None)
        self._thread.join()

    def status(self) -> dict[str, Any]:
        with self._lock:
            return dataclasses.asdict(self._statistics)

    def worthwhile_columns(self) -> float:
        with self._lock:
            return self._statistics.worthwhile_columns()

    def prompt_seconds(self, tokens: int) -> float:
        """Estimates how long `tokens` tokens of prompts take to read."""
        with self._lock:
            return tokens * self._statistics.prompt_seconds / max(self._statistics.prompt_tokens, 1)

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while not self._ended:
                    self._collect()
                    self._verify(self._batch())
                    if self._prompts:
                        self._read_piece(self._prompts.popleft())
        except BaseException as error:
            log_failure("the thread that runs the target has ended", error)
        finally:
            self._answer_all()

    def _answer_all(self) -> None:
        """Fails all jobs that still wait."""
        with self._lock:
            self.running = False
        left = [*self._trees, *self._prompts]
        while not self._jobs.empty():
            job = self._jobs.get()
            left += [] if job is None else [job]
        for job in left:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed
                job.done(_stopped())

    def _batch(self) -> list[Job]:
        """Takes waiting trees that fit into one forward, in order. The first one is always taken."""
        batch, largest, left = list[Job](), 0, deque[Job]()
        for job in self._trees:
            nodes = max(largest, len(job.tree or ()))
            if not batch or (len(batch) < self._most and (len(batch) + 1) * nodes <= self._columns):
                batch.append(job)
                largest = nodes
            else:
                left.append(job)
        self._trees = left
        return batch

    def _patience(self, now: float, deadline: float) -> float:
        if self._wait is None:
            known = self._arrivals.next(now, deadline)
            return 0.0 if known is None else max(known - now, 0.0)
        return max(deadline - now, 0.0) if self._arrivals.away else 0.0

    def _collect(self) -> None:
        """Takes the jobs that have come in; waits for the first one, and for others while that is worth it."""
        longest = _BATCH_WAIT * self._last_seconds if self._wait is None else self._wait
        deadline = None
        while not self._ended:
            waiting = len(self._trees)
            columns = waiting * max((len(job.tree or ()) for job in self._trees), default=0)
            full = waiting >= self._most or columns >= self._columns
            idle = not waiting and not self._prompts
            now = time.monotonic()
            if waiting and deadline is None:
                deadline = now + longest
            # Reading a prompt replaces the wait.
            left = 0.0 if full or self._prompts or deadline is None else self._patience(now, deadline)
            try:
                job = self._jobs.get(block=idle or left > 0.0, timeout=None if idle else left)
            except queue.Empty:
                if left > 0.0 and self._wait is None:
                    continue  # the expected text is late; another one may still be expected
                return
            if job is None:
                self._ended = True
            elif job.tree is None:
                self._prompts.append(job)
            else:
                self._arrivals.asked(job.text, job.came)
                self._trees.append(job)

    def _fair_piece(self) -> int:
        """Tokens of a prompt to read at once: while others decode, about as many as a few of their forwards take."""
        seconds = self.prompt_seconds(1)
        if not seconds or not (self._trees or self._arrivals.away):
            return self._piece
        return min(max(int(_FORWARDS_A_PIECE * self._last_seconds / seconds), _LEAST_PIECE), self._piece)

    def _read_piece(self, job: Job) -> None:
        """Reads the next piece of a prompt; after the last one, emits the first token."""
        text = job.text
        try:
            began, before = time.monotonic(), text.cache.get_seq_length()
            ids = text.unread[:, : self._fair_piece()]
            output = self._reader.read_prompt(text.cache, ids, text.taps)
            wanted = output.taps[0, text.wants_taps(before, before + ids.shape[1])]
            taps = packed_states(wanted) if text.taps else b""
            first = None
            if not text.unread.shape[1]:
                make_room(text.cache)
                token = text.begin(output.logits[0])
                first = Verified([token], 0, text.reach, text.finished, b"", 1, time.monotonic() - began)
        except Exception as error:
            self._fail(job, error)
            return
        with self._lock:
            self._statistics.prompt_tokens += ids.shape[1]
            self._statistics.prompt_seconds += time.monotonic() - began
        if first is not None:
            self._note_answer(text)
        job.done(PieceRead(taps, first))

    def _fail(self, job: Job, error: Exception) -> None:
        log_failure("a prompt could not be read" if job.tree is None else "a draft could not be verified", error)
        with self._lock:
            self._statistics.failures += 1
        self._arrivals.ended(job.text)
        job.done(error)

    def _note_answer(self, text: VerifiedText) -> None:
        if text.finished:
            self._arrivals.ended(text)
        else:
            self._arrivals.answered(text, time.monotonic())

    def _verify(self, jobs: Sequence[Job]) -> None:
        """Verifies trees in one forward. If it fails, each is retried alone, so no text suffers from another."""
        if not jobs:
            return
        trees = [job.tree for job in jobs if job.tree is not None]
        began = time.monotonic()
        try:
            read = self._reader.read([job.text.cache for job in jobs], trees, [job.text.taps for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error)
            else:
                log_failure(f"{len(jobs)} drafts could not be verified together, so each is by itself", error)
                for job in jobs:
                    self._verify([job])
            return
        outcomes: list[Any] = [self._judged(read, place, job) for place, job in enumerate(jobs)]
        seconds = self._last_seconds = time.monotonic() - began
        emitted = sum(len(each[0]) for each in outcomes if isinstance(each, tuple))
        with self._lock:
            self._statistics.add(len(jobs), max(map(len, trees)), emitted, seconds)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._fail(job, outcome)
                continue
            tokens, drafted, taps = outcome
            text = job.text
            self._note_answer(text)
            job.done(Verified(tokens, drafted, text.reach, text.finished, taps, len(jobs), seconds))

    def _judged(self, read: TreesRead, place: int, job: Job) -> tuple[list[int], int, bytes] | Exception:
        """Emits and keeps what is accepted of one tree; returns tokens, number drafted and packed hidden states."""
        assert job.tree is not None
        try:
            path, tokens, drafted = job.text.advance(job.tree, read.logits[place])
            read.keep(place, path)
            taps = packed_states(read.taps[place][[0, *path]]) if job.text.taps else b""
            return tokens, drafted, taps
        except Exception as error:
            return error


def _stopped() -> RuntimeError:
    return RuntimeError("the server is being stopped")
