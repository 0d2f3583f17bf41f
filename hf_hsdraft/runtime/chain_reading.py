"""Chains: drafts without branches, read as ordinary text. They need no mask, so every target may be able to read them.

Recurrent layers cannot drop tokens. After a rejection their state from before the draft is restored, and the accepted
tokens are read again with the next draft: `unread` counts them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from ..core.cache_name import given_cache, returned_cache
from ..core.draft_tree import DraftTree
from ..core.stand_ins import StandIn, standing_in
from .tree_reading import TOKEN_TYPES, TargetCall

# Number of tokens that recurrent layers read again with the next drafts, before they get a forward - by hand.
MOST_UNREAD = 12


def read_chains(
    call: TargetCall, trees: Sequence[DraftTree], input_ids: torch.Tensor, columns: int, padding: int = 0
) -> Any:
    """The target's outputs for a chain of each row; `call.unread` columns of tokens read again come first.

    Args:
        input_ids: `[B, length]`, the texts up to and with the roots.
        columns: of the drafts; shorter ones end with tokens `padding`, which rows that have ended keep.
    """
    if any(list(tree.parents) != list(range(-1, len(tree) - 1)) for tree in trees):
        raise ValueError("a tree that branches was drafted for a target that reads chains only")
    if call.unread > MOST_UNREAD:
        catch_up(call, input_ids[:, :-1])
        call.entered = None
    call.marked = (call.entered or call.slots.mark()) if call.slots.recurrent else None
    drafted = [[*tree.tokens[1:], *[padding] * (columns - len(tree))] for tree in trees]
    ids = torch.tensor(drafted, dtype=input_ids.dtype, device=input_ids.device).view(len(trees), columns - 1)
    return _read_on(call, torch.cat([input_ids, ids], dim=1), call.unread + columns)


def commit_chains(call: TargetCall, length: int, outputs: Any, columns: int) -> None:
    """Keeps the first `length` of the columns read last, in every row."""
    call.rows = call.rows.keeping([length] * len(call.rows.kept))
    if length:
        call.go_on(outputs, length)
    if call.marked is None:
        call.slots.drop(columns - length)
        return
    if length == columns:
        call.unread = 0
    else:
        call.slots.roll_back(call.marked)
        call.unread += length
    call.slots.forget_past()


def catch_up(call: TargetCall, input_ids: torch.Tensor) -> None:
    """Reads the `call.unread` last tokens of `input_ids` `[B, length]` again, into the recurrent layers, for good."""
    _read_on(call, input_ids, call.unread)
    call.unread = 0


def _read_on(call: TargetCall, input_ids: torch.Tensor, size: int) -> Any:
    """Reads the last `size` tokens of each text `[B, length]` after the cached ones."""
    end, decoder = call.rows.kept[0] - call.unread + size, call.target.config.is_encoder_decoder
    # Inputs along the text continue from the caller's, as in plain decoding; they may not start where the text does.
    ends = {name: end + further for name, further in call.further.items()}
    kwargs = dict(call.kwargs)
    for name in (call.names.positions, *TOKEN_TYPES):  # may have several axes, and reach further
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., : ends[name]]
    kwargs = _prepare_attention_mask(kwargs, ends.get(call.names.mask, end), decoder)
    kwargs = _prepare_token_type_ids(kwargs, ends.get("token_type_ids", end))
    kwargs = _prepare_position_ids(kwargs, ends.get(call.names.positions, end), decoder)
    inputs = call.inputs(input_ids, size, kwargs.get(call.names.mask), kwargs=kwargs)
    if call.stepping is None:
        call.stepping = _stepping(call.target) if call.slots.recurrent else {}
    with standing_in(call.stepping if size > 1 else {}):
        outputs = call.forward(inputs, size)
    if given_cache(inputs) is None:  # some models rebuild their cache where their frequencies change
        call.slots.cache = returned_cache(outputs)
        call.slots.cache.activate_past_recording()
    return outputs


class _Unclamped:
    """Runs a Mamba-2 mixer without the limits of its time steps."""

    def __init__(self, mixer: Any) -> None:
        self._mixer = copy.copy(mixer)  # with the same parameters, state and hooks
        vars(self._mixer).pop("_compiled_call_impl", None)
        self._mixer.time_step_limit = (0.0, math.inf)

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._mixer(*args, **kwargs)


def _stepping(target: torch.nn.Module) -> dict[Any, StandIn]:
    """Stand-ins for the layers that compute several tokens otherwise than one by one, which plain decoding reads.

    transformers' Mamba-2 layers apply `time_step_limit` (Mamba-2, section 7) to several tokens, not to a single one.
    """
    limited = ((layer, getattr(layer, "time_step_limit", None)) for layer in target.modules())
    return {layer: _Unclamped(layer) for layer, limit in limited if limit and tuple(limit) != (0.0, math.inf)}
