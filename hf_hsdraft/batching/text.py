"""One text of a running batch: it grows by the rules of its own request, whatever the others do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from ..core.cache_name import CACHE
from ..core.draft_tree import DraftTree
from ..core.statistics import DraftStatistics
from ..core.tensors import device_of
from ..core.tuning import TUNING
from ..drafters.base.protocol import Accepted
from ..engine.call_output import as_output, named_target
from ..engine.decoded_texts import DecodedTexts
from ..runtime.findings import Size, find_out
from ..runtime.module_hooks import fingerprint
from ..runtime.target_limits import furthest_read
from ..runtime.target_runtime import TargetOutput, TargetRuntime, picked_taps
from ..verify.verdict import Verdict, Verifier
from .prefix_cache import PrefixCache
from .prepared import Prepared


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

    def __post_init__(self) -> None:
        kwargs, ids = self.prepared.model_kwargs, self.prepared.input_ids[0].tolist()
        self._cache = copy.deepcopy(kwargs.get(CACHE))  # the request may yet be decoded alone, with its own
        settings = sorted((name, each) for name, each in kwargs.items() if isinstance(each, bool | int | float | str))
        self._kind, self._ids = (_state_of(self.prepared.target), tuple(self.taps_wanted), *settings), ids
        if self.prepared.config.prefill_chunk_size is None:
            self.taps = self.prefixes.fill(self._kind, ids[:-1], self._cache)
            self.read = self.reused = sum(each.shape[1] for each in self.taps)

    @property
    def left(self) -> int:
        return self.prepared.input_ids.shape[1] - self.read

    def go_on(self, most: int) -> None:
        """Reads up to `most` further tokens; all that is left at once if the call asks for parts of its own size."""
        prepared, begin = self.prepared, self.read
        end = begin + min(self.left, most)
        kwargs, config = prepared.model_kwargs, copy.copy(prepared.config)
        if config.prefill_chunk_size is not None:
            end = begin + self.left
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

    def remember(self) -> None:
        """Lets later prompts begin with what has been read."""
        assert self.runtime is not None
        self.prefixes.keep(self._kind, self._ids, self.runtime.cache, torch.cat(self.taps, dim=1))


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
        self.root, self.emitted = runtime.length, list[int]()
        self._taps = torch.cat(reading.taps, dim=1)[0]
        self.decoded.foresee(output.logits.shape[-1], torch.Generator(ids.device).manual_seed(seed))
        self._logits = output.logits[0, -1:]
        self._rule_taps = picked_taps(output.taps[0, -1:], runtime.tap_layers, verifier.taps)

    def why_alone(self, size: Size) -> str:
        """Why it cannot join a batch with drafts of this size; tries what is unknown. Empty if it can."""
        runtime, ids = self.runtime, self.prepared.input_ids
        assert runtime is not None
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
        places, known = torch.arange(self.root - len(taps), self.root), ids[:-1][-TUNING.most_known :].tolist()
        return Accepted(row, [self.decoded.last_token(0)], taps, places, ids[-len(taps) :], known)

    @property
    def prompt_and_answer(self) -> tuple[list[int], list[int]]:
        ids, begin = self.decoded.ids.of(0)[0].tolist(), self.decoded.prompt_length
        return ids[:begin], ids[begin : begin + self.decoded.new_tokens(0)]

    def finish(self) -> Any:
        """Ends the stream; returns what `generate()` would, without a cache: `[1, length]` token ids or an output."""
        if self.error is None:
            self._tried(self.decoded.end_stream)
        texts, config, statistics = self.decoded, self.prepared.config, self.statistics
        statistics.new_tokens, statistics.exact = texts.all_new_tokens(), texts.verifier.exact
        if not config.return_dict_in_generate:
            return texts.sequences()
        runtime: Any = SimpleNamespace(target=self.prepared.target, cache=None)
        return as_output(texts, runtime, statistics, config, self.prepared.model_kwargs)
