"""Continuous batching with drafts: texts wait, are read, and are decoded together until each has ended.

Between rounds, texts that have ended leave, and prompts are read in parts, so no text waits for longer than one part.
First come, first served. A request that cannot share forwards (see `Prepared.why_alone`) is decoded as a call of its
own when it is its turn; the others wait for it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.refusals import DraftingRefused
from ..core.statistics import DraftStatistics
from ..core.tensors import device_of
from ..drafters.base.adapters import adapted
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Drafter
from ..engine.decoding import first_prompt, introduce
from ..engine.draft_limits import draft_size
from ..engine.drafting import history_for
from ..engine.loop import decode_round
from ..runtime.module_hooks import no_hooks_left
from .batch import Running
from .prefix_cache import PrefixCache
from .prepared import Prepared, prepare
from .text import Reading, Text

_MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class FinishedText:
    """A request that is done.

    Attributes:
        index: number of the request, in the order of `submit`.
        output: what `generate()` would return, without a cache; what there is of a cancelled text; None after an error.
        error: what `generate()` would raise.
        statistics: None where nothing could be drafted.
        cancelled: whether it ended by `cancel`.
        reused_tokens: number of tokens of its prompt that an earlier one had read.
    """

    index: int
    output: Any
    error: Exception | None = None
    statistics: DraftStatistics | None = None
    cancelled: bool = False
    reused_tokens: int = 0


@dataclass(frozen=True)
class _Request:
    index: int
    arguments: Mapping[str, Any]
    seed: int


@dataclass
class ContinuousBatching:
    """Decodes requests together, each by its own arguments of `generate()`, with the text that it has alone.

    Not for several threads at once; `submit` and `cancel` may be called from any.

    Args:
        target: the model.
        drafter: its drafter.
        max_batch_size: number of texts decoded together.
        chunk_size: number of tokens of prompts read between two rounds.
        max_cache_tokens: number of tokens that the cache may hold, rows times the longest text; None for no limit. A
            request waits until it fits, and one that can never fit has a ValueError as its `error`.
        prefix_cache_tokens: number of tokens of prompts whose keys, values and hidden states are held for prompts that
            begin like them; 0 for none. The target may not change then.

    Attributes:
        statistics: sums over all rounds; lists are empty.
        reused_tokens: number of tokens of prompts that were not read again.
        alone: number of requests decoded as calls of their own, by reason.
    """

    target: Any
    drafter: Drafter
    max_batch_size: int = 8
    chunk_size: int = 512
    max_cache_tokens: int | None = None
    prefix_cache_tokens: int = 4096
    statistics: DraftStatistics = field(default_factory=DraftStatistics)
    alone: dict[str, int] = field(default_factory=dict)
    reused_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("chunk_size", 1), ("prefix_cache_tokens", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r} is invalid: expected an integer of {least} or more")
        self._prefixes = PrefixCache(self.prefix_cache_tokens)
        self._take_options(DraftOptions.of(self.drafter))
        self._waiting, self._cancelled = deque[_Request](), set[int]()
        self._reading: tuple[_Request, Reading, Any] | None = None
        self._held: tuple[_Request, Prepared] | None = None  # the first that waits, until it fits
        self._texts: dict[int, Text] = {}  # being decoded, by number of request
        self._running: Running | None = None
        self._numbers, self._gone = itertools.count(), list[FinishedText]()

    def _take_options(self, options: DraftOptions) -> None:
        self._options = options
        self._drafter = adapted(self.drafter, options.adapter_name)
        self._history = history_for(self.drafter, self.target, options)

    @property
    def _places(self) -> int:
        return max(self.max_batch_size, 2)  # sessions of one row may read the call's only text

    @property
    def busy(self) -> bool:
        """Whether a request waits, is read or is decoded."""
        return bool(self._waiting or self._held or self._reading or self._texts or self._gone)

    @property
    def free(self) -> int:
        """Number of further requests that could be decoded at once."""
        begun = (self._reading is not None) + (self._held is not None)
        return self.max_batch_size - len(self._texts) - len(self._waiting) - begun

    @property
    def running(self) -> int:
        """Number of texts that are being decoded."""
        return len(self._texts)

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that the cache holds, rows times the longest text."""
        runtime = None if self._running is None else self._running.runtime
        return 0 if runtime is None else len(runtime.rows.kept) * runtime.length

    def submit(self, arguments: Mapping[str, Any], seed: int | None = None) -> int:
        """Adds a request; returns its number.

        Args:
            arguments: of `generate()`, with `input_ids` `[1, length]`; without an assistant.
            seed: of its random numbers: the text is that of `torch.manual_seed(seed)` and a call of `generate()`. Drawn
                from torch's generator by default.
        """
        index = next(self._numbers)
        seed = int(torch.randint(_MOST_SEED, (1,))) if seed is None else seed
        self._waiting.append(_Request(index, dict(arguments), seed))
        return index

    def refuse(self, error: Exception) -> int:
        """Adds a request that has no valid arguments; returns its number."""
        index = next(self._numbers)
        self._gone.append(FinishedText(index, None, error))
        return index

    def cancel(self, index: int) -> None:
        """Ends a request before the next round; `step` then returns what there is of its text."""
        self._cancelled.add(index)

    @torch.no_grad()
    def step(self) -> list[FinishedText]:
        """Reads a part of the waiting prompts and decodes one round; returns the requests that are done.

        An error of the round is that of all texts in it that have not ended; others are decoded in a new batch.
        """
        try:
            with no_hooks_left(self.target):
                self._drop_cancelled()
                joining, budget = list[Text](), self.chunk_size
                while budget > 0 and (self._reading or self._take_next()):
                    budget -= self._read(budget, joining)
                self._change(joining)
                running = self._running
                if running is not None and running.batch.goes_on():
                    decode_round(running.batch, running.drafting, [running.keeper])
            self._collect()
            if not self._texts:
                self._change([])  # frees the cache
        except Exception as error:
            if not self._texts:
                raise
            for text in self._texts.values():
                text.error = text.error if text.ended else error
            self._collect()
            self._drop_batch()
        done, self._gone = self._gone, []
        return done

    def close(self) -> None:
        """Frees what is held; texts that have not ended are lost."""
        self._waiting.clear()
        self._gone.clear()
        self._texts.clear()
        self._held = self._reading = None
        self._prefixes = PrefixCache(self.prefix_cache_tokens)
        self._drop_batch()

    def _drop_batch(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.resources.close()

    def _take_next(self) -> bool:
        """Takes the first waiting request, if there is a place; returns whether there was one."""
        if self._held is None and self._waiting and len(self._texts) < self.max_batch_size:
            request = self._waiting.popleft()
            try:
                with self._seeded(request):
                    prepared = prepare(self.target, self.drafter, request.arguments)
                if isinstance(prepared, Prepared):
                    _ = prepared.options  # an invalid one is this request's error
                    self._held = request, prepared
                else:  # beams and the like
                    self._count_alone("it decodes by another method than sampling or greedy search")
                    self._end(request, prepared)
                    return True
            except Exception as error:
                self._end(request, error=error)
                return True
        if self._held is None or len(self._texts) >= self.max_batch_size or not self._fits(self._held[1]):
            return False
        (request, prepared), self._held = self._held, None
        try:
            self._begin(request, prepared)
        except Exception as error:
            self._end(request, error=error)
        return True

    def _fits(self, prepared: Prepared) -> bool:
        """Whether a text fits in beside those being decoded: in the cache, with its options and its own objects."""
        lengths = [each.prepared.config.max_length for each in self._texts.values()]
        longest = max([prepared.config.max_length, *lengths])
        if not self._texts:  # one that can never fit is refused by `_begin`
            return True
        if prepared.options != self._options:
            return False
        if any(prepared.with_state & each.prepared.with_state for each in self._texts.values()):
            return False
        return self.max_cache_tokens is None or (len(lengths) + 1) * longest <= self.max_cache_tokens

    def _begin(self, request: _Request, prepared: Prepared) -> None:
        length, most = prepared.config.max_length, self.max_cache_tokens
        if most is not None and length > most:
            raise ValueError(f"a text of up to {length} tokens does not fit: expected at most max_cache_tokens={most}")
        if prepared.options != self._options:
            self._take_options(prepared.options)
        try:
            verifier = prepared.verifier()
            tokens = first_prompt(prepared.input_ids, prepared.model_kwargs)
            introduce(self._drafter, self.target, prepared.call.get("tokenizer"), False, tokens)
        except DraftingRefused as refusal:
            self._decode_alone(request, prepared, str(refusal))
            return
        columns = self._places * (self._options.tree_size + 1)
        why = prepared.why_alone(verifier, columns)
        if why:
            self._decode_alone(request, prepared, why)
            return
        taps = sorted({*self._drafter.taps_of(self.target), *verifier.taps})
        self._reading = request, Reading(prepared, taps, self._prefixes), verifier

    def _decode_alone(self, request: _Request, prepared: Prepared, why: str) -> None:
        self._count_alone(why)
        statistics = DraftStatistics()
        with self._seeded(request):
            try:
                output = prepared.alone(statistics)
            except Exception as error:
                self._end(request, error=error)
            else:
                self._end(request, output, statistics=statistics if statistics.target_forwards else None)

    @contextlib.contextmanager
    def _seeded(self, request: _Request) -> Iterator[None]:
        """Draws inside by the request's seed, and afterwards goes on where torch's generators were."""
        device = device_of(self.target)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(request.seed)
            yield

    def _count_alone(self, why: str) -> None:
        self.alone[why] = self.alone.get(why, 0) + 1

    def _read(self, most: int, joining: list[Text]) -> int:
        """Reads on in the prompt that is being read; returns the number of tokens."""
        if self._reading is None:
            return 0
        request, reading, verifier = self._reading
        before = reading.read
        try:
            reading.go_on(most)
            if not reading.left:
                self._reading = None
                text = Text(reading, verifier, request.seed)
                if why := text.why_alone(draft_size(self._options, self._places)):
                    self._decode_alone(request, reading.prepared, why)
                else:
                    reading.remember()
                    self.reused_tokens += text.reused
                    text.begin()
                    self._texts[request.index] = text
                    if not text.ended:
                        joining.append(text)
        except Exception as error:
            self._reading = None
            self._end(request, error=error)
        return max(reading.read - before, 1)

    def _change(self, joining: list[Text]) -> None:
        """Lets texts join and leave the batch."""
        if self._running is None:
            if not joining:
                return
            own = self.target, self._drafter, self._options, self._places, self._history
            self._running = Running.of(*own, joining.pop(0), self.statistics)
        running = self._running
        running.batch.change(running.drafting, joining)
        if not running.batch.rows:
            self._running = None
            running.end()

    def _drop_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        gone = [each for each in list(self._waiting) if each.index in cancelled]
        for request in gone:
            self._waiting.remove(request)
        if self._held is not None and self._held[0].index in cancelled:
            gone.append(self._held[0])
            self._held = None
        if self._reading is not None and self._reading[0].index in cancelled:
            gone.append(self._reading[0])
            self._reading = None
        self._gone += [FinishedText(each.index, None, cancelled=True) for each in gone]
        for index in cancelled & self._texts.keys():
            self._texts[index].cancelled = True

    def _collect(self) -> None:
        """Takes texts that have ended out; they leave the batch before the next round."""
        for index, text in [(index, text) for index, text in self._texts.items() if text.ended]:
            del self._texts[index]
            output = None
            try:
                output = text.finish()
                if self._history is not None and text.error is None:
                    self._history.remember([text.prompt_and_answer])
            except Exception as error:
                text.error = text.error or error
            output = None if text.error is not None else output
            self._gone.append(FinishedText(index, output, text.error, text.statistics, text.cancelled, text.reused))

    def _end(
        self,
        request: _Request,
        output: Any = None,
        error: Exception | None = None,
        statistics: DraftStatistics | None = None,
    ) -> None:
        self._gone.append(FinishedText(request.index, output, error, statistics))
