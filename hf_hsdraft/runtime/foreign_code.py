"""Whose code a function is: a known library's, or the user's."""

from __future__ import annotations

import functools
from typing import Any

_KNOWN = ("transformers", "torch", "peft", "accelerate", "bitsandbytes", "liger_kernel", __name__.partition(".")[0])


def is_foreign(function: Any) -> bool:
    """Whether a function, or one that it wraps, comes from code that is not known to keep no state."""
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        function = getattr(function, "__func__", function)
        space = getattr(function, "__globals__", None)
        # Not `__module__`, which `functools.wraps` copies.
        name = (getattr(type(function), "__module__", "") if space is None else space.get("__name__")) or ""
        if name.partition(".")[0] not in (*_KNOWN, "builtins", "functools"):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
