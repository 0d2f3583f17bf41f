"""The roll-out in tensors that never change their size or place, so that it can be compiled into one graph.

On a GPU a roll-out is a hundred kernels that take longer to start than to run. Here the accepted positions are padded
to a fixed number; how many of them are real, and where the text ends, are values on the device.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ...acceleration.gpu.compiled_calls import compiled
from ...common.tensors import on_device
from .configuration_hsdraft import HSDraftConfig
from .network import DraftContext, HSDraftNetwork, rotary_embedding
from .roll_out import Layer, RollOut
from .working_weights import WorkingWeights

_ALIGNED = 256  # rooms are multiples of it: few sizes to compile for, and masks in whole vectors


def room_for(slots: int, num_draft_steps: int) -> int:
    """Positions to hold for a text of `slots` at most and what is drafted after it, padding included."""
    needed = slots + num_draft_steps + 1
    return needed + -needed % _ALIGNED


class StaticRollOut(RollOut):
    """A [`RollOut`] of one shape. Prompts are read as there, they have many.

    Args:
        weights, config, device, dtype: of the drafter.
        room: positions that can be held, see `room_for`.
        num_draft_steps: K, rolled out each time, whatever is asked for.
        compile_config: of transformers; `None` compiles nothing.

    Attributes:
        made_for: the last three.
    """

    def __init__(
        self,
        weights: WorkingWeights,
        config: HSDraftConfig,
        device: torch.device,
        dtype: torch.dtype,
        room: int,
        num_draft_steps: int,
        compile_config: Any = None,
    ) -> None:
        super().__init__(weights, config, device, dtype)
        self.made_for = room, num_draft_steps, copy.copy(compile_config)
        self._steps = num_draft_steps
        self._columns = num_draft_steps + 1  # what a round accepts, as a rule; more are read as a prompt is
        shape = config.num_key_value_heads, room, config.head_dim
        for layer in self._layers:
            layer.keys, layer.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self._run = roll_out if compile_config is None else compiled(roll_out, compile_config)
        if compile_config is not None:
            used = weights.fuse_inputs, weights.roll_norm, weights.roll, self._frequencies, self._layers
            for tensor in _tensors(used):
                torch._dynamo.mark_static_address(tensor, guard=False)  # a recorded graph reads them where they are

    def forget(self) -> None:
        """Begins another text."""
        self._length = 0
        for layer in self._layers:  # what is masked is multiplied by 0, and must not be infinite
            layer.keys.zero_()
            layer.values.zero_()

    def resume(self, context: DraftContext) -> None:
        for layer, (keys, values) in zip(self._layers, context.layers, strict=True):
            layer.keys[:, : context.length], layer.values[:, : context.length] = keys, values
        self._length = context.length

    def __call__(
        self, taps: torch.Tensor, embeds: torch.Tensor, position_ids: torch.Tensor, num_draft_steps: int
    ) -> torch.Tensor:
        if num_draft_steps > self._steps:
            raise ValueError(f"num_draft_steps={num_draft_steps} is invalid: expected {self._steps} at most")
        early = len(taps) - self._columns
        if early > 0:
            self.read(taps[:early], embeds[:early], position_ids[:early], ahead=0)
            taps, embeds, position_ids = taps[early:], embeds[early:], position_ids[early:]
        count = len(taps)
        padding = (0, 0, 0, self._columns - count)
        states = self._run(
            self._weights,
            self._layers,
            self._frequencies,
            F.pad(taps, padding),
            F.pad(embeds, padding),
            F.pad(position_ids, padding[2:]),
            on_device([self._length, count], taps.device),
            self._steps,
        )
        self._length += count
        return states[:num_draft_steps].clone()  # the next run may write over them


def roll_out(
    weights: WorkingWeights,
    layers: Sequence[Layer],
    frequencies: torch.Tensor,
    taps: torch.Tensor,
    embeds: torch.Tensor,
    position_ids: torch.Tensor,
    place: torch.Tensor,
    num_draft_steps: int,
) -> torch.Tensor:
    """As [`RollOut`], of padded accepted positions: `[K, D]`, g_0 .. g_{K-1}. The same operations for any text.

    Args:
        taps, embeds, position_ids: `[columns, ...]`, more than are real.
        place: `[2]`, int64, on the device: how many positions have been read, and how many columns are real.
    """
    held, count = place.split(1)
    places = held + torch.arange(len(taps), device=taps.device)
    x = _read(weights.fuse_inputs(taps, embeds), layers, frequencies, position_ids, places)
    last = count - 1
    x, position, place = (column.index_select(0, last) for column in (x, position_ids, places))
    states = [x]
    for _ in range(num_draft_steps - 1):
        position, place = position + 1, place + 1
        x = _read(weights.roll(weights.roll_norm(x)), layers, frequencies, position, place)
        states.append(x)
    return torch.cat(states)


def _read(
    x: torch.Tensor,
    layers: Sequence[Layer],
    frequencies: torch.Tensor,
    position_ids: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """The trunk on inputs `[n, D]`, which are kept at `places` `[n]` of the layers' room."""
    rope = rotary_embedding(position_ids, frequencies, x.dtype)
    for layer in layers:
        queries, keys, values = layer.projected(x, rope)
        layer.keys.index_copy_(1, places, keys.to(layer.keys.dtype))  # autocast may have made them others
        layer.values.index_copy_(1, places, values.to(layer.values.dtype))
        columns = torch.arange(layer.keys.shape[1], device=x.device)
        seen = columns <= places[:, None]
        if layer.window is not None:
            seen = seen & (columns > places[:, None] - layer.window)
        # The heads of a group stand where queries do: no key is read twice, and none is copied.
        rows, groups = len(x), layer.heads // layer.kv_heads
        grouped = queries.view(rows, layer.kv_heads, groups, -1).permute(1, 2, 0, 3).flatten(1, 2)
        mixed = F.scaled_dot_product_attention(
            grouped[None], layer.keys[None], layer.values[None], seen.repeat(groups, 1)
        )
        x = layer.output(x, mixed[0].unflatten(1, (groups, rows)).permute(2, 0, 1, 3).reshape(rows, -1))
    return x


_MOST_SPARE = 4  # of a drafter's weights
_lock = threading.Lock()


@contextmanager
def static_roll_out(
    drafter: HSDraftNetwork, weights: WorkingWeights, slots: int, num_draft_steps: int, compile_config: Any
) -> Iterator[StaticRollOut]:
    """A [`StaticRollOut`] that has read nothing, for one call. The next such call gets it again: a graph belongs to the
    tensors it was recorded with.

    Args:
        weights: of the drafter, such as have `spare` ones.
        slots: positions that the text has at most.
    """
    sizes, spare = (room_for(slots, num_draft_steps), num_draft_steps, compile_config), weights.spare
    assert spare is not None
    with _lock:
        found = next((each for each in spare if each.made_for == sizes), None)
        if found is not None:
            spare.remove(found)
    if found is None:
        with torch.inference_mode(False):  # it may serve calls within and without
            found = StaticRollOut(weights, drafter.config, drafter.device, drafter.dtype, *sizes)
    try:
        found.forget()
        yield found
    finally:
        with _lock:
            spare.append(found)
            del spare[:-_MOST_SPARE]


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """All tensors that a plain structure is made of, those that its functions have bound among them."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _tensors(each)
    elif callable(part) and getattr(part, "__closure__", None):
        yield from _tensors([cell.cell_contents for cell in part.__closure__])
    elif hasattr(part, "__dict__") and not isinstance(part, type | torch.nn.Module):
        yield from _tensors(list(vars(part).values()))
