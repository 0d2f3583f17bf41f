"""Small words about tensors and modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Transform = Callable[[torch.Tensor], torch.Tensor]  # of the last axis


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Nested `values` as a tensor on a device, without waiting for what the device still computes."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling a module runs its class's forward alone, on weights that are where it is."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def hooks_of(model: nn.Module) -> list[Any]:
    """The hooks by which accelerate runs parts of a model elsewhere, or keeps their weights elsewhere."""
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    return [part for hook in hooks for part in getattr(hook, "hooks", [hook])]


def device_of(model: Any) -> torch.device:
    """Where a model or a module computes; `model.device` is where its weights are between forwards.

    These are on the meta device where accelerate offloads them. Its hooks then tell where they bring them to.
    """
    device: torch.device = next(model.parameters()).device if not hasattr(model, "device") else model.device
    if device.type != "meta":
        return device
    places = [getattr(hook, "execution_device", None) for hook in hooks_of(model)]
    return next((torch.device(place) for place in places if place is not None), device)


def side_by_side(*modules: nn.Module) -> Transform:
    """What modules make of the same input, joined in the last axis."""
    return modules[0] if len(modules) == 1 else lambda x: torch.cat([module(x) for module in modules], dim=-1)
