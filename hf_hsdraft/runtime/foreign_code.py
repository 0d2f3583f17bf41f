"""Whose code a function is: a known library's, the user's, or the user's and declared harmless."""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

LIBRARIES = frozenset((
    "transformers", "torch", "peft", "accelerate", "trl", "deepspeed", "bitsandbytes", "liger_kernel", "torchao", "hqq",
    "optimum", "gptqmodel", "awq", "compressed_tensors", "flash_attn", "causal_conv1d", "mamba_ssm", "fla", "einops",
    "safetensors", "tokenizers", "huggingface_hub", "numpy", __name__.partition(".")[0],
))  # fmt: skip
# What modelling modules import of Python itself. Not all of it: `unittest` makes functions that do anything.
_KNOWN = LIBRARIES | frozenset((
    "builtins", "abc", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "itertools", "math",
    "operator", "types", "typing", "typing_extensions", "warnings",
))  # fmt: skip
_harmless: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_Function = TypeVar("_Function")


def harmless(function: _Function) -> _Function:
    """Declares that drafting does no harm beside a function of yours, and returns it; works as a decorator.

    A drafted call makes fewer forwards of the target than a plain one, over several tokens each. Beside your own
    forward hooks, forwards and attention functions nothing is drafted, as they may depend on that. Declare those that
    do not: whose effect on a token does not follow from the number of forwards, from how many tokens a forward
    reads, or from the text's length. Hooks that only record or count for you are the usual case.

        model.register_forward_hook(hf_hsdraft.harmless(lambda *_: calls.append(1)))

    Args:
        function: a function, a method, a `functools.partial` or a callable object. For a method, the declaration is for
            all objects of its class.

    Raises:
        TypeError: it cannot be remembered, as it has no weak references; wrap it in a function.
    """
    code = getattr(function, "__func__", function)
    try:
        _harmless[id(code)] = code
    except TypeError:
        raise TypeError(f"{function!r} cannot be declared harmless: expected a function. Wrap it in one.") from None
    return function


def is_harmless(function: Any) -> bool:
    """Whether a function was declared harmless itself."""
    code = getattr(function, "__func__", function)
    return _harmless.get(id(code)) is code


def is_foreign(function: Any) -> bool:
    """Whether a function, or one that it wraps, is not a known library's, and was not declared harmless."""
    try:
        while function is not None:
            if is_harmless(function):
                return False
            function = getattr(function, "__func__", function)
            if isinstance(function, functools.partial):
                function = function.func
                continue
            if library_of(function) not in _KNOWN:
                return True
            function = getattr(function, "__wrapped__", None)
    except Exception:  # an object of the user's that answers strangely
        return True
    return False


def library_of(function: Any) -> str:
    space = getattr(function, "__globals__", None)
    if space is not None:  # not `__module__`, which `functools.wraps` copies
        name = space.get("__name__")
    elif type(function) is type(len):
        name = function.__module__ or "builtins"
    else:
        name = type(function).__module__
    return (name or "").partition(".")[0]
