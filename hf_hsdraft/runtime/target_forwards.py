"""A target's forwards in one call of `generate()`: their inputs, logits and hidden states, and the texts' places in the
cache. They may be accelerated without changing the output: compiled on GPUs, grouped and packed on CPUs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from ..core.cache_name import CACHE, returned_cache
from ..core.refusals import DraftingRefused
from ..core.tensors import device_of, on_device
from ..cpu.compiled_layers import CompiledLayers
from ..cpu.grouped_attention import grouped_attention
from ..cpu.packing import Packing
from ..gpu.fixed_shapes import CompiledCalls, compiled
from .cache_slots import CacheSlots, Mark
from .target_limits import check_cache, check_mask, refusal
from .target_parts import LastState, decoder_list


@dataclass(frozen=True)
class TargetOutput:
    """One target forward over B sequences.

    Attributes:
        logits: `[B, rows, V]`, of the prompt's last position, or of each node of a tree.
        taps: `[B, rows, taps * D]`, the tapped hidden states, concatenated; for a prompt, of the positions it read.
    """

    logits: torch.Tensor
    taps: torch.Tensor

    def last(self, columns: int) -> TargetOutput:
        """The last columns; raises a DraftingRefused if there are fewer."""
        if (found := self.logits.shape[1]) < columns:
            raise DraftingRefused(f"its forward over {columns} tokens returns logits of {found}: expected one of each")
        return TargetOutput(self.logits[:, -columns:], self.taps[:, -columns:])


def picked_taps(taps: torch.Tensor, layers: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Selects hidden states of the layers `wanted`, in that order, from those `[..., len(layers) * D]` of `layers`."""
    if tuple(layers) == tuple(wanted):
        return taps
    places = [layers.index(layer) for layer in wanted]
    return taps.unflatten(-1, (len(layers), -1))[..., places, :].flatten(-2) if places else taps[..., :0]


def target_output(
    target: Any, outputs: Any, states_name: str, tap_layers: Sequence[int], last: LastState | None = None
) -> TargetOutput:
    """Extracts logits and taps of a forward; taps are empty without `tap_layers`.

    Raises a DraftingRefused if hidden states are missing, or not one vector per position.
    """
    logits, states = outputs.logits, outputs.get(states_name)
    states = states if last is None else last.behind(states)
    if not tap_layers:
        return TargetOutput(logits, logits.new_empty(*logits.shape[:-1], 0))  # no view, which would hold the logits
    if states and len(states) <= tap_layers[-1]:
        returned = f"and it returns only {len(states)}"
        raise refusal(target, f"the drafter reads hidden state {tap_layers[-1]} of its layers, {returned}.")
    missing = [layer for layer in tap_layers if states and states[layer] is None]
    if missing:
        left_out = "which it leaves out when it is asked for"
        raise refusal(target, f"the drafter reads hidden state {missing[0]} of its layers, {left_out}.")
    shapes = {tuple(states[layer].shape[:-1]) for layer in tap_layers} if states else set()
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        found = " and ".join(map(str, sorted(shapes))) or "none"
        raise refusal(target, f"its hidden states have to be one vector for each position; found {found}.")
    return TargetOutput(logits, torch.cat([states[layer].to(logits.device) for layer in tap_layers], dim=-1))


