"""On CPUs, rounds multiply by copies of the target's weights that are laid out for the processor.

PyTorch lays a weight out anew in every product of a few rows, which takes about as long as multiplying. A copy laid out
once takes less from the second dozen of products on. A copy cannot know whether its weight was changed since: so it is
made within a call, and gone with it. It is the same product, summed in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .modeling_hsdraft import is_unhooked

PACKING_COST = 3.0  # forwards of one token that packing takes as long as, roughly
_FEW_ROWS = 16  # that the layout is chosen for; it serves any number
_LEAST_NUMBERS = 2**16  # of a weight; products of smaller ones take no longer than starting them
_MOST_BYTES = 2**31  # of all copies, unless they are asked for


def linears_to_pack(target: Any, asked_for: bool | None) -> list[nn.Linear]:
    """The layers of a target that it pays to pack; none where there is no kernel, or where something is compiled.

    Args:
        asked_for: `True` for all that can be packed, whatever their size; `None` for those where it pays, if they take
            no more than 2 GiB together; `False` for none.
    """
    if asked_for is False or target.device.type != "cpu":
        return []
    modules = list(target.modules())
    if any(map(_is_compiled, modules)):  # it would be compiled anew
        return []
    linears: list[nn.Linear] = [module for module in modules if _can_be_packed(module, target.dtype)]
    if asked_for:
        return linears
    linears = [linear for linear in linears if linear.weight.numel() >= _LEAST_NUMBERS]
    size = sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)
    return linears if size <= _MOST_BYTES else []


def packed_now(target: nn.Module) -> list[nn.Linear]:
    """The layers of a target that run within `PackedWeights.in_use`."""
    modules: Any = target.modules()
    return [module for module in modules if isinstance(vars(module).get("forward"), _PackedForward)]


def has_kernel(weight: torch.Tensor) -> bool:
    """Whether there is something here that multiplies by a packed copy of `weight`."""
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.numel() == 0:
        return False
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return half or weight.dtype == torch.float32


class PackedWeight:
    """x W^T + b, by a copy of W that is made when it is first multiplied by.

    Args:
        weight: `[out, in]`, of which `has_kernel` holds.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.detach()
        self._copy: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            x: `[..., in]`, of the weight's type, not empty; gradients do not get through.
        """
        if self._copy is None:
            self._copy = torch.ops.mkldnn._reorder_linear_weight(self._weight, _FEW_ROWS)
        return torch.ops.mkldnn._linear_pointwise.default(x, self._copy, bias, "none", [], "")


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")


def _can_be_packed(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module is a product by its weight and no more: no adapter, nothing that makes or fetches the weight."""
    if type(module) is not nn.Linear or not is_unhooked(module) or type(module.weight) is not nn.Parameter:
        return False
    shape = module.out_features, module.in_features
    return has_kernel(module.weight) and module.weight.dtype == dtype and tuple(module.weight.shape) == shape


class PackedWeights:
    """Packed copies of weights, each made when it is first multiplied by.

    Args:
        linears: layers of a target, as `linears_to_pack` says. They are changed within `in_use` only.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._forwards = [(vars(linear), _PackedForward(linear)) for linear in linears]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the layers multiply by the copies; another thread that runs the target gets the same products."""
        if torch.is_autocast_enabled("cpu"):  # that chooses types of its own
            yield
            return
        for own, forward in self._forwards:
            own["forward"] = forward
        try:
            yield
        finally:
            for own, _ in self._forwards:
                own.pop("forward", None)


class _PackedForward:
    """What a layer does, by a copy of its weight as long as that is its weight and nothing is to be differentiated."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear, self._weight, self._packed = linear, linear.weight, PackedWeight(linear.weight)
        self._version = None if linear.weight.is_inference() else linear.weight._version

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        linear, weight = self._linear, self._weight
        same = linear.weight is weight and (self._version is None or weight._version == self._version)
        if not same or input.dtype != weight.dtype or input.numel() == 0 or torch.is_grad_enabled():
            return F.linear(input, linear.weight, linear.bias)
        return self._packed(input, linear.bias)
