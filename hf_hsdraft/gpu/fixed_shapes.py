"""Forwards and functions of fixed shapes, compiled as `generate()` compiles its decoding step."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ..core.cache_folder import compiler_places, is_private


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
