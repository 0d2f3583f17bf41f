"""A target in one call of `generate()`: what its forwards are given, and where its cache and its texts stand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.cache_name import CACHE, returned_cache
from ..core.refusals import DraftingRefused
from ..core.tensors import device_of, on_device
from .acceleration import Acceleration
from .cache_slots import CacheSlots, Mark
from .target_limits import check_cache, check_mask


@dataclass(frozen=True)
class TextRows:
    """The texts of the rows that are read.

    Attributes:
        kept: number of slots that hold the text of each row. Those behind are left over from longer rows.
        prompt_slots: number of slots of the prompts.
        attended: `[B or 1, prompt_slots]`, bool, which of these are no padding; `None` if there is none.
        last_positions: `[..., B or 1]`, the target's own positions of the prompts' ends, on several axes for some;
            `None` if it is given none.
    """

    kept: list[int]
    prompt_slots: int
    attended: torch.Tensor | None
    last_positions: torch.Tensor | None

    @property
    def next_positions(self) -> list[int] | None:
        """After the prompts, the target's own position of each row's next token; of several axes the greatest."""
        if self.last_positions is None:
            return None
        last = self.last_positions.reshape(-1, self.last_positions.shape[-1]).amax(dim=0)
        return (last.expand(len(self.kept)) + 1).tolist()

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row in the cache, padding not counted."""
        if self.attended is None:
            return list(self.kept)
        real = self.attended.sum(dim=1).expand(len(self.kept)).tolist()
        return [kept - self.prompt_slots + count for kept, count in zip(self.kept, real, strict=True)]

    def keeping(self, counts: Sequence[int]) -> TextRows:
        """The same when each row has so many tokens more."""
        return replace(self, kept=[kept + count for kept, count in zip(self.kept, counts, strict=True)])

    def of(self, places: Sequence[int]) -> TextRows:
        """Some of the rows, in this order."""
        attended, positions, before = self.attended, self.last_positions, len(self.kept)
        if attended is not None and len(attended) == before:
            attended = attended[on_device(places, attended.device)]
        if positions is not None and positions.shape[-1] == before:
            positions = positions[..., on_device(places, positions.device)]
        return TextRows([self.kept[place] for place in places], self.prompt_slots, attended, positions)


TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class Names:
    """What the inputs and outputs of a target's text are called; those of an encoder-decoder are its decoder's."""

    def __init__(self, target: Any) -> None:
        decoder = target.config.is_encoder_decoder
        prefix = "decoder_" if decoder else ""
        self.mask, self.positions = f"{prefix}attention_mask", f"{prefix}position_ids"
        self.states = f"{prefix}hidden_states"
        self.attentions = ("decoder_attentions", "cross_attentions") if decoder else ("attentions",)

    @property
    def by_rows(self) -> tuple[str, ...]:
        """Names of inputs that may be given, of which it is known how they are told apart by rows."""
        return self.mask, self.positions, "inputs_embeds", "output_hidden_states"


