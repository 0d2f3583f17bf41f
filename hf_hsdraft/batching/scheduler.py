"""Continuous batching with drafts: texts wait, are read, and are decoded together until each has ended.

Between rounds, texts that have ended leave, and prompts are read in parts, so no text waits for longer than one part.
First come, first served. A request that cannot share forwards (see `Prepared.why_alone`) is decoded as a separate
call when it is its turn; the others wait for it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging

from ..core.refusals import DraftingRefused
from ..core.tensors import device_of
from ..drafters.base.draft_options import DraftOptions, adapted
from ..drafters.base.protocol import Drafter
from ..engine.draft_limits import draft_size
from ..engine.drafting import history_for
from ..engine.loop import decode_round
from ..generate.attachment import Attachment
from ..gpu.varying_shapes import varying_shapes
from ..runtime.module_hooks import no_hooks_left
from .batch import Running
from .prefix_cache import PrefixCache
from .requests import FinishedText, Prepared, Request, Tally, prepare
from .text import Reading, Text, read_on

logger = logging.get_logger(__name__)


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
        attachment: counts what was drafted.

    Attributes:
        tally: has the `statistics` of the requests that are done; a forward over several counts once.
        reused_tokens: number of tokens of prompts that were not read again.
        alone: number of requests decoded as separate calls, by reason.
    """

    target: Any
    drafter: Drafter
    max_batch_size: int = 8
    chunk_size: int = 512
    max_cache_tokens: int | None = None
    prefix_cache_tokens: int = 4096
    attachment: Attachment | None = None
    alone: Counter[str] = field(default_factory=Counter)
    reused_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("chunk_size", 1), ("prefix_cache_tokens", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r} is invalid: expected an integer of {least} or more")
        self.tally = Tally(self.attachment)
        self._places = max(self.max_batch_size, 2)  # sessions of one row may read the call's only text
        self._prefixes = PrefixCache(self.prefix_cache_tokens)
        self._take_options(DraftOptions.of(self.drafter))
        self._waiting, self._cancelled = deque[Request](), set[int]()
        self._reading: list[tuple[Request, Reading, Any]] = []  # prompts, in order
        self._held: tuple[Request, Prepared] | None = None  # the first that waits, until it fits
        self._texts: dict[int, Text] = {}  # being decoded, by number of request
        self._undrafted = deque[Text]()  # all of these, one after another, once drafts are refused
        self._running: Running | None = None
        self._numbers, self._gone = itertools.count(), list[FinishedText]()

    def _take_options(self, options: DraftOptions) -> None:
        self._options = options
        self._drafter = adapted(self.drafter, options.adapter_name)
        self._history = history_for(self.drafter, self.target, options)

    @property
    def busy(self) -> bool:
        """Whether a request waits, is read or is decoded."""
        return bool(self._waiting or self._held or self._reading or self._texts or self._gone)

    @property
    def free(self) -> int:
        """Number of further requests that could be decoded at once."""
        begun = len(self._reading) + (self._held is not None)
        return self.max_batch_size - len(self._texts) - len(self._waiting) - begun

    @property
    def running(self) -> int:
        """Number of texts that are being decoded."""
        return len(self._texts)

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that the cache holds, rows times the longest text."""
        return 0 if (own := self._running) is None else len(own.runtime.rows.kept) * own.runtime.length

    def submit(self, arguments: Mapping[str, Any], seed: int | None = None) -> int:
        """Adds a request; returns its number.

        Args:
            arguments: of `generate()`, with `input_ids` `[1, length]`; without an assistant.
            seed: of its random numbers: the text is that of `torch.manual_seed(seed)` and a call of `generate()`. Drawn
                from torch's generator by default.
        """
        index = next(self._numbers)
        seed = int(torch.randint(2**63 - 1, (1,))) if seed is None else seed
        self._waiting.append(Request(index, dict(arguments), seed))
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

        An error of the round is that of all texts in it that have not ended; others are decoded in a new batch. Where
        the target turns out to read no drafts, they continue without, one after another.
        """
        began = time.perf_counter()
        try:
            with no_hooks_left(self.target), varying_shapes(device_of(self.target)):
                self._drop_cancelled()
                self._change(self._read_prompts())
                running = self._running
                if running is not None and running.batch.goes_on():
                    decode_round(running.batch, running.drafting, [running.keeper])
            self._collect()
            if not self._texts:
                self._change([])  # frees the cache
        except Exception as error:
            if not self._texts:
                raise
            self._set_aside(error)
        done, self._gone = self._gone, []
        return self.tally.ended(done, time.perf_counter() - began)

    def _set_aside(self, error: Exception) -> None:
        """Ends the batch after an error of a round, which is its texts' unless they can continue without drafts."""
        drafted = not self._undrafted
        for text in self._texts.values() if drafted else [self._undrafted[0]]:
            if drafted and isinstance(error, DraftingRefused):
                text.statistics.draft_kind, text.statistics.reason = "chain", str(error)
            elif not text.ended:
                text.error = error
        self._collect()
        self._drop_batch()
        self._undrafted = deque(self._texts.values())

    def close(self) -> None:
        """Frees what is held; texts that have not ended are lost."""
        for each in (self._waiting, self._gone, self._texts, self._reading, self._undrafted):
            each.clear()
        self._held = None
        self._prefixes = PrefixCache(self.prefix_cache_tokens)
        self._drop_batch()

    def _drop_batch(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.resources.close()

    def _take_next(self) -> bool:
        """Takes the first waiting request, if there is a place; returns whether there was one."""
        full = len(self._texts) + len(self._reading) >= self.max_batch_size
        if self._held is None and self._waiting and not full:
            request = self._waiting.popleft()
            try:
                with request.seeded(device_of(self.target)):
                    prepared = prepare(self.target, self.drafter, request.arguments)
                if isinstance(prepared, Prepared):
                    _ = prepared.options  # an invalid one is this request's error
                    self._held = request, prepared
                else:  # beams and the like
                    self.alone["it decodes by another method than sampling or greedy search"] += 1
                    self._gone.append(FinishedText(request.index, prepared))
                    return True
            except Exception as error:
                self._gone.append(FinishedText(request.index, None, error))
                return True
        others = [*(each.prepared for each in self._texts.values()), *(each.prepared for _, each, _ in self._reading)]
        if self._held is None or full or not self._held[1].fits_beside(others, self.max_cache_tokens):
            return False
        (request, prepared), self._held = self._held, None
        try:
            self._begin(request, prepared)
        except Exception as error:
            self._gone.append(FinishedText(request.index, None, error))
        return True

    def _begin(self, request: Request, prepared: Prepared) -> None:
        length, most = prepared.config.max_length, self.max_cache_tokens
        if most is not None and length > most:
            raise ValueError(f"a text of up to {length} tokens does not fit: expected at most max_cache_tokens={most}")
        if prepared.options != self._options:
            self._take_options(prepared.options)
        try:
            verifier = prepared.verifier(self._drafter)
        except DraftingRefused as refusal:
            self._decode_alone(request, prepared, str(refusal))
            return
        columns = self._places * (self._options.tree_size + 1)
        if why := prepared.why_alone(verifier, columns):
            self._decode_alone(request, prepared, why)
            return
        taps = sorted({*self._drafter.taps_of(self.target), *verifier.taps})
        self._reading.append((request, Reading(prepared, taps, self._prefixes), verifier))

    def _decode_alone(self, request: Request, prepared: Prepared, why: str) -> None:
        self.alone[why] += 1
        logger.warning_once(f"Not decoded together with other texts: {why}.")
        self._gone.append(request.alone(prepared, self.tally))

    def _read_prompts(self) -> list[Text]:
        """Reads on in prompts, up to `chunk_size` tokens; returns the texts whose prompts are read."""
        joining, budget = list[Text](), 0 if self._undrafted else self.chunk_size
        while budget > 0:
            while self._take_next():
                pass
            if not self._reading:
                break
            try:
                budget -= read_on([reading for _, reading, _ in self._reading], budget)
            except Exception as error:  # of the first, which is read by itself where reading several fails
                request, *_ = self._reading.pop(0)
                self._gone.append(FinishedText(request.index, None, error))
            done = [each for each in self._reading if not each[1].left]
            self._reading = [each for each in self._reading if each[1].left]
            joining += [text for each in done if (text := self._begun(*each)) is not None]
        return joining

    def _begun(self, request: Request, reading: Reading, verifier: Any) -> Text | None:
        """The text whose prompt has been read, with its first token; None if it does not join the batch."""
        try:
            text = Text(reading, verifier, request.seed)
            if why := text.why_alone(draft_size(self._options, self._places)):
                self._decode_alone(request, reading.prepared, why)
                return None
            reading.remember()
            self.reused_tokens += text.reused
            text.begin()
        except Exception as error:
            self._gone.append(FinishedText(request.index, None, error))
            return None
        self.tally.took(text.statistics)
        self._texts[request.index] = text
        return None if text.ended else text

    def _change(self, joining: list[Text]) -> None:
        """Lets texts join and leave the batch."""
        if self._running is None:
            if not self._undrafted and not joining:
                return
            first = self._undrafted[0].read_again() if self._undrafted else joining.pop(0)
            own = self.target, self._drafter, self._options, self._places, self._history
            self._running = Running.of(*own, first, self.tally, drafts=not self._undrafted)
        running = self._running
        running.batch.change(running.drafting, joining)
        if not running.batch.rows:
            self._running = None
            running.end()

    def _drop_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        begun = [request for request, *_ in self._reading] + ([] if self._held is None else [self._held[0]])
        gone = [each for each in (*self._waiting, *begun) if each.index in cancelled]
        for request in set(gone).difference(begun):
            self._waiting.remove(request)
        self._held = None if self._held is not None and self._held[0] in gone else self._held
        self._reading = [each for each in self._reading if each[0] not in gone]
        self._gone += [FinishedText(each.index, None, cancelled=True) for each in gone]
        for index in cancelled & self._texts.keys():
            self._texts[index].cancelled = True

    def _collect(self) -> None:
        """Takes texts that have ended out; they leave the batch before the next round."""
        for index, text in [(index, text) for index, text in self._texts.items() if text.ended]:
            del self._texts[index]
            self._gone.append(text.finished(index, self._history))
        self._undrafted = deque(text for text in self._undrafted if not text.ended)
