"""A drafter for all calls of a model, so that tools which call `generate()` themselves draft too.

`GenerationMixin._sample`, by which `generate()` decodes by default, drafts for a model with an attachment. The model's
class and attributes stay as they are, and `generate()` prepares a call as without a drafter. Calls that decode
otherwise (beams, another assistant, `custom_generate`) do not reach it. Attachments are kept beside the models, by
identity: a copy or a pickle of a model has none.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from ..core.forks import new_lock
from ..core.kept import kept_with
from ..core.refusals import DraftingRefused
from ..core.statistics import DraftStatistics
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Drafter
from ..engine.call_output import named_target
from ..engine.decoding import check_drafter, speculative_decoding, told_of_class
from ..runtime.module_hooks import fingerprint, no_hooks_left
from ..runtime.target_parts import decoding_model
from .by_name import best_for, follow, load_for

logger = logging.get_logger(__name__)

_CUSTOM = "custom_generate is given"


class Attachment:
    """A drafter that drafts in all calls of one model; made by [`attach`].

    As a context manager it ends with the block, and restores the model's former attachment.

    Args:
        owned: whether the drafter is used only here. Then it follows the model to another device and dtype.

    Attributes:
        drafter: its options may be changed between calls.
        last: statistics of the drafted call that ended last; `None` before the first one.
    """

    def __init__(self, model: Any, drafter: Drafter, owned: bool = False) -> None:
        self.drafter = drafter
        self.last: DraftStatistics | None = None
        self._model, self._owned = weakref.ref(model), owned
        self._statistics, self._lock = DraftStatistics.sum(), new_lock()
        self._failed: dict[int, str] = {}  # why a call ended mid-text, by the model's fingerprint
        self._in_block, self._thread = False, threading.get_ident()

    def __repr__(self) -> str:
        model = self._model()
        target = "a model that is gone" if model is None else named_target(model)
        return f"{type(self.drafter).__name__} attached to {target}\n{self.statistics!r}"

    @property
    def statistics(self) -> DraftStatistics:
        """A copy of the sum so far."""
        with self._lock:
            return copy.deepcopy(self._statistics)

    def reset(self) -> None:
        """Resets the statistics."""
        with self._lock:
            self._statistics, self.last = DraftStatistics.sum(), None

    def detach(self) -> None:
        """Ends the attachment, if the model still has it, and those that it has replaced for good."""
        self._leave(with_replaced=True)

    def _leave(self, with_replaced: bool = False) -> None:
        model = self._model()
        with _changing:
            held = [] if model is None else _attachments(model)
            if self in held:
                place = held.index(self)
                while with_replaced and place and not held[place - 1]._in_block:
                    del held[(place := place - 1)]
                held.remove(self)

    def __enter__(self) -> Attachment:
        self._in_block = True
        return self

    def __exit__(self, *_: object) -> None:
        self._in_block = False
        self._leave()

    def step_aside(self, reason: str) -> None:
        """Counts a call that is decoded without drafts, and logs a new reason."""
        with self._lock:
            counts = self._statistics.stepped_aside
            first = reason not in counts
            counts[reason] = counts.get(reason, 0) + 1
        if first:
            logger.warning(f"a call of generate() is decoded without the attached drafter: {reason}")

    def decode(self, plainly: Callable[..., Any], target: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Decodes a call with drafts, or by `plainly` if it is refused."""
        statistics, began = DraftStatistics(), time.perf_counter()
        refusals: list[DraftingRefused] = []
        try:
            self._check(target, **kwargs)
            with no_hooks_left(target):
                output = speculative_decoding(
                    target, self.drafter, input_ids, statistics=statistics, refused=refusals.append, **kwargs
                )
        except DraftingRefused as refusal:
            if statistics.target_forwards:  # the text has begun: the target's fault
                self._failed[fingerprint(target)] = str(refusal)
                raise
            self.step_aside(refusal.of_attached())
            return plainly(target, input_ids, **kwargs)
        if refusals:
            self.step_aside(refusals[0].of_attached())
        else:
            self.count(statistics, time.perf_counter() - began)
        return output

    def _check(self, target: Any, generation_config: Any, **_: Any) -> None:
        """Raises a DraftingRefused for what only plain decoding can do, and moves an owned drafter to the model."""
        if self._failed and (why := self._failed.get(fingerprint(target))):
            raise DraftingRefused(f"an earlier call ended in the middle of its text: {why}")
        if generation_config.is_assistant:
            raise DraftingRefused("the model is the assistant of another one in this call")
        if target.training:
            _check_training(target)
        try:
            DraftOptions.of(self.drafter, generation_config)
        except ValueError as error:
            DraftOptions.of(self.drafter)  # wrong options of its own are an error
            raise DraftingRefused(f"the call sets a drafting option: {error}") from error
        self.follow(target)

    def follow(self, target: Any) -> Drafter:
        """Returns the drafter, moved to the model's device and dtype if it is used only here."""
        if self._owned:
            follow(self.drafter, target)
        return self.drafter

    def count(self, done: DraftStatistics, seconds: float, last: DraftStatistics | None = None) -> None:
        """Adds a drafted call that took so many seconds to the statistics; `last`: its own, if it was not alone."""
        done.total_seconds = done.total_seconds or seconds  # untimed without `return_dict_in_generate`
        with self._lock:
            self._statistics += done
            self.last = last or done


_changing = new_lock()


def _attachments(target: Any) -> list[Attachment]:
    """The last one drafts. Below are those of enclosing and overlapping blocks, and the one from before these."""
    return kept_with(target, "attachments", list)


