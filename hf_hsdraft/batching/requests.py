"""Requests of continuous batching: as `generate()` prepares them, what was asked for, and what became of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria
from transformers.cache_utils import DynamicLayer

from ..core.cache_name import given_cache
from ..core.refusals import DraftingRefused
from ..core.statistics import DraftStatistics
from ..core.tensors import device_of
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Drafter, Session, WrappedDrafter
from ..engine.decoding import check_call, check_verifier, first_prompt, introduce, speculative_decoding
from ..engine.row_processors import is_row_wise
from ..generate.attachment import Attachment
from ..runtime.foreign_parts import why_untriable
from ..runtime.target_limits import why_in_step
from ..verify.foresight import Draws
from ..verify.verdict import Verifier

_SHARED = ("target_forwards", "draft_seconds", "verify_seconds", "commit_seconds")


@dataclass(frozen=True)
class Prepared:
    """A call of `generate()` up to its decoding method.

    Attributes:
        input_ids: `[B, length]`, int64; one row where the request can join a batch.
        call: further arguments of the decoding method.
    """

    target: Any
    drafter: Drafter
    input_ids: torch.Tensor
    call: Mapping[str, Any]

    @property
    def config(self) -> Any:
        return self.call["generation_config"]

    @cached_property
    def options(self) -> DraftOptions:
        """The drafting options of the call; raises a ValueError for an invalid one."""
        return DraftOptions.of(self.drafter, self.config)

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """What is passed from forward to forward."""
        own = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "tokenizer")
        return {name: value for name, value in self.call.items() if name not in own}

    @cached_property
    def with_state(self) -> set[int]:
        """Processors, criteria and streamer that may keep a state, which other texts may not change; by identity."""
        processors, criteria = self.call["logits_processor"], self.call["stopping_criteria"]
        found = [self.call.get("streamer"), *(one for one in processors if not is_row_wise(one))]
        own = (one for one in criteria if type(one).__module__ != StoppingCriteria.__module__)
        found += [one for one in own if not getattr(one, "row_wise", False)]
        return {id(one) for one in found if one is not None}

    def fits_beside(self, others: Sequence[Prepared], most: int | None) -> bool:
        """Whether it fits beside others in a cache of `most` tokens, with its options and its own objects."""
        if any(self.options != each.options or self.with_state & each.with_state for each in others):
            return False
        longest = max(each.config.max_length for each in (self, *others))
        return most is None or not others or (len(others) + 1) * longest <= most  # else it is refused when it begins

    def verifier(self, drafter: Drafter) -> Verifier:
        """Returns the rule that accepts its drafts; raises what a separate call raises before it does any work.

        Lets the `drafter`, with the adapter that it uses, look at its target.
        """
        processors = self.call["logits_processor"]
        synced = bool(self.call.get("synced_gpus"))
        check_call(self.target, self.drafter, self.input_ids, processors, synced, self.model_kwargs)
        verifier = self.drafter.verifier(self.options)
        check_verifier(verifier, self.target, processors)
        tokens = first_prompt(self.input_ids, self.model_kwargs)
        introduce(drafter, self.target, self.call.get("tokenizer"), False, tokens)
        return verifier

    def why_alone(self, verifier: Verifier, columns: int) -> str:
        """Why it cannot share forwards with other texts; empty if it can, as far as that is known beforehand.

        Args:
            columns: number of tokens that a forward over the whole batch may read.
        """
        config, kwargs, length = self.config, self.model_kwargs, self.input_ids.shape[1]
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        plain = positions is None or torch.equal(positions.cpu(), torch.arange(length)[None])
        draws = config.do_sample and not verifier.own_draws
        untriable = why_untriable(self.target, columns)
        known, cache = ("attention_mask", "position_ids", "inputs_embeds"), given_cache(kwargs)
        foreseen = Draws.of_rows(1, self.input_ids.device, 2) is not None
        reasons = {
            "it has several texts": len(self.input_ids) > 1,
            "the target is an encoder-decoder": self.target.config.is_encoder_decoder,
            "its forwards are synced with other processes": self.call.get("synced_gpus"),
            "its prompt is padded": mask is not None and not bool(mask.all()),
            "it sets position_ids": not plain,
            "its prompt is given as embeddings": kwargs.get("inputs_embeds") is not None,
            "its prompt has no tokens": length == 0,
            "it has further inputs": any(
                isinstance(value, torch.Tensor) for name, value in kwargs.items() if name not in known
            ),
            "it passes a cache": cache is not None and _may_hold_tokens(cache),
            "its cache has no rows that can be told apart": cache is not None
            and (
                type(cache) is not DynamicCache
                or cache.offloading
                or any(type(layer) is not DynamicLayer for layer in cache.layers)
            ),
            "it returns hidden states or attentions": config.return_dict_in_generate
            and (config.output_hidden_states or config.output_attentions),
            "its rule of verification draws more than the target does": draws,
            "tokens are drawn on a device whose draws cannot be foreseen": config.do_sample and not foreseen,
            "its drafter decides by the call": self.drafter.decoding is not None,
            untriable: untriable,
        }
        found = next((reason for reason, holds in reasons.items() if holds), "")
        return found or why_in_step(self.target, config.max_length, range(config.max_length + columns))


def _may_hold_tokens(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # of recurrent layers alone, which do not tell
        return True


class _Collecting(WrappedDrafter):
    """Takes a call of `generate()` at its decoding method, and returns it as prepared."""

    def __init__(self, drafter: Any) -> None:
        self.num_draft_steps = drafter.num_draft_steps
        self.generation_config, self._drafter = drafter.generation_config, drafter
        self.config, self.device = getattr(drafter, "config", None), getattr(drafter, "device", None)

    def session(self, call: Any) -> Session:
        raise NotImplementedError

    def decoding(self, target: Any, input_ids: torch.Tensor, **call: Any) -> Prepared:
        return Prepared(target, self._drafter, input_ids, call)


def prepare(target: Any, drafter: Drafter, arguments: Mapping[str, Any]) -> Any:
    """Prepares a call of `generate()` with these `arguments`; what it returns where it decodes in another way.

    That is a `Prepared`, or the output of a call that takes no drafter, for example one with beams. Raises what
    `generate()` raises.
    """
    generate: Callable[..., Any] = target.generate
    return generate(**{**arguments, "assistant_model": _Collecting(drafter)})


@dataclass(frozen=True)
class FinishedText:
    """A request that is done.

    Attributes:
        index: number of the request, in the order of `submit`.
        output: what `generate()` would return, without a cache; what there is of a cancelled text; None after an error.
        error: what `generate()` would raise.
        statistics: its own, with every forward that it was in and the time from its prompt to its end; None where
            nothing could be drafted.
        cancelled: whether it ended by `cancel`.
        reused_tokens: number of tokens of its prompt that an earlier one had read.
        refusal: why nothing was drafted, where that turned out after its prompt.
    """

    index: int
    output: Any
    error: Exception | None = None
    statistics: DraftStatistics | None = None
    cancelled: bool = False
    reused_tokens: int = 0
    refusal: str = ""


class Tally:
    """Adds up what a running batch does: a round counts once, however many texts are in it.

    Attributes:
        statistics: of the requests that are done, and of all forwards until then.
    """

    def __init__(self, attachment: Attachment | None) -> None:
        self.statistics, self._attachment = DraftStatistics.sum(), attachment
        self._since: dict[str, Any] = dict.fromkeys((*_SHARED, "total_seconds"), 0)  # the last request was counted

    def took(self, done: DraftStatistics) -> None:
        """Counts forwards, and the parts of a round."""
        for name in _SHARED:
            self._since[name] += getattr(done, name)

    def ended(self, done: list[FinishedText], seconds: float) -> list[FinishedText]:
        """Counts requests that are done, for the attachment too, and `seconds` in which all texts grew."""
        self._since["total_seconds"] += seconds
        for each in done:
            if each.refusal and self._attachment is not None:
                self._attachment.step_aside(each.refusal)
            if each.statistics is None or each.error is not None:
                continue
            counted = replace(each.statistics, **self._since)
            self._since = dict.fromkeys(self._since, 0)
            self.statistics += counted
            if self._attachment is not None:
                self._attachment.count(counted, counted.total_seconds, each.statistics)
        return done


@dataclass(frozen=True, eq=False)
class Request:
    """A request as submitted."""

    index: int
    arguments: Mapping[str, Any]
    seed: int

    @contextlib.contextmanager
    def seeded(self, device: torch.device) -> Iterator[None]:
        """Draws inside by the request's seed, then restores torch's generators."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield

    def alone(self, prepared: Prepared, tally: Tally) -> FinishedText:
        """Decodes it as a separate call, without drafts where they are refused; raises what that raises.

        Where they are refused at once, an attachment counts it; after the prompt, the result says so.
        """
        target, call = prepared.target, prepared.call
        statistics, refusals, began = DraftStatistics(), list[DraftingRefused](), time.perf_counter()
        with self.seeded(device_of(target)):
            try:
                more: dict[str, Any] = {"statistics": statistics, "refused": refusals.append}
                output = speculative_decoding(target, prepared.drafter, prepared.input_ids, **call, **more)
            except DraftingRefused:
                if statistics.target_forwards:  # the text has begun
                    raise
                plain = {name: value for name, value in call.items() if name != "tokenizer"}
                output = target._sample(prepared.input_ids, **plain)
        tally.took(statistics)
        statistics.total_seconds = time.perf_counter() - began
        if refusals or not statistics.target_forwards:
            return FinishedText(self.index, output, refusal=refusals[0].of_attached() if refusals else "")
        return FinishedText(self.index, output, statistics=statistics)