class Acceleration:
    """Runs the forwards of one call.

    Attributes:
        compile_config: for forwards over trees; `None` if they are not compiled.
        packed: whether forwards multiply by packed copies of the weights.
        packs: whether the next forward makes such copies, and takes longer for it.
        programs: whether decoder layers run as compiled programs.
        off: whether forwards run transformers' operators alone, as in a call that does not draft.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._compiled: CompiledCalls | None = None
        self._packing: Packing | None = None
        self._layers: CompiledLayers | None = None
        self.compile_config: Any = None
        self.packed = self.packs = self.programs = self.off = False

    def compile(self, model_kwargs: dict[str, Any], generation_config: Any, states: Sequence[torch.Tensor]) -> None:
        """Compiles forwards into a static cache where `generate()` would compile its decoding step."""
        if self._target._valid_auto_compile_criteria(model_kwargs, generation_config):
            self._compiled = CompiledCalls(self._target, generation_config.compile_config, states)
            self.compile_config = self._compiled.config

    def compiled(self, function: Callable[..., None]) -> Callable[..., None]:
        """Compiles a function of fixed shapes if forwards are compiled."""
        return function if self._compiled is None else compiled(function, self.compile_config)

    def begin(self, asked_for: bool | None, room: int, programs: bool | None = False) -> None:
        """Packs weights or reuses those of earlier calls. Not with compiled forwards: these would be compiled again.

        Args:
            asked_for: the option `packed_weights`.
            programs: the option `compiled_layers`.
            room: number of tokens that the call may emit.
        """
        self._packing = Packing(self._target, False if self._compiled else asked_for)
        self.packs = self._packing.begin(room)
        self.packed = self._packing.weights is not None
        if programs is not False and self._compiled is None and device_of(self._target).type == "cpu":
            with contextlib.suppress(ValueError):  # no list of layers
                layers = list(decoder_list(self._target)[1])
                self._layers = CompiledLayers(
                    layers, programs, lambda: self._packing is not None and self._packing.may_pack
                )

    def after_round(self) -> bool:
        """Counts a round; returns whether forwards have just become quicker, so that costs must be measured again."""
        if self._packing is None or self.off:
            return False
        before = self.packed, self.programs
        self.packs = self._packing.after_round()
        self.packed = self._packing.weights is not None
        if self._layers is not None:
            compiled = self._layers.after_forward()
            self.packs = self.packs or compiled  # the first forward compares them with the layers
            if self._packing.weights is not None and self._packing.weights.join(self._layers.new_groups()):
                self.packs = True
            self.programs = self._layers.running
        return (self.packed, self.programs) != before

    def forward(self, inputs: dict[str, Any], comes_again: bool, model: Any = None) -> Any:
        """Returns the target's outputs.

        Args:
            comes_again: whether many forwards have inputs of this shape, so that compiling pays off.
            model: runs instead of the target, and is made of its layers.
        """
        if self._compiled is not None and comes_again and model is None:
            return self._compiled.forward(inputs)
        with contextlib.ExitStack() as stack:
            if self.off:
                return (self._target if model is None else model)(**inputs, return_dict=True)
            stack.enter_context(grouped_attention(device_of(self._target)))
            if self._packing is not None and self._packing.weights is not None:
                stack.enter_context(self._packing.weights.in_use())
            if self._layers is not None:
                stack.enter_context(self._layers.in_use(whole=model is None))
            return (self._target if model is None else model)(**inputs, return_dict=True)


@dataclass(frozen=True)
class TextRows:
    """The texts of the rows that are read.

    Attributes:
        kept: number of text slots of each row. Slots behind are left over from longer rows.
        prompt_slots: number of slots of the prompts.
        attended: `[B or 1, prompt_slots]`, bool, False for padding; `None` if there is none.
        last_positions: `[..., B or 1]`, position ids of the prompts' ends, on several axes for some targets; `None`
            without position ids.
        gapless: these rows without the slots that `with_gaps` has left over; `None` if it has not.
    """

    kept: list[int]
    prompt_slots: int
    attended: torch.Tensor | None
    last_positions: torch.Tensor | None
    gapless: TextRows | None = None

    @classmethod
    def of_slots(cls, kept: list[int], device: torch.device) -> TextRows:
        """Rows without padding whose tokens are in the slots of their positions."""
        return cls(kept, 0, None, torch.full((len(kept),), -1, device=device))

    @property
    def next_positions(self) -> list[int] | None:
        """Position id of each row's first token after the prompt; the maximum over several axes."""
        if self.last_positions is None:
            return None
        last = self.last_positions.reshape(-1, self.last_positions.shape[-1]).amax(dim=0)
        return (last.expand(len(self.kept)) + 1).tolist()

    @property
    def lengths(self) -> list[int]:
        """Number of cached tokens of each row, without padding."""
        if self.attended is None:
            return list(self.kept)
        real = self.attended.sum(dim=1).expand(len(self.kept)).tolist()
        return [kept - self.prompt_slots + count for kept, count in zip(self.kept, real, strict=True)]

    def keeping(self, counts: Sequence[int]) -> TextRows:
        kept = [kept + count for kept, count in zip(self.kept, counts, strict=True)]
        gapless = None if self.gapless is None else self.gapless.keeping(counts)
        return replace(self, kept=kept, gapless=gapless)

    def with_gaps(self, read: Sequence[bool], device: torch.device) -> TextRows:
        """The rows after each has read a token into the last slot, of equal length.

        Slots that longer rows have left over before it stay in the shorter ones, and are masked like padding. So no
        keys and values are moved. Tokens must be at their places for other inputs and masks: not for windows.

        Args:
            read: for each row, whether its token is kept.
            device: of the masks.
        """
        assert self.last_positions is not None
        longest = max(self.kept)
        kept = on_device(self.kept, device)[:, None]
        seen = torch.arange(longest, device=device) < kept
        if self.attended is not None:
            seen[:, : self.prompt_slots] &= self.attended
        last = on_device([[each] for each in read], device, dtype=torch.bool)
        tokens = kept[:, 0] + last[:, 0] - self.prompt_slots
        gapless = (self.gapless or self).keeping([int(each) for each in read])
        attended, slots = torch.cat([seen, last], dim=1), longest + 1
        return TextRows([slots] * len(read), slots, attended, self.last_positions + tokens, gapless)

    @property
    def padded(self) -> bool:
        """Whether the prompts are."""
        return (self.gapless or self).attended is not None

    def of(self, places: Sequence[int]) -> TextRows:
        attended, positions, before = self.attended, self.last_positions, len(self.kept)
        if attended is not None and len(attended) == before:
            attended = attended[on_device(places, attended.device)]
        if positions is not None and positions.shape[-1] == before:
            positions = positions[..., on_device(places, positions.device)]
        gapless = None if self.gapless is None else self.gapless.of(places)
        return TextRows([self.kept[place] for place in places], self.prompt_slots, attended, positions, gapless)


TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class Names:
    """Names of a target's text inputs and outputs; for an encoder-decoder, its decoder's."""

    def __init__(self, target: Any) -> None:
        decoder = target.config.is_encoder_decoder
        prefix = "decoder_" if decoder else ""
        self.mask, self.positions = f"{prefix}attention_mask", f"{prefix}position_ids"
        self.states = f"{prefix}hidden_states"
        self.attentions = ("decoder_attentions", "cross_attentions") if decoder else ("attentions",)

    @property
    def by_rows(self) -> tuple[str, ...]:
        """Inputs that can be sliced by row."""
        return self.mask, self.positions, "inputs_embeds", "output_hidden_states"


class TargetCall:
    """A target in one call: its cache, the texts' places there, and forwards that read on.

    Attributes:
        kwargs: model inputs that `generate()` passes from forward to forward.
        fixed: number of columns of every forward over trees into a static cache, padding included; 0 if it varies.
        unread: number of accepted tokens that recurrent layers have to read again; see `read_chains`.
        marked: state of the cache before the last chains, with recurrent layers.
        entered: its state before the round.
        keeps_ended: whether windows keep what rows that have ended still see, as padding is read for them at the end.
        leaves_gaps: whether rounds without drafts leave slots between tokens; see `TextRows.with_gaps`.
        drops: whether a forward has lost slots of the cache, for example by a hook; then no draft can be rolled back.
        further: number of columns of each input along the text beyond the cache after the prompts; negative where the
            caller gave only the new tokens' columns.
    """

    slots: CacheSlots  # from the prompts' forward on
    rows: TextRows

    def __init__(self, target: Any, kwargs: dict[str, Any], acceleration: Acceleration | None = None) -> None:
        self.target, self.kwargs, self.names = target, dict(kwargs), Names(target)
        self.acceleration = Acceleration(target) if acceleration is None else acceleration
        self.fixed = self.forwards = self.unread = 0
        self.marked: Mark | None = None
        self.entered: Mark | None = None
        self.keeps_ended = self.leaves_gaps = self.drops = False
        self.further = dict[str, int]()

    def hold(self, outputs: Any, num_texts: int) -> None:
        """Takes over the cache from the prompts' forward; raises a DraftingRefused if it cannot roll back."""
        cache = returned_cache(outputs)
        check_cache(self.target, cache)
        slots = CacheSlots(cache)
        if slots.hold_more_than_the_text:
            more = "some layers of its cache hold more than the text, which cannot be told from what was rejected."
            raise refusal(self.target, more)
        device, length = device_of(self.target), slots.length
        mask, positions = self.kwargs.get(self.names.mask), self.kwargs.get(self.names.positions)
        check_mask(self.target, mask, length)
        attended = None if mask is None else mask[:, :length].bool().to(device)
        if attended is not None and bool(attended.all()):
            attended = None
        last = None if positions is None else positions[..., -1].to(device)
        self.slots, self.rows, self.forwards = slots, TextRows([length] * num_texts, length, attended, last), 1
        given = {name: self.kwargs.get(name) for name in (self.names.mask, self.names.positions, *TOKEN_TYPES)}
        self.further = {name: value.shape[-1] - length for name, value in given.items() if value is not None}

    def apart(self) -> Self:
        """Copy for trials: it reads into the same cache, which a mark restores, and changes nothing else here."""
        trial = copy.copy(self)
        trial.kwargs, trial.slots, trial.entered = dict(self.kwargs), copy.copy(self.slots), None
        return trial

    def apart_of(self, places: Sequence[int]) -> Self:
        """As `apart`, for some rows of the batch only, with a copy of their cache."""
        trial, before = self.apart(), len(self.rows.kept)
        rows = on_device(places, device_of(self.target))
        for name, axis in ((self.names.mask, 0), (self.names.positions, -2), ("inputs_embeds", 0)):
            value = trial.kwargs.get(name)
            if value is not None and value.shape[axis] == before:
                trial.kwargs[name] = value.index_select(axis, rows.to(value.device))
        trial.slots, trial.rows = self.slots.of_rows(places), self.rows.of(places)
        return trial

    def inputs(
        self,
        ids: torch.Tensor,
        size: int,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The inputs of a forward over the last `size` tokens of `ids` `[B, n]`.

        Args:
            mask: as `generate()` would pass it.
            positions: of these tokens, if they do not follow from the text.
            kwargs: instead of the call's.
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
        """The outputs for `size` columns, which the cache then holds, of the target or a `model` made of its layers."""
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
        """Updates `kwargs` for the next forward."""
        decoder = self.target.config.is_encoder_decoder
        self.kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=decoder, num_new_tokens=new_tokens
        )


def dropped(target: Any) -> DraftingRefused:
    return refusal(
        target, "its cache loses tokens while it is read, which could not be brought back after a rejection."
    )
