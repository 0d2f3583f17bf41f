"""Forwards and functions of fixed shapes, compiled as `generate()` compiles its decoding step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch


class CompiledCalls:
    """A target's forward into a static cache, compiled.

    Args:
        compile_config: `generation_config.compile_config`; the target's default if there is none.
        states: keys and values of the cache that will be read into.

    Attributes:
        config: that is used.
    """

    def __init__(self, target: Any, compile_config: Any, states: Sequence[torch.Tensor]) -> None:
        for each in states:  # another cache may have had other sizes
            torch._dynamo.mark_static(each)
        self._call = target.get_compiled_call(compile_config)
        self.config = compile_config or target._default_compile_config()

    def forward(self, inputs: dict[str, Any]) -> Any:
        """The target's outputs; the next call may write over them."""
        # Other calls had other shapes; none of them is to become a variable of the graph.
        for value in inputs.values():
            if isinstance(value, torch.Tensor):
                torch._dynamo.mark_static(value)
        inputs = {name: value for name, value in inputs.items() if name != "logits_to_keep"}  # all are kept anyway
        torch.compiler.cudagraph_mark_step_begin()  # until the next forward its outputs stand, whatever else is run
        return self._call(**inputs, return_dict=True)


_compiled: list[tuple[Callable[..., Any], Any, Callable[..., Any]]] = []


def compiled(function: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """A function of fixed shapes, compiled by a `CompileConfig`; the same one for each config that is equal."""
    for known, with_config, result in _compiled:
        if known is function and with_config == config:
            return result
    result = torch.compile(function, **{**config.to_dict(), "dynamic": False})  # else a second size makes a variable
    _compiled.append((function, copy.copy(config), result))
    return result
