"""All the acceleration there is: compiled forwards on GPUs, grouped attention and packed weights on CPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.accelerator import Acceleration
from ..core.tensors import device_of
from ..cpu.grouped_attention import grouped_attention
from ..cpu.packing import Packing
from .compiled_calls import CompiledCalls, compiled


class DeviceAcceleration(Acceleration):
    """Makes the forwards of one call faster; see [`Acceleration`]."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self._compiled: CompiledCalls | None = None
        self._packing: Packing | None = None

    def compile(self, model_kwargs: dict[str, Any], generation_config: Any, states: Sequence[torch.Tensor]) -> None:
        """Compiles forwards where `generate()` would compile its decoding step."""
        if self._target._valid_auto_compile_criteria(model_kwargs, generation_config):
            self._compiled = CompiledCalls(self._target, generation_config.compile_config, states)
            self.compile_config = self._compiled.config

    def compiled(self, function: Callable[..., None]) -> Callable[..., None]:
        return function if self._compiled is None else compiled(function, self.compile_config)

    def begin(self, asked_for: bool | None, room: int, slower: Callable[[], bool]) -> None:
        """Packs weights, or takes those of earlier calls; compiled forwards would be compiled anew for them."""
        self._packing = Packing(self._target, False if self._compiled else asked_for, slower)
        self.packs = self._packing.begin(room)
        self.packed = self._packing.weights is not None

    def after_round(self) -> bool:
        if self._packing is None:
            return False
        self.packs, before = self._packing.after_round(), self.packed
        self.packed = self._packing.weights is not None
        return self.packed and not before

    def forward(self, inputs: dict[str, Any], comes_again: bool, model: Any = None) -> Any:
        if self._compiled is not None and comes_again and model is None:
            return self._compiled.forward(inputs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(grouped_attention(device_of(self._target)))
            if self._packing is not None and self._packing.weights is not None:
                stack.enter_context(self._packing.weights.in_use())
            return super().forward(inputs, comes_again, model)
