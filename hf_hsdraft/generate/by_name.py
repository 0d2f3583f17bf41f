"""Drafters given by name, as in `generate(assistant_model="user/drafter")`.

A drafter named in a call is loaded once for a target, and kept for as long as the target lives. The methods of
`generate()` that first see an assistant are wrapped, and replace the name by the drafter. A pipeline loads its
assistant itself, from transformers' own registries; see `register_drafter`.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

import torch
from torch import nn
from transformers.generation.utils import GenerationMixin

from ..core.tensors import device_of
from ..drafters.base.auto_drafter import AutoDrafter

_loaded: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def load_drafter(
    name: str | os.PathLike[str], dtype: torch.dtype | None = None, device: Any = "cpu", **loading: Any
) -> Any:
    """Loads a drafter of any family, by `AutoDrafter.from_pretrained`. `dtype` `None` is the dtype of the files."""
    loading = loading if dtype is None else {"dtype": dtype, **loading}
    drafter = AutoDrafter.from_pretrained(name, **loading)
    return drafter.to(device).eval() if isinstance(drafter, nn.Module) else drafter


def load_for(target: Any, name: str | os.PathLike[str], **loading: Any) -> Any:
    """Loads a drafter with a target's dtype to its device.

    Raises an OSError if there is no such folder, repository or drafter, and a ValueError if it holds something else.
    """
    drafter = AutoDrafter.from_pretrained(name, **{"dtype": target.dtype, **loading})
    follow(drafter, target)
    return drafter.eval() if isinstance(drafter, nn.Module) else drafter


def follow(drafter: Any, target: Any) -> None:
    """Moves a drafter to its target's device and dtype."""
    if not isinstance(drafter, nn.Module) or device_of(target).type == "meta":
        return
    if (drafter.device, drafter.dtype) != (device_of(target), target.dtype):
        with _lock:
            drafter.to(device=device_of(target), dtype=target.dtype)


def drafter_of(target: Any, name: str | os.PathLike[str]) -> Any:
    """A target's drafter of this name, loaded on first use; see `load_for`."""
    with _lock:  # concurrent calls load it once
        known = _loaded.setdefault(target, {})
        key = os.fspath(name)
        if key not in known:
            known[key] = load_for(target, key)
    follow(known[key], target)
    return known[key]


def allow_names() -> None:
    """Makes `generate(assistant_model="user/drafter")` work. Idempotent; leaves assistants that are objects alone.

    Call it before `generate_hook.install`, which shows other assistants to targets with their own `generate`.
    """
    if getattr(GenerationMixin._extract_generation_mode_kwargs, "_hsdraft_names", None) is _loaded:
        return

    def named(original: Any, place: int | None) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            arguments = result if place is None else result[place]
            if isinstance(name := arguments.get("assistant_model"), str | os.PathLike):
                arguments["assistant_model"] = drafter_of(self, name)
            return result

        method._hsdraft_names = _loaded  # type: ignore[attr-defined]
        return method

    GenerationMixin._extract_generation_mode_kwargs = named(GenerationMixin._extract_generation_mode_kwargs, None)
    GenerationMixin._prepare_generation_config = named(GenerationMixin._prepare_generation_config, 1)
