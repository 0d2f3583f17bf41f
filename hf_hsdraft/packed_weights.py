"""On CPUs, rounds multiply by copies of the target's weights that are laid out for the processor.

PyTorch multiplies a few rows by a weight as it lies in memory, which takes half as long again, or twice as long, as by
a copy laid out for it. A copy does not follow what is written to its weight. So it is made within a call, and gone with
it; within a call it is left alone as soon as its weight is another one, or is written to and counts it. It is the same
product, summed in another order.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .modeling_hsdraft import is_unhooked

PACKING_COST = 3.0  # forwards of one token, as plain decoding runs them, that packing takes as long as, roughly
_FEW_ROWS = 16  # that the layout is chosen for; it serves any number
_LEAST_NUMBERS = 2**16  # of a weight; products of smaller ones take no longer than starting them
_MOST_BYTES = 2**31  # of all copies, unless they are asked for


def linears_to_pack(target: Any, asked_for: bool | None) -> list[nn.Linear]:
    """The layers of a target that it pays to pack; none where there is no kernel, or where something is compiled.

    Args:
        asked_for: `True` for all that can be packed, whatever their size; `None` for those where it pays, if they take
            no more than 2 GiB together; `False` for none.
    """
    if asked_for is False or target.device.type != "cpu" or not _are_products_torchs_own():
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
    """The layers of a target that multiply by packed copies here and now."""
    modules: Any = target.modules()
    return [module for module in modules if module in _in_use.get()]


def _are_products_torchs_own() -> bool:
    """Whether nobody has put another product in their place, as some libraries of quantised weights do."""
    own = nn.Linear.forward is _FORWARD and _FORWARD.__module__ == nn.Linear.__module__
    return own and not hasattr(_FORWARD, "__wrapped__") and isinstance(F.linear, types.BuiltinFunctionType)


def has_kernel(weight: torch.Tensor) -> bool:
    """Whether there is something here that multiplies by a packed copy of `weight`."""
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.numel() == 0:
        return False
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
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
        self._failed = False
        self._place = weight.data_ptr()
        self._version = None if weight.is_inference() else weight._version

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether `weight`, from which this was made, is what it was, as far as it tells: `.data` may be written to."""
        return weight.data_ptr() == self._place and (self._version is None or weight._version == self._version)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            x: `[..., in]`, of the weight's type; gradients do not get through.
        """
        usual = bias is None or (bias.dim() == 1 and bias.is_contiguous() and bias.dtype == x.dtype)
        if self._failed or not usual or x.numel() == 0:
            return F.linear(x, self._weight, bias)
        if self._copy is None:
            try:
                self._copy = torch.ops.mkldnn._reorder_linear_weight(self._weight, _FEW_ROWS)
            except RuntimeError:  # no room for it
                self._failed = True
                return F.linear(x, self._weight, bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self._copy, bias, "none", [], "")


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")


def _can_be_packed(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module is a product by its weight and no more: no adapter, nothing that makes or fetches the weight."""
    left_behind = isinstance(vars(module).get("forward"), _Forward)
    if type(module) is not nn.Linear or not (left_behind or is_unhooked(module)):
        return False
    if type(module.weight) is not nn.Parameter:
        return False
    shape = module.out_features, module.in_features
    return has_kernel(module.weight) and module.weight.dtype == dtype and tuple(module.weight.shape) == shape


_FORWARD = nn.Linear.forward
_in_use: ContextVar[dict[nn.Module, PackedWeight]] = ContextVar("hsdraft_packed", default={})  # noqa: B039 never written


class PackedWeights:
    """Packed copies of weights, each made when it is first multiplied by.

    Args:
        linears: layers of a target, as `linears_to_pack` says.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._of: dict[Any, PackedWeight] = {linear: PackedWeight(linear.weight) for linear in linears}

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, in this thread, the layers multiply by the copies."""
        token = _in_use.set(self._of)
        try:
            for linear in self._of:
                vars(linear)["forward"] = _Forward(linear)
            yield
        finally:
            _in_use.reset(token)  # first: what an interrupt leaves behind does what the class does
            for linear in self._of:
                vars(linear).pop("forward", None)


def _own_forward(linear: nn.Linear) -> Any:
    return types.MethodType(_FORWARD, linear)


class _Forward:
    """What a layer does for as long as some thread has packed copies in use, in that thread and in others."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def __reduce__(self) -> Any:
        """A copy of the layer that is made meanwhile has its class's forward."""
        return _own_forward, (self._linear,)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        linear, packed = self._linear, _in_use.get().get(self._linear)
        weight = linear.weight
        if packed is None or not packed.is_of(weight) or input.dtype != weight.dtype:
            return _FORWARD(linear, input)
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):  # the latter chooses types of its own
            return _FORWARD(linear, input)
        return packed(input, linear.bias)
