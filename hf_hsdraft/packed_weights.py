"""On CPUs, rounds multiply by copies of the target's weights that are laid out for the processor.

PyTorch multiplies a few rows by a weight as it lies in memory, which takes half as long again, or twice as long, as by
a copy laid out for it. It is the same product, summed in another order.

A copy does not follow what is written to its weight. So it is made within a call, and gone with the last call that uses
it. Within a call it is left alone as soon as its weight is another one, or is written to and counts it. Calls that run
at the same time share one copy; before a call takes the copy of another, it compares all the weights with what they
were when they were copied.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .modeling_hsdraft import is_unhooked

PACKING_COST = 3.0  # forwards of one token, as plain decoding runs them, that packing takes as long as, roughly
_FEW_ROWS = 16  # that the layout is chosen for; it serves any number
_LEAST_NUMBERS = 2**16  # of a weight; products of smaller ones take no longer than starting them
_MOST_BYTES = 2**31  # of all copies in the process, unless they are asked for


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
    """x W^T + b, by a copy of W that is made when it is first multiplied by. Several threads may use it.

    Args:
        weight: `[out, in]`, of which `has_kernel` holds.
        shared: whether `holds` will be asked; that takes sums of the weight when it is copied.
    """

    def __init__(self, weight: torch.Tensor, shared: bool = False) -> None:
        self._weight = weight.detach()
        self._copy: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._shared, self._failed, self._making = shared, False, threading.Lock()
        self._place = weight.data_ptr()
        self._version = None if weight.is_inference() else weight._version
        self.size = weight.numel() * weight.element_size()  # of the copy, in bytes

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether `weight`, from which this was made, is what it was, as far as it tells: `.data` may be written to."""
        return weight.data_ptr() == self._place and (self._version is None or weight._version == self._version)

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether a copy of `weight` that is made now would be this one; compares with what was written to `.data`."""
        if self._failed or not self.is_of(weight):
            return False
        return self._copy is None or (self._sums is not None and torch.equal(self._sums, _sums(weight)))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            x: `[..., in]`, of the weight's type; gradients do not get through.
        """
        usual = bias is None or (bias.dim() == 1 and bias.is_contiguous() and bias.dtype == x.dtype)
        if self._failed or not usual or x.numel() == 0:
            return F.linear(x, self._weight, bias)
        if self._copy is None:
            self._make()
            if self._copy is None:
                return F.linear(x, self._weight, bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self._copy, bias, "none", [], "")

    def _make(self) -> None:
        with self._making, torch.inference_mode(False), torch.no_grad():  # calls within and without may share it
            if self._copy is not None or self._failed:  # another thread was faster
                return
            try:
                self._sums = _sums(self._weight) if self._shared else None
                self._copy = torch.ops.mkldnn._reorder_linear_weight(self._weight, _FEW_ROWS)
            except RuntimeError:  # no room for it
                self._failed = True


def _sums(weight: torch.Tensor) -> torch.Tensor:
    """`[out, parts]`, int64: sums of a weight's bits: whoever writes to a weight changes some of them."""
    row = weight.shape[1] * weight.element_size()
    if not weight.is_contiguous() or row % 8 or weight.data_ptr() % 8:
        return weight.detach().view({2: torch.int16, 4: torch.int32}[weight.element_size()]).sum(1, dtype=torch.int64)
    words = weight.detach().view(torch.int64)
    return words.view(len(words), 4 if words.shape[1] % 4 == 0 else 1, -1).sum(-1)


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


# The copies of each layer's weight that new calls may share, and all copies there are; calls alone keep them.
_to_share: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PackedWeight]] = weakref.WeakKeyDictionary()
_alive: weakref.WeakSet[PackedWeight] = weakref.WeakSet()
_sharing = threading.RLock()


class PackedWeights:
    """Packed copies of weights, each made when it is first multiplied by, or shared with others who have made it.

    Copies live for as long as some `PackedWeights` has them. Others share them only if all weights are what they were.

    Args:
        linears: layers of a target, as `linears_to_pack` says.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        with _sharing:
            found = {linear: copy for linear in linears if (copy := _copy_to_share(linear)) is not None}
            if not all(copy.holds(linear.weight) for linear, copy in found.items()):
                found = {}
            self._of: dict[Any, PackedWeight] = {linear: found.get(linear) or _new_copy(linear) for linear in linears}

    @classmethod
    def of(cls, target: Any, asked_for: bool | None) -> PackedWeights | None:
        """Copies of a target's weights, or `None` where there are none to be.

        Args:
            asked_for: as in `linears_to_pack`; the 2 GiB are those of the process, over all targets.
        """
        linears = linears_to_pack(target, asked_for)
        with _sharing:
            packed = cls(linears)  # so far, nothing has been copied
            fits = asked_for or sum(copy.size for copy in _alive) <= _MOST_BYTES
            return packed if linears and fits else None

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


def _copy_to_share(linear: nn.Linear) -> PackedWeight | None:
    copy = _to_share.get(linear)
    return None if copy is None else copy()


def _new_copy(linear: nn.Linear) -> PackedWeight:
    copy = PackedWeight(linear.weight, shared=True)
    _to_share[linear] = weakref.ref(copy)
    _alive.add(copy)
    return copy


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