@dataclass
class TargetCall:
    """What reading trees and reading chains share.

    Attributes:
        kwargs: what `generate()` hands from forward to forward.
        slots: the cache.
        rows: where the texts stand there.
        acceleration: what runs the forwards.
        fixed: number of columns of every forward over trees into a static cache, padding included; 0 if it varies.
        forwards: number of forwards so far.
        unread: number of accepted tokens that recurrent layers have to read again; see `chain_reading`.
        marked: where the cache stood before the chains read last, where layers are recurrent.
        entered: where it stood before the round.
        drops: whether a forward has lost slots of the cache, by a hook for instance: then no draft can be taken back.
        further: by how many columns each input that follows the text is longer than what the cache held when the
            prompts had been read; less than 0 where the caller gave only the new tokens' ones.
    """

    target: Any
    names: Names
    kwargs: dict[str, Any]
    slots: CacheSlots
    rows: TextRows
    acceleration: Acceleration
    fixed: int = 0
    forwards: int = 0
    unread: int = 0
    marked: Mark | None = None
    entered: Mark | None = None
    drops: bool = False
    further: dict[str, int] = field(default_factory=dict)

    @classmethod
    def after_prompts(
        cls, target: Any, names: Names, kwargs: dict[str, Any], outputs: Any, num_texts: int
    ) -> TargetCall:
        """The call of so many texts when the target has returned `outputs` for its prompts.

        Raises:
            DraftingRefused: the target cannot take back what was rejected; the message says what is missing.
        """
        cache = returned_cache(outputs)
        check_cache(target, cache)
        slots = CacheSlots(cache)
        if slots.hold_more_than_the_text:
            raise DraftingRefused(
                f"{type(target).__name__} cannot be drafted for: some layers of its cache hold more than the text, "
                "which cannot be told from what was rejected."
            )
        mask, positions, length = kwargs.get(names.mask), kwargs.get(names.positions), slots.length
        check_mask(target, mask, length)
        attended = None if mask is None else mask[:, :length].bool().to(device_of(target))
        last = None if positions is None else positions[..., -1].to(device_of(target))
        rows = TextRows([length] * num_texts, length, attended, last)
        given = {name: kwargs.get(name) for name in (names.mask, names.positions, *TOKEN_TYPES)}
        further = {name: value.shape[-1] - length for name, value in given.items() if value is not None}
        return cls(target, names, kwargs, slots, rows, Acceleration(target), forwards=1, further=further)

    def apart(self) -> TargetCall:
        """The same for trials: they read into the same cache, which a mark puts back, and change nothing else here."""
        return replace(self, kwargs=dict(self.kwargs), slots=copy.copy(self.slots), entered=None)

    def apart_of(self, places: Sequence[int]) -> TargetCall:
        """As `apart`, of some rows of the batch alone, with a copy of what the cache holds of them."""
        kwargs, before = dict(self.kwargs), len(self.rows.kept)
        rows = on_device(places, device_of(self.target))
        for name, axis in ((self.names.mask, 0), (self.names.positions, -2), ("inputs_embeds", 0)):
            value = kwargs.get(name)
            if value is not None and value.shape[axis] == before:
                kwargs[name] = value.index_select(axis, rows.to(value.device))
        return replace(self, kwargs=kwargs, slots=self.slots.of_rows(places), rows=self.rows.of(places), entered=None)

    def inputs(
        self,
        ids: torch.Tensor,
        size: int,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The inputs of a forward over the last `size` of some tokens.

        Args:
            ids: `[B, n]`.
            mask: as `generate()` would hand it on.
            positions: of these tokens, if they do not follow from the text.
            kwargs: instead of those of the call.
        """
        kwargs = dict(self.kwargs if kwargs is None else kwargs)
        kwargs[CACHE] = self.slots.cache
        kwargs[self.names.mask] = mask
        if positions is not None:
            kwargs[self.names.positions] = positions
            for name in TOKEN_TYPES:
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][:, -1:].expand(-1, size)
        inputs = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=size, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = size
        return inputs

    def forward(self, inputs: dict[str, Any], size: int, model: Any = None) -> Any:
        """The target's outputs for `size` columns, which the cache holds from here on.

        Args:
            model: runs instead of the target, of whose layers it is made.
        """
        self.forwards += 1
        own = model is None and any(value is self.slots.cache for value in inputs.values())
        length = self.slots.length + size
        outputs = self.acceleration.forward(inputs, comes_again=size in (1, self.fixed), model=model)
        self.slots.count(size)
        if own and not self.drops and not self.slots.hold(length):
            self._drop(size)
        return outputs

    def _drop(self, size: int) -> None:
        """Notes that slots were lost; raises a DraftingRefused if plain decoding would not have lost them there."""
        self.drops = True
        in_a_round = self.entered is not None  # and not in a trial
        if size > 1 or len(self.rows.kept) > 1 or not in_a_round:
            raise dropped(self.target)

    def go_on(self, outputs: Any, new_tokens: int) -> None:
        """Prepares `kwargs` for the forward after this one."""
        decoder = self.target.config.is_encoder_decoder
        self.kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=decoder, num_new_tokens=new_tokens
        )


def dropped(target: Any) -> DraftingRefused:
    """The refusal where a forward loses slots of the cache."""
    return DraftingRefused(
        f"{type(target).__name__} cannot be drafted for: its cache loses tokens while it is read, which could not be "
        "brought back after a rejection."
    )