def _hold(target: Any, attachment: Attachment) -> None:
    """Makes an attachment the model's; of those that no block ends, only the last before it can return.

    Another thread may be about to enter the block of the last one.
    """
    with _changing:
        held = _attachments(target)
        mine = bool(held) and held[-1]._thread == threading.get_ident()
        if mine and len(held) > 1 and not held[-1]._in_block and not held[-2]._in_block:
            del held[-2]
        held.append(attachment)


def attach(model: Any, drafter: Drafter | str | os.PathLike[str] | None = None, **loading: Any) -> Attachment:
    """Lets all calls of `model.generate()` draft from now on; their text stays the same.

    Calls with beams, another assistant, prompt lookup or `custom_generate`, and calls for which drafting is refused,
    for instance because of their cache, are decoded as if nothing were attached. The reason is logged once and counted
    in `Attachment.statistics`. transformers' continuous batching drafts too, from when its manager is started.

    Args:
        model: a model of transformers with `generate()`, also inside a PEFT model, `torch.compile` or a data-parallel
            wrapper. An existing attachment is replaced.
        drafter: a drafter, or the Hub name or folder of one. By default the best one that is on this machine, which is
            logged; see `AutoDrafter.for_target`. A drafter that is loaded here follows the model to another device and
            dtype.
        loading: with a name, further arguments of `AutoDrafter.from_pretrained`, such as `revision` or `subfolder`.

    Returns the attachment: for `with`, statistics and `detach`.

    Raises:
        TypeError: the model has no `generate()`, or `drafter` is not a drafter.
        OSError: there is no such folder or repository, or it holds no drafter.
        ValueError: the drafter was made for another target, one of its options is wrong, or the model has its own
            decoding loop.
    """
    target = decoding_model(model)
    _check_decoding(target)
    owned = drafter is None or isinstance(drafter, str | os.PathLike)
    if isinstance(drafter, str | os.PathLike):
        drafter = load_for(target, drafter, **loading)
    elif loading:
        raise TypeError(f"attach() takes {', '.join(sorted(loading))} only with the name of a drafter")
    elif drafter is None:
        drafter = best_for(target)
    if isinstance(drafter, type):
        raise TypeError(told_of_class(drafter))
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"{type(drafter).__name__} is no drafter: expected one of hf_hsdraft, or its Hub name or folder"
        )
    check_drafter(drafter, target)
    DraftOptions.of(drafter)
    attachment = Attachment(target, drafter, owned=owned)
    _hold(target, attachment)
    return attachment


def detach(model: Any) -> None:
    """Ends the attachment of a model, if there is one."""
    with _changing:
        _attachments(decoding_model(model)).clear()


def attached(model: Any) -> Attachment | None:
    """Returns the attachment of a model, or `None`."""
    return next(iter(_attachments(decoding_model(model))[-1:]), None)


def sample(original: Any, target: Any, /, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    attachment = attached(target)
    if attachment is None or args:  # `generate()` passes keywords only
        return original(target, input_ids, *args, **kwargs)
    return attachment.decode(original, target, input_ids, **kwargs)


def _counted(reason_of: Callable[..., str], original: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A method of `generate()` that counts calls which do not reach `_sample`, by reason."""
    result = original(target, *args, **kwargs)
    attachment = attached(target)
    if attachment is not None and (reason := reason_of(*args, **kwargs)):
        attachment.step_aside(reason)
    return result


def _reason_of_mode(generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> str:
    """Why a call of this mode does not reach `_sample`; empty if it does, or if `custom_generate` is counted."""
    if generation_mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE):
        return f"the call decodes by {generation_mode.value.replace('_', ' ')}"
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        return ""
    if (assistant := generation_mode_kwargs.get("assistant_model")) is not None:
        own = "the call has its own assistant_model"
        return "" if getattr(assistant, "decoding", None) is not None else own  # which counts it itself
    fields = ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit")
    return f"the call sets {next((name for name in fields if getattr(generation_config, name, None)), 'an assistant')}"


_REASONS: dict[str, Callable[..., str]] = {
    "_validate_generation_mode": _reason_of_mode,
    "_extract_generation_mode_kwargs": lambda custom, *_, **__: _CUSTOM if callable(custom) else "",
    "load_custom_generate": lambda *_, **__: _CUSTOM,
}
COUNTED = [(name, functools.partial(_counted, reason_of)) for name, reason_of in _REASONS.items()]


def _check_decoding(target: Any) -> None:
    """Raises an error for a model none of whose calls could be drafted."""
    name = type(target).__name__
    if not isinstance(target, GenerationMixin):
        raise TypeError(
            f"{name} has no generate() of transformers: expected a model such as AutoModelForCausalLM loads"
        )
    if type(target)._sample is not GenerationMixin._sample or _samples_itself(type(target)):
        raise ValueError(f"{name} cannot be drafted for: it decodes in its own way, which drafts do not follow")


def _samples_itself(kind: type) -> bool:
    """Whether a method of a model's own classes calls `_sample`, on other texts than `generate()` prepares."""
    methods = (each for base in kind.__mro__ if base is not GenerationMixin for each in vars(base).values())
    return any("_sample" in inspect.unwrap(each).__code__.co_names for each in methods if inspect.isfunction(each))


def _check_training(target: Any) -> None:
    """Raises a DraftingRefused where a model in training mode draws numbers in its forwards, or keeps no cache."""
    if getattr(target, "is_activation_checkpointing", False):
        raise DraftingRefused("the model trains with gradient checkpointing, which keeps no cache")
    for module in target.modules():
        dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0
        named = (value for name, value in vars(module).items() if "drop" in name and isinstance(value, float))
        if module.training and (dropout or any(value > 0 for value in named)):
            raise DraftingRefused("the model is in training mode with dropout, so that no forward repeats another")
