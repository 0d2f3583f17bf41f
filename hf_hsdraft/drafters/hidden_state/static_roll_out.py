"""Roll-out in tensors of fixed size and address, so that it compiles into one graph.

On a GPU a roll-out launches about a hundred kernels that take longer to launch than to run. Here the accepted positions
are padded to a fixed number; the true number and the end of the sequence are values on the device.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ...core.tensors import on_device
from ...core.tuning import TUNING
from ...gpu.fixed_shapes import StaticText, compiled, keep_in_place
from ..base.packed_texts import DraftContext
from .configuration_hsdraft import HSDraftConfig
from .draft_session import RollOut
from .network import HSDraftNetwork
from .quick_weights import QuickWeights
from .trunk import Trunk, read, roll


def room_for(slots: int, num_draft_steps: int) -> int:
    """Positions to hold for a sequence of at most `slots` and its drafts, with padding."""
    needed = slots + num_draft_steps + 1
    return needed + -needed % TUNING.static_positions


class StaticRollOut(RollOut):
    """A [`RollOut`] of fixed shape for a single sequence, which always rolls K steps. Prompts are read as in `RollOut`.

    Args:
        room: capacity in positions, see `room_for`.
        compile_config: of transformers; None compiles nothing.

    Attributes:
        made_for: room, K and compile configuration.
    """

    def __init__(
        self,
        trunk: Trunk,
        config: HSDraftConfig,
        device: torch.device,
        dtype: torch.dtype,
        room: int,
        num_draft_steps: int,
        compile_config: Any = None,
    ) -> None:
        super().__init__(trunk, config, device, dtype)
        self.made_for = room, num_draft_steps, copy.copy(compile_config)
        self._steps = num_draft_steps
        self._columns = num_draft_steps + 1  # usual maximum per round; more are read like a prompt
        shape, text = (config.num_key_value_heads, room, config.head_dim), self._text
        text.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in text.keys]
        text.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in text.values]
        self._run = roll_out if compile_config is None else compiled(roll_out, compile_config)
        if compile_config is not None:
            used = trunk.fuse_inputs, trunk.layers, trunk.steps, trunk.frequencies
            keep_in_place(*used, text.keys, text.values)

    def forget(self) -> None:
        self._text.length = 0
        for states in (*self._text.keys, *self._text.values):  # masked values must be finite
            states.zero_()

    def resume(self, context: DraftContext) -> None:
        for index, (keys, values) in enumerate(context.layers):
            self._text.keys[index][:, : context.length] = keys
            self._text.values[index][:, : context.length] = values
        self._text.length = context.length

    def __call__(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        num_draft_steps: int,
        rows: Mapping[int, int] | None = None,
    ) -> torch.Tensor:
        assert rows is None and num_draft_steps <= self._steps
        early = len(taps) - self._columns
        if early > 0:
            self.read(taps[:early], embeds[:early], position_ids[:early])
            taps, embeds, position_ids = taps[early:], embeds[early:], position_ids[early:]
        count, text = len(taps), self._text
        padding = (0, 0, 0, self._columns - count)
        states = self._run(
            self._trunk,
            text.keys,
            text.values,
            self._window,
            F.pad(taps, padding),
            F.pad(embeds, padding),
            F.pad(position_ids, padding[2:]),
            on_device([text.length, count], taps.device),
            self._steps,
        )
        text.length += count
        return states[None, :num_draft_steps].clone()  # the next run may overwrite them


def roll_out(
    trunk: Trunk,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    window: int | None,
    taps: torch.Tensor,
    embeds: torch.Tensor,
    position_ids: torch.Tensor,
    place: torch.Tensor,
    num_draft_steps: int,
) -> torch.Tensor:
    """As [`RollOut`] with padded `[columns, ...]` inputs: `[K, D]`, g_0 .. g_{K-1}, always by the same operations.

    For keys, values, window and place see `StaticText`.
    """
    text = StaticText(keys, values, window, len(taps), place)
    x, ropes = read(trunk, taps, embeds, position_ids, text, num_draft_steps - 1)
    return torch.cat(roll(trunk, x, ropes, text))


_lock = threading.Lock()


@contextmanager
def static_roll_out(
    drafter: HSDraftNetwork, weights: QuickWeights, slots: int, num_draft_steps: int, compile_config: Any
) -> Iterator[StaticRollOut]:
    """Yields an empty [`StaticRollOut`] for one call, and keeps it for the next: a graph is bound to its tensors.

    `weights` must have `spare`; `slots` is the greatest length of the sequence.
    """
    sizes, spare = (room_for(slots, num_draft_steps), num_draft_steps, compile_config), weights.spare
    assert spare is not None
    with _lock:
        found = next((each for each in spare if each.made_for == sizes), None)
        if found is not None:
            spare.remove(found)
    if found is None:
        with torch.inference_mode(False):  # calls in and outside inference mode may use it
            found = StaticRollOut(weights, drafter.config, drafter.device, drafter.dtype, *sizes)
    try:
        found.forget()
        yield found
    finally:
        with _lock:
            spare.append(found)
            del spare[: -TUNING.spare_roll_outs]
