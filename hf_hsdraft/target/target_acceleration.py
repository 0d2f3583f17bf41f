"""The one place in this room that asks `acceleration/`. Without it every text is the same, only later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ..acceleration.cpu.grouped_attention import grouped_attention
from ..acceleration.cpu.packed_weights import PackedWeights
from ..acceleration.gpu.compiled_calls import CompiledCalls, compiled
from .static_cache import StaticSlots, move_slots


class TargetAcceleration:
    """What makes the forwards and the commits of one call faster.

    Attributes:
        switched_on: `False` runs the target as it is. To be set before a call, on the class or on an object.
        packed: copies of the weights that forwards multiply by.
        move: `move_slots`, or the compiled form of it.
    """

    switched_on = True

    def __init__(self, target: Any) -> None:
        self._target = target
        self._compiled: CompiledCalls | None = None
        self.packed: PackedWeights | None = None
        self.move: Callable[..., None] = move_slots

    def compile(self, model_kwargs: dict[str, Any], generation_config: Any, static: StaticSlots) -> None:
        """Compiles forwards into a static cache, where `generate()` would compile its decoding step."""
        if self.switched_on and self._target._valid_auto_compile_criteria(model_kwargs, generation_config):
            self._compiled = CompiledCalls(self._target, generation_config.compile_config, static.states)
            self.move = compiled(move_slots, self._compiled.config)

    @property
    def compile_config(self) -> Any:
        """By which forwards are compiled; `None` if they are not."""
        return None if self._compiled is None else self._compiled.config

    @property
    def can_pack(self) -> bool:
        """Whether forwards may multiply by packed copies: compiled ones would be compiled anew."""
        return self.switched_on and self._compiled is None

    def forward(self, inputs: dict[str, Any], comes_again: bool) -> Any:
        """The target's outputs.

        Args:
            comes_again: the inputs have a shape that many forwards have, which is worth compiling for.
        """
        if self._compiled is not None and comes_again:
            return self._compiled.forward(inputs)
        with contextlib.ExitStack() as stack:
            if self.switched_on:
                stack.enter_context(grouped_attention(self._target.device))
            if self.packed is not None:
                stack.enter_context(self.packed.in_use())
            return self._target(**inputs, return_dict=True)
