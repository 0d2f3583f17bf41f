"""Forwards and functions of fixed shapes, compiled as `generate()` compiles its decoding step; the time of a device."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any, Self

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ..core.cache_folder import compiler_places, is_private
from ..core.tensors import shared_attention


class CompiledCalls:
    """A target's forward into a static cache, compiled by `compile_config` or the target's default, as `config`.

    `states` are keys and values of the cache.
    """

    def __init__(self, target: Any, compile_config: Any, states: Sequence[torch.Tensor]) -> None:
        for each in states:  # an earlier cache may have had other sizes
            torch._dynamo.mark_static(each)
        self._call = target.get_compiled_call(compile_config)
        self.config = compile_config or target._default_compile_config()

    def forward(self, inputs: dict[str, Any]) -> Any:
        """The target's outputs; the next call may overwrite them."""
        # Other calls had other shapes; none may become a variable of the graph.
        for value in inputs.values():
            if isinstance(value, torch.Tensor):
                torch._dynamo.mark_static(value)
        inputs = {name: value for name, value in inputs.items() if name != "logits_to_keep"}  # keeps all anyway
        torch.compiler.cudagraph_mark_step_begin()  # outputs stay valid until the next forward
        return self._call(**inputs, return_dict=True)


_compiled: list[tuple[Callable[..., Any], Any, Callable[..., Any]]] = []


def compiled(function: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """A function of fixed shapes, compiled by a `CompileConfig`; cached for equal configs."""
    for known, with_config, result in _compiled:
        if known is function and with_config == config:
            return result
    _compile_privately()
    result = torch.compile(function, **{**config.to_dict(), "dynamic": False})  # else a second size makes a variable
    _compiled.append((function, copy.copy(config), result))
    return result


def _compile_privately() -> None:
    """Names a private folder for compiled code where PyTorch would load what another user may have put there."""
    for name, default in (("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()), ("TRITON_CACHE_DIR", "")):
        place = os.environ.get(name, default)
        if place and not is_private(place):
            os.environ[name] = compiler_places()[name]


class StaticText:
    """A context of a trunk for one forward, over buffers that outlive it. Nothing is read back from the device.

    Args:
        keys, values: for each layer, `[kv_heads, room, head_dim]`; written to.
        window: positions attended to, the own one included; `None` for all.
        columns: pairs that are read, more than are real.
        place: `[2]`, int64, on the device: how many positions have been read, and how many columns are real.

    Attributes:
        starts: `[1]`, the last real column.
    """

    def __init__(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        window: int | None,
        columns: int,
        place: torch.Tensor,
    ) -> None:
        self._keys, self._values, self._window = keys, values, window
        held, count = place.split(1)
        self._places = held + torch.arange(columns, device=place.device)
        self.starts, self._last = count - 1, held + count - 1

    def reading(self) -> Any:
        return partial(self._attend, self._places)

    def rolling(self, step: int, chains: int) -> Any:
        return partial(self._attend, self._last + step)

    def _attend(
        self,
        places: torch.Tensor,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes keys and values at `places` `[n]`, and attends with their queries, or those of `rows`."""
        held_keys, held_values = self._keys[layer], self._values[layer]
        held_keys.index_copy_(1, places, keys.to(held_keys.dtype))  # autocast may have changed the dtype
        held_values.index_copy_(1, places, values.to(held_values.dtype))
        at = (places if rows is None else places[rows])[:, None]
        columns = torch.arange(held_keys.shape[1], device=places.device)
        seen = columns <= at
        if self._window is not None:
            seen = seen & (columns > at - self._window)
        return shared_attention(queries, held_keys, held_values, seen)


def keep_in_place(*parts: Any) -> None:
    """Tells the compiler that all tensors in these structures stay in place: a recorded graph reads them there."""
    for tensor in _tensors(parts):
        torch._dynamo.mark_static_address(tensor, guard=False)


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """All tensors in a plain structure, closures included, and namespaces of operators, which are cyclic, excluded."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _tensors(each)
    elif callable(part) and getattr(part, "__closure__", None):
        yield from _tensors([cell.cell_contents for cell in part.__closure__])
    elif hasattr(part, "__dict__") and not isinstance(part, type | nn.Module | ModuleType):
        yield from _tensors(list(vars(part).values()))


class DeviceTime(AbstractContextManager["DeviceTime"]):
    """The time that a device takes for what is queued within, without waiting for it; elsewhere the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._ends: list[Any] = []

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def __enter__(self) -> Self:
        self._ends = [self._now()]
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.append(self._now())

    @property
    def seconds(self) -> float:
        """To be read once the device has finished."""
        begin, end = self._ends
        return begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin
