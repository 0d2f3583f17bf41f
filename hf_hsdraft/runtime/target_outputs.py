"""What a forward of the target returned: logits and taps for drafting, hidden states and attentions for the caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..core.refusals import DraftingRefused
from .last_state import LastState
from .target_call import Names, TargetCall


@dataclass(frozen=True)
class TargetOutput:
    """One target forward over B sequences.

    Attributes:
        logits: `[B, rows, V]`, of the prompt's last position, or of each node of a tree.
        taps: `[B, rows, taps * D]`, the tapped hidden states side by side; for a prompt, of the positions it read.
    """

    logits: torch.Tensor
    taps: torch.Tensor

    def last(self, columns: int) -> TargetOutput:
        """The last columns alone."""
        return TargetOutput(self.logits[:, -columns:], self.taps[:, -columns:])


def picked_taps(taps: torch.Tensor, layers: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Returns the hidden states of the wanted layers only.

    Args:
        taps: `[..., len(layers) * D]`, hidden states of some layers side by side.
        layers: indices of these layers.
        wanted: indices of some of them, in the order that is wanted.

    Returns:
        `[..., len(wanted) * D]`.
    """
    if tuple(layers) == tuple(wanted):
        return taps
    places = [layers.index(layer) for layer in wanted]
    return taps.unflatten(-1, (len(layers), -1))[..., places, :].flatten(-2) if places else taps[..., :0]


def target_output(
    target: Any, outputs: Any, states_name: str, tap_layers: Sequence[int], last: LastState | None = None
) -> TargetOutput:
    """Logits and taps of a forward.

    Args:
        states_name: of the hidden states in the outputs.
        tap_layers: indices into them; taps are empty if there are none.
        last: what was kept of the last layer before its norm.

    Raises:
        DraftingRefused: the hidden states are not there, or not one vector for each position.
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
    """Which hidden states and attentions there are among outputs, of those that are asked for."""
    wanted = [*([names.states] if states else []), *(names.attentions if attentions else ())]
    return [name for name in wanted if outputs.get(name) and outputs[name][0] is not None]  # some models have none


def prompt_outputs(outputs: Any, names: Sequence[str], row: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Hidden states and attentions of a prompt's forward, of one row."""
    return {name: tuple(layer[row : row + 1] for layer in outputs[name]) for name in names}


@dataclass(frozen=True)
class NodeOutputs:
    """The outputs of a forward over drafts, from which those of single nodes can be taken.

    Attributes:
        names: what is taken.
        again: number of columns before the drafts, of tokens that were read again; see `chain_reading`.
        columns: number of columns of the drafts.
    """

    call: TargetCall
    outputs: Any
    names: Sequence[str]
    again: int
    columns: int

    def of(self, row: int, path: Sequence[int]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Those of the last node of `path`, from the root on, as plain decoding returns them for one token."""
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
        """Of each layer's weights `[1, heads, 1, kv]` over the cache and all nodes, those of the row's own text."""
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
