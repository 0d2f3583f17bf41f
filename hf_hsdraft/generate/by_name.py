"""Drafters given by name, as in `generate(assistant_model="user/drafter")`, "mtp" and "ngrams": loaded once a target.

A pipeline loads its assistant itself, from transformers' own registries; see `register_drafter`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.checks import typo_of
from ..core.forks import new_rlock
from ..core.methods import load
from ..core.tensors import device_of
from ..drafters.base.auto_drafter import AutoDrafter
from ..drafters.lookup.cacheback import CachebackDrafter
from ..runtime.module_hooks import experience_of

_lock = new_rlock()
_MTP, NGRAMS = "mtp", "ngrams"  # no files; a folder of such a name is "./mtp", or a `Path`


def load_drafter(
    name: str | os.PathLike[str], dtype: torch.dtype | None = None, device: Any = None, **loading: Any
) -> Any:
    """Loads a drafter of any family, by `AutoDrafter.from_pretrained`. `dtype` `None` is the dtype of the files.

    Raises an error as that does, and a ValueError for "mtp", which needs a target.
    """
    if name == _MTP:
        raise ValueError(
            f"{name!r} names a drafter made of a loaded target, and here none is loaded: name a folder (./{name}) or a "
            "drafter of the Hub"
        )
    if name == NGRAMS:
        return CachebackDrafter(**loading)
    near = typo_of(name, (_MTP, NGRAMS)) if isinstance(name, str) else ""
    if near and not os.path.isdir(name):
        raise OSError(f"there is no drafter {name!r}: the nearest name is {near!r}, which needs no files")
    drafter = AutoDrafter.from_pretrained(name, **(loading if dtype is None else {"dtype": dtype, **loading}))
    return drafter.to(device).eval() if isinstance(drafter, nn.Module) else drafter


def found_for_targets(name: str | os.PathLike[str], dtype: torch.dtype, device: Any) -> Callable[[Any], Any]:
    """Loads a drafter by `load_drafter` before its target, so that a wrong name is reported first.

    Returns a function that takes the target, and returns the drafter; one made of the target ("mtp") is made there.
    """
    if name == _MTP:
        return _of_own_layers
    drafter = load_drafter(name, dtype, device)
    return lambda target: drafter


def load_for(target: Any, name: str | os.PathLike[str], **loading: Any) -> Any:
    """Loads a drafter with a target's dtype to its device.

    Raises an OSError if there is no such folder, repository or drafter, and a ValueError if it holds something else.
    """
    if name == _MTP:
        if others := sorted(loading.keys() - {"cache_dir", "revision"}):
            raise TypeError(f"{name!r} names the target's own layers, which take no {', '.join(others)}")
        return _of_own_layers(target, **loading)
    return _beside(target, load_drafter(name, **{"dtype": target.dtype, **loading}))


def _of_own_layers(target: Any, **loading: Any) -> Any:
    return load("finder", _MTP).MtpDrafter.for_target(target, **loading)


def best_for(target: Any) -> Any:
    """Loads the best drafter on this machine, as `load_for`, and logs which it is; n-grams where nothing else fits."""
    return _beside(target, AutoDrafter.for_target(target, local_files_only=True))


def _beside(target: Any, drafter: Any) -> Any:
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
        known = experience_of(target).drafters
        key = name if isinstance(name, str) else Path(name)
        if key not in known:
            known[key] = load_for(target, key)
    follow(known[key], target)
    return known[key]


def extract_mode_kwargs(original: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    return with_drafter(target, original(target, *args, **kwargs))


def with_drafter(target: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Puts a target's drafter in the place of its name among a call's arguments."""
    if isinstance(name := arguments.get("assistant_model"), str | os.PathLike):
        arguments["assistant_model"] = drafter_of(target, name)
    return arguments
