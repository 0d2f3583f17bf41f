"""Micro-batches: the one thread that runs the target, for as many waiting texts at once as may share a forward.

A batch is read when it is full, when every text that may still ask has asked, or when the first one has waited long
enough. Prompts are read one after the other, in pieces, between two batches: a long prompt delays nobody for long.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..trees.draft_tree import DraftTree
from .joined_cache import grown
from .packing import packed_states
from .tree_reader import TreeReader, TreesRead
from .verified_text import VerifiedText


@dataclass(frozen=True)
class Verified:
    """What became of a tree.

    Attributes:
        tokens: emitted.
        drafted: number of these that the tree held.
        reach: how deep the next draft may be.
        finished: whether the text has ended.
        taps: hidden states of the positions read, as they are sent.
        batch: number of texts in the forward.
        seconds: that it took.
    """

    tokens: list[int]
    drafted: int
    reach: int
    finished: bool
    taps: bytes
    batch: int
    seconds: float


@dataclass(frozen=True)
class Job:
    """Something that a text waits for.

    Attributes:
        text: the text.
        tree: to verify; `None` to read the prompt and emit the first token.
        piece: told of each piece of the prompt, with the hidden states that are wanted of it.
        done: told of the outcome: what became of the tree, or the error.
        gone: whether nobody waits any more: a prompt is not read on then.
    """

    text: VerifiedText
    tree: DraftTree | None
    done: Callable[[Verified | Exception], None]
    piece: Callable[[bytes], None] = lambda states: None
    gone: Callable[[], bool] = lambda: False


@dataclass
class BatchStatistics:
    """What the thread did since it began.

    Attributes:
        forwards: number of verifying forwards.
        sizes: number of forwards by number of texts.
        tokens: emitted.
        prompt_tokens: read of prompts; prompt_seconds: that this took.
        verify_seconds: of all verifying forwards, keeping what is accepted included.
        columns, columns_squared, columns_seconds: sums over forwards: of their texts times the nodes of the largest
            tree, of the square of that, and of its product with the seconds. A line of costs is fitted to them.
    """

    forwards: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    verify_seconds: float = 0.0
    columns: int = 0
    columns_squared: int = 0
    columns_seconds: float = 0.0

    def add(self, texts: int, nodes: int, tokens: int, seconds: float) -> None:
        """Counts a verifying forward."""
        columns = texts * nodes
        self.forwards += 1
        self.sizes[texts] = self.sizes.get(texts, 0) + 1
        self.tokens += tokens
        self.verify_seconds += seconds
        self.columns += columns
        self.columns_squared += columns**2
        self.columns_seconds += columns * seconds


class MicroBatches:
    """The thread that runs the target.

    Args:
        reader: of the target.
        most: greatest number of texts in a forward.
        wait_seconds: how long the first text of a batch waits for others.
        expected: returns how many texts may still ask, those that have asked included.
        piece: number of tokens of a prompt that are read at once.
    """

    def __init__(
        self, reader: TreeReader, most: int, wait_seconds: float, expected: Callable[[], int], piece: int = 512
    ) -> None:
        self._reader, self._most, self._wait, self._expected = reader, most, wait_seconds, expected
        self._piece = piece
        self.statistics = BatchStatistics()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._prompts: deque[Job] = deque()
        self._trees: deque[Job] = deque()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="micro-batches", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job; its `done` is called on the thread."""
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread, after the forward that is running."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.no_grad():
            while not self._ended:
                self._collect()
                self._verify([self._trees.popleft() for _ in range(min(self._most, len(self._trees)))])
                if self._prompts:
                    self._read_piece(self._prompts[0])
        for job in (*self._trees, *self._prompts):
            with contextlib.suppress(RuntimeError):  # nobody may listen any more
                job.done(RuntimeError("the server is being stopped"))

    def _collect(self) -> None:
        """Takes the jobs that have come in; waits for the first one, and for others as long as that is worth it."""
        deadline = None
        while not self._ended:
            waiting = len(self._trees)
            full = waiting >= min(self._most, max(self._expected(), 1))
            idle = not waiting and not self._prompts
            if waiting and deadline is None:
                deadline = time.monotonic() + self._wait
            # A prompt fills the time in which others may ask.
            left = 0.0 if full or self._prompts or deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                job = self._jobs.get(block=idle or left > 0.0, timeout=None if idle else left)
            except queue.Empty:
                return
            if job is None:
                self._ended = True
            else:
                (self._prompts if job.tree is None else self._trees).append(job)

    def _read_piece(self, job: Job) -> None:
        """Reads a piece of the first prompt; after the last one its text goes on."""
        text = job.text
        if job.gone():
            self._prompts.popleft()
            job.done(ConnectionAbortedError("the device has gone"))
            return
        try:
            began, before = time.monotonic(), text.cache.get_seq_length()
            ids = text.unread[:, : self._piece]
            output = self._reader.read_prompt(text.cache, ids, text.taps)
            wanted = output.taps[0, text.wants_taps(before, before + ids.shape[1])]
            states = packed_states(wanted) if text.taps else b""
            self.statistics.prompt_tokens += ids.shape[1]
            self.statistics.prompt_seconds += time.monotonic() - began
            if states:
                job.piece(states)
            if text.unread.shape[1]:
                return
            self._prompts.popleft()
            grown(text.cache)
            token = text.begin(output.logits[0])
            job.done(Verified([token], 0, text.reach, text.finished, b"", 1, time.monotonic() - began))
        except Exception as error:
            if self._prompts and self._prompts[0] is job:
                self._prompts.popleft()
            job.done(error)

    def _verify(self, jobs: Sequence[Job]) -> None:
        """Verifies trees in one forward. If it fails, each is tried alone: no text suffers from another one."""
        if not jobs:
            return
        trees = [job.tree for job in jobs if job.tree is not None]
        began = time.monotonic()
        try:
            read = self._reader.read([job.text.cache for job in jobs], trees, [job.text.taps for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].done(error)
            else:
                for job in jobs:
                    self._verify([job])
            return
        outcomes: list[Any] = [self._judged(read, place, job) for place, job in enumerate(jobs)]
        seconds = time.monotonic() - began
        emitted = sum(len(each[0]) for each in outcomes if isinstance(each, tuple))
        self.statistics.add(len(jobs), max(map(len, trees)), emitted, seconds)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, tuple):
                tokens, drafted, taps = outcome
                text = job.text
                outcome = Verified(tokens, drafted, text.reach, text.finished, taps, len(jobs), seconds)
            job.done(outcome)

    def _judged(self, read: TreesRead, place: int, job: Job) -> tuple[list[int], int, bytes] | Exception:
        """Emits and keeps what is accepted of one tree: its tokens, how many were drafted, and their hidden states."""
        assert job.tree is not None
        try:
            path, tokens, drafted = job.text.advance(job.tree, read.logits[place])
            read.keep(place, path)
            taps = packed_states(read.taps[place][[0, *path]]) if job.text.taps else b""
            return tokens, drafted, taps
        except Exception as error:
            return error
