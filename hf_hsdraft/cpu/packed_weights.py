"""On CPUs, rounds multiply by copies of the target's weights that are laid out for the processor.

PyTorch takes 1.5 to 2 times as long to multiply a few rows by a weight as it lies in memory as by such a copy. It is
the same product, summed in another order. The copy of a weight that the user quantised holds it as it was quantised.

A copy does not follow writes to its weight. So it is made within a call, and freed with the last call that uses it.
Within a call it is skipped as soon as its weight is replaced, or written to in a way that its version counts.
Concurrent calls share one copy; before a call takes another call's copy, it compares all the weights with what was
copied.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as _of_all_modules

from ..core.tensors import is_unhooked
from ..core.tuning import TUNING
from .small_weights import quantised_parts
from .weight_copies import Copy, copy_of, has_kernel, is_worth_it, product, stamps_of, sums_of


def linears_to_pack(target: Any, asked_for: bool | None) -> list[nn.Linear]:
    """The layers of a target worth packing; none where there is no kernel, or where something is compiled.

    `asked_for`: `True` for all that can be packed, whatever their size; `None` for those where it pays, if they take no
    more than 2 GiB together; `False` for none.
    """
    if asked_for is False or target.device.type != "cpu" or not _are_products_torchs_own():
        return []
    modules = list(target.modules())
    if any(map(_is_compiled, modules)):  # it would be recompiled
        return []
    linears: list[nn.Linear] = [module for module in modules if _can_be_packed(module, target.dtype)]
    if asked_for:
        return linears
    linears = [linear for linear in linears if linear.weight.numel() >= TUNING.packed_least_numbers]
    size = sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)
    return linears if size <= TUNING.packed_bytes else []


def packed_now(target: nn.Module) -> list[nn.Linear]:
    """The layers of a target that multiply by packed copies in this context."""
    modules: Any = target.modules()
    return [module for module in modules if module in _in_use.get()]


def _are_products_torchs_own() -> bool:
    """Whether no library has replaced linear products, as some for quantised weights do."""
    own = nn.Linear.forward is _FORWARD and _FORWARD.__module__ == nn.Linear.__module__
    return own and not hasattr(_FORWARD, "__wrapped__") and isinstance(F.linear, types.BuiltinFunctionType)


class PackedWeight:
    """x W^T + b, by a copy of W made at the first product. Thread-safe.

    Args:
        weight: `[out, in]`, accepted by `has_kernel`.
        shared: whether `holds` will be called, for which the copy records sums of the weight.
    """

    def __init__(self, weight: torch.Tensor, shared: bool = False) -> None:
        self._weight = weight
        self._copy: Copy | None = None
        self._sums: list[torch.Tensor] | None = None
        self._shared, self._failed, self._making = shared, False, threading.Lock()
        self._stamps = stamps_of([weight])
        self.size = weight.numel() * weight.element_size()  # of the copy, in bytes, or more

    @property
    def made(self) -> bool:
        """Whether the copy has been made, or has failed."""
        return self._copy is not None or self._failed

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether `weight` is unchanged, as far as its version tells: `.data` may be written to."""
        return stamps_of([weight]) == self._stamps

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether the copy still matches `weight`, compared by value to detect writes to `.data`."""
        if self._failed or not self.is_of(weight):
            return False
        if self._copy is None:
            return True
        return self._sums is not None and all(map(torch.equal, self._sums, sums_of([weight])))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` is `[..., in]`, of the weight's dtype; no gradients."""
        usual = bias is None or (bias.dim() == 1 and bias.is_contiguous() and bias.dtype == x.dtype)
        if usual and x.numel() and not self.made:
            self._make()
        if self._copy is not None and usual and x.numel() and is_worth_it(self._copy, x):
            return product(x, self._copy, bias)
        return F.linear(x, self._weight, bias)

    def _make(self) -> None:
        with self._making, torch.inference_mode(False), torch.no_grad():  # for calls in and outside of inference mode
            if self.made:  # by another thread
                return
            try:
                self._sums = sums_of([self._weight]) if self._shared else None
                self._copy = copy_of([self._weight])
            except RuntimeError:  # out of memory
                pass
            self._failed = self._copy is None


def _is_compiled(module: nn.Module) -> bool:
    compiled = module._compiled_call_impl is not None and not isinstance(module._compiled_call_impl, _Forward)
    return compiled or hasattr(module.forward, "_torchdynamo_orig_callable")


