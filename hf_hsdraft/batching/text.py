"""One text of a running batch: it grows by the rules of its own request, whatever the others do."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from ..core.cache_name import CACHE
from ..core.draft_tree import DraftTree
from ..core.statistics import DraftStatistics
from ..core.tensors import device_of
from ..core.tuning import MOST_KNOWN
from ..drafters.base.protocol import Accepted
from ..engine.call_output import as_output, named_target
from ..engine.decoded_texts import DecodedTexts
from ..runtime.findings import Size, find_out
from ..runtime.module_hooks import fingerprint, has_foreign_hooks
from ..runtime.target_limits import furthest_read
from ..runtime.target_runtime import TargetRuntime
from ..runtime.tree_reading import TargetOutput, TextRows, picked_taps
from ..verify.verdict import Verdict, Verifier
from .prefix_cache import PrefixCache
from .requests import FinishedText, Prepared

_SHORT = 32  # tokens of a prompt; first tokens of longer ones come sooner one after another
_PADDED = 1.25  # tokens read together, padding included, for each token of the prompts


@dataclass
class Reading:
    """A prompt that is read in parts, so that the other texts do not wait for all of it.

    Attributes:
        read: number of tokens read so far, by this prompt or an earlier one.
        reused: number of tokens that an earlier prompt read.
        taps: of each part, the hidden states `[1, n, taps * D]` that drafter and rule read.
    """

    prepared: Prepared
    taps_wanted: list[int]
    prefixes: PrefixCache
    read: int = 0
    reused: int = 0
    taps: list[torch.Tensor] = field(default_factory=list)
    runtime: TargetRuntime | None = None
    output: TargetOutput | None = None
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        kwargs, ids = self.prepared.model_kwargs, self.prepared.input_ids[0].tolist()
        self._cache = copy.deepcopy(kwargs.get(CACHE))  # the request may yet be decoded alone, with its own
        settings = sorted((name, each) for name, each in kwargs.items() if isinstance(each, bool | int | float | str))
        self._kind, self._ids = (_state_of(self.prepared.target), tuple(self.taps_wanted), *settings), ids
        self._whole = self.prepared.config.prefill_chunk_size is not None  # as the call asks

    @property
    def left(self) -> int:
        return self.prepared.input_ids.shape[1] - self.read

    def begin(self) -> None:
        """Takes over what an earlier prompt has read."""
        if not self.read and not self._whole:
            self.taps = self.prefixes.fill(self._kind, self._ids[:-1], self._cache)
            self.read = self.reused = sum(each.shape[1] for each in self.taps)

    def go_on(self, most: int) -> None:
        """Reads up to `most` further tokens; all that is left at once if the call asks for parts of its own size."""
        prepared, begin = self.prepared, self.read
        end = begin + (self.left if self._whole else min(self.left, most))
        kwargs, config = prepared.model_kwargs, copy.copy(prepared.config)
        for name in ("attention_mask", "position_ids"):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :end]
        config._mask_length = end
        kwargs[CACHE] = self._cache if self.runtime is None else self.runtime.cache
        self.runtime = TargetRuntime(prepared.target, self.taps_wanted, kwargs)
        with self.runtime.released_on_error():
            self.output = self.runtime.prefill(prepared.input_ids[:, :end], config)
        self.taps.append(self.output.taps)
        self.read = end

    def goes_with(self, others: Sequence[Reading], most: int) -> bool:
        """Whether it is read in one forward with others, which takes less time for short prompts of similar lengths.

        Not with prompts that begin like it: it waits for what they leave.
        """
        if self.read or self._whole or any(each.read or each._kind != self._kind for each in others):
            return False
        known = self.prefixes.known(self._kind, self._ids[:-1])
        if any(each.prefixes.known(self._kind, each._ids[:-1]) != known for each in others):
            return False
        if any(self.prefixes.shared(self._ids[known:], each._ids[known:]) for each in others):
            return False
        lengths = [each.left - known for each in (*others, self)]
        return max(lengths) <= _SHORT and len(lengths) * max(lengths) <= min(most, _PADDED * sum(lengths))

    def remember(self) -> None:
        """Lets later prompts begin with what has been read."""
        assert self.runtime is not None
        self.prefixes.keep(self._kind, self._ids, self.runtime.cache, torch.cat(self.taps, dim=1))


def read_on(readings: Sequence[Reading], most: int) -> int:
    """Reads up to `most` further tokens of the first prompt, or of several at once; returns their number."""
    first, together = readings[0], [readings[0]]
    for each in readings[1:] if first.goes_with([], most) else ():
        if each.goes_with(together, most):
            together.append(each)
    for each in together:
        each.begin()
    before = sum(each.read for each in together)
    alone = len(together) == 1
    if not alone:
        try:
            _read_together(together, first.read)
        except Exception:  # which may be that of another prompt
            alone = True
    if alone:
        first.go_on(most)
    return sum(each.read for each in together) - before


def _read_together(readings: Sequence[Reading], begin: int) -> None:
    """Reads all that follows the first `begin` tokens of prompts in one forward, with padding there, and parts them."""
    first, prompts = readings[0].prepared, [each.prepared.input_ids for each in readings]
    longest = max(ids.shape[1] for ids in prompts)
    pads = [longest - ids.shape[1] for ids in prompts]

    def padded(values: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = zip(values, pads, strict=True)
        return torch.cat([torch.cat([each[:, :begin], F.pad(each[:, begin:], (pad, 0))], dim=1) for each, pad in parts])

    mask = padded([torch.ones_like(ids) for ids in prompts])
    caches: list[Any] = [copy.deepcopy(each._cache) for each in readings]
    for layers in zip(*(each.layers for each in caches), strict=True) if begin else ():
        for name in ("keys", "values"):
            setattr(layers[0], name, torch.cat([getattr(each, name) for each in layers]))
    kwargs = {**first.model_kwargs, CACHE: caches[0], "attention_mask": mask}
    kwargs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    config = copy.copy(first.config)
    config._mask_length = longest
    whole = TargetRuntime(first.target, readings[0].taps_wanted, kwargs)
    output = whole.prefill(padded(prompts), config)
    for place, (each, pad) in enumerate(zip(readings, pads, strict=True)):
        each.runtime = _apart(whole, place, range(begin, begin + pad))
        each.output = TargetOutput(output.logits[place : place + 1], output.taps[place : place + 1, pad:])
        each.taps.append(each.output.taps)
        each.read = longest - pad


def _apart(whole: TargetRuntime, place: int, padding: range) -> TargetRuntime:
    """A runtime of one text of several whose prompts were read, without the slots of its `padding`."""
    own, device = whole.apart_of([place]), device_of(whole.target)
    for layer in own.slots.layers:
        layer.keys, layer.values = (
            torch.cat([states[:, :, : padding.start], states[:, :, padding.stop :]], dim=2)
            for states in (layer.keys, layer.values)
        )
    further = own.kwargs[own.names.mask].shape[-1] - len(padding)
    own.kwargs[own.names.mask] = torch.ones(1, further, dtype=torch.int64, device=device)
    own.kwargs[own.names.positions] = torch.arange(further, device=device)[None]
    own.kwargs[CACHE] = own.slots.cache
    own.num_texts, own.rows = 1, TextRows.of_slots([own.length], device)
    return own


def _state_of(target: Any) -> tuple[Any, ...]:
    """What a target's keys and values depend on besides its inputs, as far as it may change between prompts."""
    device = device_of(target).type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    versions = tuple((id(each), 0 if each.is_inference() else each._version) for each in target.parameters())
    return fingerprint(target), cast, hash(versions)


class Text:
    """A text whose prompt has been read.

    Attributes:
        decoded: what it has got so far; row 0 is the text.
        root: position of its last token.
        error: what its processors, criteria or streamer have raised; then it is not decoded further.
        cancelled: whether it is not wanted any more.
        reused: number of tokens of its prompt that were not read again.
    """

    def __init__(self, reading: Reading, verifier: Verifier, seed: int) -> None:
        prepared, runtime, output = reading.prepared, reading.runtime, reading.output
        assert runtime is not None and output is not None
        self.prepared, self.cancelled, self.reused = prepared, False, reading.reused
        self.runtime: TargetRuntime | None = runtime
        self.error: Exception | None = None
        call, ids = prepared.call, prepared.input_ids
        rules = call["logits_processor"], call["stopping_criteria"]
        self.decoded = DecodedTexts(ids, prepared.config, *rules, call.get("streamer"), verifier)
        target = prepared.target
        self.statistics = DraftStatistics(drafter=type(prepared.drafter).__name__, target=named_target(target))
        self.statistics.target_forwards = self.statistics.row_forwards = 1
        self.root, self.emitted, self._began = runtime.length, list[int](), reading.began
        self._tap_layers = reading.taps_wanted
        self._taps = torch.cat(reading.taps, dim=1)[0]
        self.decoded.foresee(output.logits.shape[-1], torch.Generator(ids.device).manual_seed(seed))
        self._logits = output.logits[0, -1:]
        self._rule_taps = picked_taps(output.taps[0, -1:], runtime.tap_layers, verifier.taps)

    def why_alone(self, size: Size) -> str:
        """Why it cannot join a batch with drafts of this size; tries what is unknown. Empty if it can."""
        runtime, ids = self.runtime, self.prepared.input_ids
        assert runtime is not None
        if has_foreign_hooks(runtime.target):
            return "hooks of its modules may depend on the row"
        if not runtime.rows_can_be_apart:
            return "its cache or its inputs are not known to have rows that can be told apart"
        if runtime.refusal is not None:
            return str(runtime.refusal)
        guessed = torch.cat([ids, self._logits.argmax(dim=-1).to(ids)[None]], dim=1)  # with a likely token
        found = find_out(runtime, guessed, size, furthest_read(runtime.target, self.root) - self.root)
        if found is None:
            return "it is too close to the last position that its target has"
        return "" if found.trees else found.reason

    def begin(self) -> None:
        """Chooses the first token."""
        tree = DraftTree.root(-1)
        self.emit(tree, self.judge(tree, self._logits, self._rule_taps))
        self.stream()
        self._logits, self._rule_taps = self._logits[:0], self._rule_taps[:0]

    def read_again(self) -> Text:
        """Reads all but the last token again, for a batch of this text alone; returns the text."""
        ids = self.decoded.ids.of(0)[:, :-1]
        more = {
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ids.shape[1], device=ids.device)[None],
        }
        prepared = replace(self.prepared, input_ids=ids, call={**self.prepared.call, **more})
        reading = Reading(prepared, self._tap_layers, PrefixCache(0))
        reading.go_on(ids.shape[1])
        self.runtime, self.root, self._taps = reading.runtime, ids.shape[1], reading.taps[0][0]
        self.statistics.target_forwards += 1
        self.statistics.row_forwards += 1
        return self

    @property
    def ended(self) -> bool:
        return self.cancelled or self.error is not None or not self.decoded.active

    def handed_over(self) -> TargetRuntime:
        """Returns the runtime that has read the prompt, and drops it: the batch then holds its keys and values."""
        runtime, self.runtime = self.runtime, None
        assert runtime is not None
        return runtime

    def judge(self, tree: DraftTree, logits: torch.Tensor, taps: torch.Tensor) -> Verdict:
        """As `DecodedTexts.judge`; an error ends this text alone."""
        verdict = self._tried(lambda: self.decoded.judge(0, tree, logits, taps))
        return Verdict([], max(tree.tokens[0], 0), True, 0) if verdict is None else verdict

    def emit(self, tree: DraftTree, verdict: Verdict) -> None:
        if self.error is None:
            self._tried(lambda: self.decoded.emit(0, tree, verdict))
        self.emitted = [verdict.next_token] if self.error is not None else self.decoded.rows[0].emitted

    def stream(self) -> None:
        if self.error is None:
            self._tried(self.decoded.stream)

    def prune(self, tree: DraftTree) -> DraftTree:
        found = self._tried(lambda: self.decoded.prune(0, tree))
        return DraftTree.root(tree.tokens[0]) if found is None else found

    def _tried(self, step: Callable[[], Any]) -> Any:
        """Returns what a step returns; notes its error."""
        try:
            return step()
        except Exception as error:
            self.error = error
            return None

    def news_of_prompt(self, row: int, pick: Callable[[torch.Tensor], torch.Tensor]) -> Accepted:
        """The prompt's hidden states with the tokens that follow, for the drafter; `pick` selects its own."""
        ids, taps = self.decoded.ids.of(0)[0], pick(self._taps)
        self._taps = self._taps[:0]
        places, known = torch.arange(self.root - len(taps), self.root), ids[:-1][-MOST_KNOWN:].tolist()
        return Accepted(row, [self.decoded.last_token(0)], taps, places, ids[-len(taps) :], known)

    def finished(self, index: int, history: Any) -> FinishedText:
        """Ends it as request `index`; the `history` remembers it, if there is one."""
        output = None
        try:
            output = self._output()
            if history is not None and self.error is None:
                ids, begin = self.decoded.ids.of(0)[0].tolist(), self.decoded.prompt_length
                history.remember([(ids[:begin], ids[begin : begin + self.decoded.new_tokens(0)])])
        except Exception as error:
            self.error = self.error or error
        output = None if self.error is not None else output
        return FinishedText(index, output, self.error, self.statistics, self.cancelled, self.reused)

    def _output(self) -> Any:
        """Ends the stream; returns what `generate()` would, without a cache: `[1, length]` token ids or an output."""
        if self.error is None:
            self._tried(self.decoded.end_stream)
        texts, config, statistics = self.decoded, self.prepared.config, self.statistics
        statistics.new_tokens, statistics.exact = texts.all_new_tokens(), texts.verifier.exact
        statistics.total_seconds = time.perf_counter() - self._began
        if not config.return_dict_in_generate:
            return texts.sequences()
        runtime: Any = SimpleNamespace(target=self.prepared.target, cache=None)
        return as_output(texts, runtime, statistics, config, self.prepared.model_kwargs)
