"""Outputs of a target's forward: logits and taps for drafting, hidden states and attentions for the caller."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.refusals import DraftingRefused
from .target_call import Names, TargetCall
from .target_limits import decoder_layers, text_config


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
        return TargetOutput(logits, logits[..., :0])
    cannot = f"{type(target).__name__} cannot be drafted for: "
    if states and len(states) <= tap_layers[-1]:
        raise DraftingRefused(
            f"{cannot}the drafter reads hidden state {tap_layers[-1]} of its layers, and it returns only {len(states)}."
        )
    missing = [layer for layer in tap_layers if states and states[layer] is None]
    if missing:
        raise DraftingRefused(
            f"{cannot}the drafter reads hidden state {missing[0]} of its layers, which it leaves out when it is asked "
            "for."
        )
    shapes = {tuple(states[layer].shape[:-1]) for layer in tap_layers} if states else set()
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        found = " and ".join(map(str, sorted(shapes))) or "none"
        raise DraftingRefused(f"{cannot}its hidden states have to be one vector for each position; found {found}.")
    return TargetOutput(logits, torch.cat([states[layer].to(logits.device) for layer in tap_layers], dim=-1))


def names_of(outputs: Any, names: Names, states: bool, attentions: bool) -> list[str]:
    """Which of the requested hidden states and attentions the outputs contain."""
    wanted = [*([names.states] if states else []), *(names.attentions if attentions else ())]
    return [name for name in wanted if outputs.get(name) and outputs[name][0] is not None]  # some models have none


def prompt_outputs(outputs: Any, names: Sequence[str], row: int) -> dict[str, tuple[torch.Tensor, ...]]:
    return {name: tuple(layer[row : row + 1] for layer in outputs[name]) for name in names}


@dataclass(frozen=True)
class NodeOutputs:
    """Extracts outputs of single nodes from a forward over drafts; `again` counts the columns before, see
    `chain_reading`.
    """

    call: TargetCall
    outputs: Any
    names: Sequence[str]
    again: int
    columns: int

    def of(self, row: int, path: Sequence[int]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Outputs for the last node of `path`, from the root on, as plain decoding returns them for one token."""
        found = {}
        place = self.again + path[-1]
        for name in self.names:
            layers = self.outputs[name]
            if name == self.call.names.states:
                found[name] = tuple(layer[row : row + 1, place : place + 1].clone() for layer in layers)
            else:
                weights = [layer[row : row + 1, :, place : place + 1] for layer in layers]
                own = name != "cross_attentions"
                found[name] = tuple(self._of_text(weights, row, path) if own else weights)
        return found

    def _of_text(self, weights: Sequence[torch.Tensor], row: int, path: Sequence[int]) -> Iterator[torch.Tensor]:
        """Reduces each layer's weights `[1, heads, 1, kv]` over the cache and all nodes to the row's text."""
        slots, read = self.call.slots, self.again + self.columns
        static = slots.static is not None
        path = [*range(self.again), *(self.again + node for node in path)]
        left_over = slots.length - read - (self.call.rows.kept[row] - self.again)  # slots of other rows' longer paths
        for index, layer in enumerate(weights):
            empty = layer.shape[-1] - slots.length if static else 0  # slots beyond the nodes
            cached = layer.shape[-1] - empty - read
            text = torch.cat([layer[..., : cached - left_over], layer[..., [cached + node for node in path]]], dim=-1)
            if static:
                text = F.pad(text, (0, layer.shape[-1] - text.shape[-1]))
            yield text[..., -slots.windows[index] :] if index in slots.windows else text


_NAMES = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "layer_norm")


def final_norm(target: Any) -> nn.Module | None:
    """The norm after the last layer; `None` where a target has none by a usual name."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    found = (getattr(decoder, name, None) for name in _NAMES)
    return next((each for each in found if isinstance(each, nn.Module)), None)


def before_norm(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """Returns tap indices for a target of `layers` layers where the last layer is tapped before the norm."""
    return tuple(tap + 1 if tap == layers else tap for tap in taps)


def check_last_state(target: Any) -> None:
    """Raises a DraftingRefused if the last layer's output before the norm is not available."""
    if final_norm(target) is None:
        raise DraftingRefused(
            "the drafter reads the output of the last layer before the target's final norm, and a "
            f"{type(target).__name__} has none by a name that is known here. Use a drafter that reads lower layers "
            "only."
        )


class LastState:
    """Keeps the last layer's output before the norm, if tapped; `asked` are the taps that transformers returns."""

    def __init__(self, target: Any, tap_layers: Sequence[int]) -> None:
        layers = decoder_layers(text_config(target)) if tap_layers else 0
        self.asked = [tap for tap in tap_layers if tap <= layers]
        self._norm = final_norm(target) if len(self.asked) < len(tap_layers) else None
        self._layers, self._state = layers, torch.empty(0)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around a forward: keeps the norm's input, of this thread only."""
        if self._norm is None:
            yield
            return
        thread = threading.get_ident()

        def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if threading.get_ident() == thread:  # other threads may decode with the same target
                self._state = inputs[0].detach()

        hook = self._norm.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def behind(self, states: Any) -> Any:
        if self._norm is None:
            return states
        return (*(states or (None,) * (self._layers + 1)), self._state)