def _can_be_packed(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module is a plain product: no adapter, nothing that makes or fetches the weight."""
    if type(module) is not nn.Linear or not is_unhooked(module):
        return False
    if type(module.weight) is not nn.Parameter and quantised_parts(module.weight) is None:
        return False
    shape = module.out_features, module.in_features
    return has_kernel(module.weight) and module.weight.dtype == dtype and tuple(module.weight.shape) == shape


_FORWARD = nn.Linear.forward
_in_use: ContextVar[dict[nn.Module, PackedWeight]] = ContextVar("hsdraft_packed", default={})  # noqa: B039 never written


# Copies of each layer's weight that new calls may share, and all copies; only calls keep them alive.
_to_share: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PackedWeight]] = weakref.WeakKeyDictionary()
_alive: weakref.WeakSet[PackedWeight] = weakref.WeakSet()
_sharing = threading.RLock()


class PackedWeights:
    """Packed copies of weights, made at the first product or shared with other calls.

    Copies live as long as some `PackedWeights` holds them. They are shared only if all weights are unchanged.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        with _sharing:
            found = {linear: copy for linear in linears if (copy := _copy_to_share(linear)) is not None}
            if not all(copy.holds(linear.weight) for linear, copy in found.items()):
                found = {}
            self._of: dict[Any, PackedWeight] = {linear: found.get(linear) or _new_copy(linear) for linear in linears}

    @classmethod
    def of(cls, target: Any, asked_for: bool | None) -> PackedWeights | None:
        """Copies of a target's weights, or `None` if nothing is to be packed.

        `asked_for` is as in `linears_to_pack`; the 2 GiB are for the process, over all targets.
        """
        linears = linears_to_pack(target, asked_for)
        with _sharing:
            packed = cls(linears)  # nothing is copied yet
            fits = asked_for or sum(copy.size for copy in _alive) <= TUNING.packed_bytes
            return packed if linears and fits else None

    def serve(self, target: Any, asked_for: bool | None) -> bool:
        """Whether these copies include those that a target would get now; compares all the weights.

        They may be more than the default packs, if a call asked for more.
        """
        wanted, able = set(linears_to_pack(target, asked_for)), set(linears_to_pack(target, True))
        if not wanted or not wanted <= set(self._of) <= able:
            return False
        with _sharing:
            return all(copy.holds(linear.weight) for linear, copy in self._of.items())

    @property
    def made(self) -> bool:
        return all(copy.made for copy in self._of.values())

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, in this thread, the layers multiply by the copies."""
        if _is_any_module_hooked() or not _are_products_torchs_own():
            yield
            return
        placed, token = list[_Forward](), _in_use.set(self._of)
        try:
            _stand_in(self._of, placed)
            yield
        finally:
            _in_use.reset(token)  # first: if interrupted, what remains calls the layer itself
            _stand_back(placed)


def _copy_to_share(linear: nn.Linear) -> PackedWeight | None:
    copy = _to_share.get(linear)
    return None if copy is None else copy()


def _new_copy(linear: nn.Linear) -> PackedWeight:
    copy = PackedWeight(linear.weight, shared=True)
    _to_share[linear] = weakref.ref(copy)
    _alive.add(copy)
    return copy


def _is_any_module_hooked() -> bool:
    return bool(_of_all_modules._global_forward_hooks or _of_all_modules._global_forward_pre_hooks)


# torch calls this attribute instead of a module's hooks and forward, as `Module.compile` uses it. Copies of a module,
# in memory or stored, lack it, and no `forward` is touched.
_PLACE = "_compiled_call_impl"
_standing = threading.RLock()


class _Forward:
    """A layer's call while any thread has packed copies in use, in that thread and in others; `users` counts them."""

    def __init__(self, linear: nn.Module) -> None:
        self._linear: Any = linear
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        linear, packed = self._linear, _in_use.get().get(self._linear)
        if packed is not None and len(args) == 1 and not kwargs and _can_take_place(packed, linear, args[0]):
            return packed(args[0], linear.bias)
        return linear._call_impl(*args, **kwargs)


def _stand_in(linears: Iterable[nn.Module], placed: list[_Forward]) -> None:
    """Puts a `_Forward` before each layer that is not compiled, and appends it to `placed`."""
    with _standing:
        for linear in linears:
            forward = vars(linear).get(_PLACE) or _Forward(linear)
            if isinstance(forward, _Forward):
                vars(linear)[_PLACE] = forward
                forward.users += 1
                placed.append(forward)


def _stand_back(placed: Sequence[_Forward]) -> None:
    """Removes each `_Forward` that no other thread needs."""
    with _standing:
        for forward in placed:
            forward.users -= 1
            if not forward.users and vars(forward._linear).get(_PLACE) is forward:
                del vars(forward._linear)[_PLACE]


def _can_take_place(packed: PackedWeight, linear: nn.Linear, input: torch.Tensor) -> bool:
    """Whether the layer would compute just the same product."""
    weight = linear.weight
    if not is_unhooked(linear) or not packed.is_of(weight) or input.dtype != weight.dtype:
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))  # autocast chooses dtypes
