"""Functions in the place of methods of `GenerationMixin`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.generation.utils import GenerationMixin


def wrap(**functions: Callable[..., Any]) -> None:
    """Puts functions in the place of methods, once. Each is given the method that was there, and its arguments."""
    for name, function in functions.items():
        original = getattr(GenerationMixin, name)
        if function not in getattr(original, "_hsdraft_functions", ()):
            setattr(GenerationMixin, name, _wrapped(original, function))


def _wrapped(original: Any, function: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    method._hsdraft_functions = (*getattr(original, "_hsdraft_functions", ()), function)  # type: ignore[attr-defined]
    return method
