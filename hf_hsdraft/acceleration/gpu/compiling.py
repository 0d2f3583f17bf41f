"""Functions of fixed shapes, compiled once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

_compiled: list[tuple[Callable[..., Any], Any, Callable[..., Any]]] = []


def compiled(function: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """A function of fixed shapes, compiled by a `CompileConfig`; the same one for each config that is equal."""
    for known, with_config, result in _compiled:
        if known is function and with_config == config:
            return result
    result = torch.compile(function, **{**config.to_dict(), "dynamic": False})  # else a second size makes a variable
    _compiled.append((function, copy.copy(config), result))
    return result
