"""Speeds up the forwards of a call without changing the output: compilation on GPUs, grouping and packing on CPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.tensors import device_of
from ..cpu.grouped_attention import grouped_attention
from ..cpu.packing import Packing
from ..gpu.fixed_shapes import CompiledCalls, compiled


class Acceleration:
    """Runs the forwards of one call.

    Attributes:
        compile_config: for forwards over trees; `None` if they are not compiled.
        packed: whether forwards multiply by packed copies of the weights.
        packs: whether the next forward makes such copies, and takes longer for it.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._compiled: CompiledCalls | None = None
        self._packing: Packing | None = None
        self.compile_config: Any = None
        self.packed = self.packs = False

    def compile(self, model_kwargs: dict[str, Any], generation_config: Any, states: Sequence[torch.Tensor]) -> None:
        """Compiles forwards into a static cache where `generate()` would compile its decoding step."""
        if self._target._valid_auto_compile_criteria(model_kwargs, generation_config):
            self._compiled = CompiledCalls(self._target, generation_config.compile_config, states)
            self.compile_config = self._compiled.config

    def compiled(self, function: Callable[..., None]) -> Callable[..., None]:
        """Compiles a function of fixed shapes if forwards are compiled."""
        return function if self._compiled is None else compiled(function, self.compile_config)

    def begin(self, asked_for: bool | None, room: int, slower: Callable[[], bool]) -> None:
        """Packs weights or reuses those of earlier calls. Not with compiled forwards: these would be compiled again.

        Args:
            asked_for: the option `packed_weights`.
            room: number of tokens that the call may emit.
            slower: returns whether packed weights are known to slow down this kind of call.
        """
        self._packing = Packing(self._target, False if self._compiled else asked_for, slower)
        self.packs = self._packing.begin(room)
        self.packed = self._packing.weights is not None

    def after_round(self) -> bool:
        """Counts a round; returns whether forwards have just become packed, so that costs must be measured again."""
        if self._packing is None:
            return False
        self.packs, before = self._packing.after_round(), self.packed
        self.packed = self._packing.weights is not None
        return self.packed and not before

    def forward(self, inputs: dict[str, Any], comes_again: bool, model: Any = None) -> Any:
        """Returns the target's outputs.

        Args:
            comes_again: whether many forwards have inputs of this shape, so that compiling pays off.
            model: runs instead of the target, and is made of its layers.
        """
        if self._compiled is not None and comes_again and model is None:
            return self._compiled.forward(inputs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(grouped_attention(device_of(self._target)))
            if self._packing is not None and self._packing.weights is not None:
                stack.enter_context(self._packing.weights.in_use())
            return (self._target if model is None else model)(**inputs, return_dict=True)
