"""A request of a running batch, as `generate()` prepares it: its prompt, processors, criteria and configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria
from transformers.cache_utils import DynamicLayer

from ..core.cache_name import given_cache
from ..core.refusals import DraftingRefused
from ..core.statistics import DraftStatistics
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Drafter, Session, WrappedDrafter
from ..engine.decoding import check_call, check_verifier, first_prompt, introduce, speculative_decoding
from ..engine.row_processors import is_row_wise
from ..runtime.foreign_parts import why_untriable
from ..runtime.target_limits import why_in_step
from ..verify.foresight import Draws
from ..verify.verdict import Verifier


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

    def alone(self, statistics: DraftStatistics, refused: Callable[[DraftingRefused], Any]) -> Any:
        """Decodes it as a separate call, without drafts where they are refused; returns what `generate()` does.

        `statistics` are filled in; they have no forwards where drafts are refused at once, which an attachment counts.
        Where they are refused after the prompt, `refused` is called.
        """
        call = {**self.call, "statistics": statistics, "refused": refused}
        try:
            return speculative_decoding(self.target, self.drafter, self.input_ids, **call)
        except DraftingRefused:
            if statistics.target_forwards:  # the text has begun
                raise
            plain = {name: value for name, value in self.call.items() if name != "tokenizer"}
            return self.target._sample(self.input_ids, **plain)

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
