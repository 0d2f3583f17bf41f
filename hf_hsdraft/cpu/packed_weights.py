"""On CPUs, rounds multiply by copies of the target's weights that are laid out for the processor.

On most processors PyTorch takes 1.5 to 2 times as long to multiply a few rows by a weight as it lies in memory as by
such a copy; where it does not, rows are multiplied by the weight. It is the same product, summed in another order. The
copy of a weight that the user quantised holds it as it was quantised.

A copy does not follow writes to its weight. So it is made within a call, and freed with the last call that uses it.
Within a call it is skipped as soon as its weight is replaced, or written to in a way that its version counts.
Concurrent calls share one copy; before a call takes another call's copy, it compares all the weights with what was
copied.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.forks import new_lock, new_rlock
from ..core.stand_ins import in_use, is_compiled, standing_in
from ..core.tensors import is_unhooked
from .gguf_blocks import copy_of_blocks, has_blocks
from .private_operators import can_pack, packed_copy, packed_product
from .small_weights import KERNEL, SmallCopy, joined, quantised_parts, small_copy

PACKED_ROWS = 16  # number of rows that the layout is chosen for - by hand
# Number of products by copies of one size, and as many by weights, that are timed before the quicker way is taken
# - by hand: two forwards of 30 layers.
RACED_PRODUCTS = 30
# Least number of numbers of a weight: products of smaller ones take no longer than starting them - by hand.
PACKED_LEAST_NUMBERS = 2**16
# Greatest number of rows that AMX multiplies by quantised weights; more take unpacked weights. Without AMX there is no
# limit
# - measured by small_products.py, AMD EPYC with AVX-512: by Q4_1 192 and 512 rows took 0.86 and 0.93 of the time in
# bfloat16, 0.70 and 0.87 in float32.
SMALL_ROWS = 96
PACKED_BYTES = 2**31  # number of bytes of all copies in the process, unless they are asked for - by hand


def linears_to_pack(target: Any, asked_for: bool | None) -> list[nn.Linear]:
    """The layers of a target worth packing; none where there is no kernel, or where something is compiled.

    `asked_for`: `True` for all that can be packed, whatever their size; `None` for those where it pays, if they take no
    more than 2 GiB together; `False` for none.
    """
    if asked_for is False or target.device.type != "cpu" or not _are_products_torchs_own():
        return []
    modules = list(target.modules())
    if any(map(is_compiled, modules)):  # it would be recompiled
        return []
    dtype, multiplies = target.dtype, cache(_multiplies)
    linears: list[nn.Linear] = [module for module in modules if _can_be_packed(module, dtype, multiplies)]
    return _wanted(linears, asked_for)


def _wanted(linears: list[nn.Linear], asked_for: bool | None) -> list[nn.Linear]:
    """The layers to pack among all that can be."""
    if asked_for is not None:
        return linears if asked_for else []
    linears = [linear for linear in linears if linear.weight.numel() >= PACKED_LEAST_NUMBERS]
    size = sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)
    return linears if size <= PACKED_BYTES else []


def small_rows(dtype: torch.dtype) -> int:
    """Number of rows up to which the kernel, which is there, multiplies by quantised weights as such."""
    return SMALL_ROWS if dtype == torch.bfloat16 and KERNEL.operators().has_tiles() else sys.maxsize


def packed_now(target: nn.Module) -> list[nn.Linear]:
    """The layers of a target that multiply by packed copies in this context."""
    modules: Any = target.modules()
    return [module for module in modules if isinstance(in_use.get().get(module), PackedLinears)]


def _are_products_torchs_own() -> bool:
    """Whether no library has replaced linear products, as some for quantised weights do."""
    own = nn.Linear.forward is _FORWARD and _FORWARD.__module__ == nn.Linear.__module__
    return own and not hasattr(_FORWARD, "__wrapped__") and isinstance(F.linear, types.BuiltinFunctionType)


_Copy = torch.Tensor | SmallCopy  # torch's packed one; of a quantised weight, one of our kernel's


def has_kernel(weight: torch.Tensor) -> bool:
    """Whether a kernel here multiplies by a copy of `weight`."""
    if quantised_parts(weight) is not None:
        return KERNEL.operators() is not None
    return _is_dense(weight) and (_multiplies(weight.dtype) or _in_blocks(weight))


def _in_blocks(weight: torch.Tensor) -> bool:
    """Whether a kernel of ours multiplies by the blocks of a weight's file."""
    return has_blocks(weight) and KERNEL.operators() is not None


def _is_dense(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.layout == torch.strided and weight.numel() > 0


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether torch multiplies by packed copies of weights of this dtype, as it is set now."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    return can_pack(dtype)


def _copy_of(weights: Sequence[torch.Tensor]) -> _Copy | None:
    """A copy of weights `[out, in]`, accepted by `has_kernel`, joined along `out`.

    Returns `None` if the products of a quantised one are others than the kernel's. Raises a RuntimeError without room.
    """
    small = [copy_of_blocks(weight) if quantised_parts(weight) is None else small_copy(weight) for weight in weights]
    found = [copy for copy in small if copy is not None]
    whole = joined(found) if len(found) == len(weights) else None
    if whole is not None or any(quantised_parts(weight) is not None for weight in weights):
        return whole
    dense = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    return packed_copy(dense, PACKED_ROWS)


def _stamps_of(weights: Sequence[torch.Tensor]) -> list[tuple[int, int | None]]:
    """What changes when weights are replaced, or written to in a way that their versions count."""
    parts = [part for weight in weights for part in _parts(weight)]
    return [(part.data_ptr(), None if part.is_inference() else part._version) for part in parts]


def _sums_of(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Checksums `[n]` of the bits of weights, int64, to detect writes to `.data`."""
    parts = [part.detach().reshape(len(part), -1) for weight in weights for part in _parts(weight)]
    operators = KERNEL.operators()
    if operators is not None and all(map(_has_whole_words, parts)):  # in a third of the time
        return operators.sums(parts)
    return torch.cat([_sums(part).flatten() for part in parts])


def _has_whole_words(rows: torch.Tensor) -> bool:
    return rows.is_contiguous() and not (rows.shape[1] * rows.element_size() % 8 or rows.data_ptr() % 8)


def _parts(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a weight: torchao wraps two of them."""
    return quantised_parts(weight) or (weight,)


def _sums(rows: torch.Tensor) -> torch.Tensor:
    if not _has_whole_words(rows):
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[rows.element_size()]
        return rows.view(bits).sum(1, dtype=torch.int64)
    words = rows.view(torch.int64)
    return words.view(len(rows), 1 if words.shape[1] % 4 else 4, -1).sum(-1)


class _Race:
    """Whether products by copies take less time than by weights: they take turns until both have been timed.

    Attributes:
        by_copy: whether the next product is by the copy.
        decided: whether all further ones are as well.
    """

    def __init__(self) -> None:
        self.by_copy, self.decided = True, False
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def note(self, by_copy: bool, seconds: float) -> None:
        self._seconds[by_copy].append(seconds)
        self.by_copy = not by_copy
        if min(map(len, self._seconds.values())) >= RACED_PRODUCTS:
            medians = {way: statistics.median(each) for way, each in self._seconds.items()}
            self.by_copy, self.decided = medians[True] <= medians[False], True


# By dtype, size of the weight, number of joined layers, and rows.
_races: defaultdict[tuple[torch.dtype, int, int, int], _Race] = defaultdict(_Race)


class PackedWeight:
    """x W^T + b, by a copy of W made at the first product. Thread-safe.

    Args:
        weights: `[out, in]` each, accepted by `has_kernel`; of several W is joined along `out`.
        shared: whether `holds` will be called, for which the copy records sums of the weights.
    """

    def __init__(self, *weights: torch.Tensor, shared: bool = False) -> None:
        self._weights = weights
        self._copy: _Copy | None = None
        self._sums: torch.Tensor | None = None
        self._shared, self._failed, self._making = shared, False, new_lock()
        self._stamps = _stamps_of(weights)
        self.size = sum(weight.numel() * weight.element_size() for weight in weights)  # of the copy, in bytes, or more

    @property
    def made(self) -> bool:
        """Whether the copy has been made, or has failed."""
        return self._copy is not None or self._failed

    @property
    def copy(self) -> _Copy | None:
        """The copy, if it has been made."""
        return self._copy

    def made_copy(self) -> _Copy | None:
        """The copy, which is made now if it has not been; `None` without room."""
        if not self.made:
            self._make()
        return self._copy

    def holds(self, *weights: torch.Tensor) -> bool:
        """Whether the copy still matches the weights, compared by value to detect writes to `.data`."""
        return hold([(self, weights)])

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` is `[..., in]`, of the weight's dtype; no gradients."""
        usual = bias is None or (bias.dim() == 1 and bias.is_contiguous() and bias.dtype == x.dtype)
        if usual and x.numel() and not self.made:
            self._make()
        if self._copy is not None and usual and x.numel():
            if not isinstance(self._copy, SmallCopy):
                return self._quicker_product(x, self._copy, bias)
            if x.numel() <= small_rows(x.dtype) * x.shape[-1]:
                return self._copy(x, bias)
        return self._own_product(x, bias)

    def _own_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """By the weights as they lie in memory, each with its part of the bias, which is added before rounding."""
        if len(self._weights) == 1:
            return F.linear(x, self._weights[0], bias)
        sizes = [weight.shape[0] for weight in self._weights]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return torch.cat([F.linear(x, *each) for each in zip(self._weights, biases, strict=True)], dim=-1)

    def _quicker_product(self, x: torch.Tensor, copy: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """By the copy, unless products of so many rows take longer by it on this processor."""
        rows = x.numel() // x.shape[-1]
        rows = rows if rows <= PACKED_ROWS else -rows.bit_length()  # a class of sizes
        race = _races[x.dtype, self.size, len(self._weights), rows]
        by_copy, begin = race.by_copy, 0.0 if race.decided else time.perf_counter()
        output = packed_product(x, copy, bias) if by_copy else self._own_product(x, bias)
        if not race.decided:
            race.note(by_copy, time.perf_counter() - begin)
        return output

    def _make(self) -> None:
        with self._making, torch.inference_mode(False), torch.no_grad():  # for calls in and outside of inference mode
            if self.made:  # by another thread
                return
            try:
                self._sums = _sums_of(self._weights) if self._shared else None
                self._copy = _copy_of(self._weights)
            except RuntimeError:  # out of memory
                pass
            self._failed = self._copy is None


def hold(pairs: Iterable[tuple[PackedWeight, Sequence[torch.Tensor]]]) -> bool:
    """Whether copies still match the weights beside them; see `PackedWeight.holds`."""
    known, now = list[torch.Tensor](), list[torch.Tensor]()
    for copy, weights in pairs:
        if copy._failed or _stamps_of(weights) != copy._stamps:
            return False
        if copy._copy is not None:
            if copy._sums is None:
                return False
            known.append(copy._sums)
            now += weights
    return not known or torch.equal(torch.cat(known), _sums_of(now))


def _can_be_packed(module: Any, dtype: torch.dtype, multiplies: Callable[[torch.dtype], bool]) -> bool:
    """Whether a module is a plain product: no adapter, nothing that makes or fetches the weight."""
    if type(module) is not nn.Linear or not is_unhooked(module):
        return False
    weight = module.weight
    quantised = quantised_parts(weight) is not None
    if not (quantised or type(weight) is nn.Parameter) or weight.dtype != dtype:
        return False
    if tuple(weight.shape) != (module.out_features, module.in_features):
        return False
    if quantised:
        return KERNEL.operators() is not None
    return _is_dense(weight) and (multiplies(dtype) or _in_blocks(weight))


_FORWARD = nn.Linear.forward


class PackedLinears(PackedWeight):
    """Linear layers of one input that multiply by one packed copy; most often a single layer."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__(*(linear.weight for linear in linears), shared=True)
        self.linears = linears
        self._joint = threading.local()  # the last input of this thread, and the parts of its product

    @property
    def unchanged_now(self) -> bool:
        """Whether the layers have the weights that were copied, and no version counts a write to them."""
        same = all(linear.weight is weight for linear, weight in zip(self.linears, self._weights, strict=True))
        return same and _stamps_of(self._weights) == self._stamps

    @property
    def parts(self) -> list[torch.Tensor]:
        """The tensors that hold the weights."""
        return [part for weight in self._weights for part in _parts(weight)]

    def run(self, linear: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs:
            return NotImplemented
        if len(self.linears) == 1:
            return self._product(args[0])
        x, place = args[0], self.linears.index(linear)
        if x.is_inference():  # it has no version to tell whether it was changed in between
            return NotImplemented
        state = x, x._version
        if place == 0:
            outputs = self._product(x)
            if outputs is NotImplemented:
                return outputs
            parts = outputs.split([len(linear.weight) for linear in self.linears], dim=-1)
            self._joint.state, self._joint.parts = state, parts
            return parts[0].contiguous()
        known = getattr(self._joint, "state", None)
        if known is None or known[0] is not x or known[1] != state[1]:
            return NotImplemented
        parts = self._joint.parts
        if place == len(self.linears) - 1:
            self._joint.state = self._joint.parts = None
        return parts[place].contiguous()

    def _product(self, x: torch.Tensor) -> Any:
        """The outputs side by side, or `NotImplemented` if the layers might compute another product."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):  # autocast chooses dtypes
            return NotImplemented
        biases = list[torch.Tensor]()
        for linear, weight in zip(self.linears, self._weights, strict=True):
            own = vars(linear)["_parameters"]  # quicker than by the module's attributes
            if own["weight"] is not weight or weight.dtype != x.dtype or not is_unhooked(linear):
                return NotImplemented
            if own["bias"] is not None:
                biases.append(own["bias"])
        if (biases and len(biases) < len(self.linears)) or _stamps_of(self._weights) != self._stamps:
            return NotImplemented
        return self(x, None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases))


def joined_product(linears: tuple[nn.Linear, ...], x: torch.Tensor) -> torch.Tensor:
    """The outputs of layers of one input, side by side; by one packed copy, if they have one in this context."""
    packed = in_use.get().get(linears[0])
    if isinstance(packed, PackedLinears) and packed.linears == linears:
        outputs = packed._product(x)
        if outputs is not NotImplemented:
            return outputs
    return linears[0](x) if len(linears) == 1 else torch.cat([linear(x) for linear in linears], dim=-1)


# Copies that new calls may share, by each of their layers, and all copies; only calls keep them alive.
_to_share: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PackedLinears]] = weakref.WeakKeyDictionary()
_alive: weakref.WeakSet[PackedLinears] = weakref.WeakSet()
_sharing = new_rlock()


class PackedWeights:
    """Packed copies of weights, made at the first product or shared with other calls.

    Copies live as long as some `PackedWeights` holds them. They are shared only if all weights are unchanged.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._of: dict[Any, PackedLinears] = {}
        with _sharing:
            shared = {copy for linear in linears if (copy := _copy_to_share(linear)) is not None}
            shared = {copy for copy in shared if set(copy.linears) <= set(linears)}
            for copy in shared if _are_unchanged(shared) else ():
                self._add(copy)
            for linear in linears:
                if linear not in self._of:
                    self._add(PackedLinears(linear))

    def _add(self, copy: PackedLinears) -> None:
        _alive.add(copy)
        for linear in copy.linears:
            self._of[linear], _to_share[linear] = copy, weakref.ref(copy)

    @classmethod
    def of(cls, target: Any, asked_for: bool | None) -> PackedWeights | None:
        """Copies of a target's weights, or `None` if nothing is to be packed.

        `asked_for` is as in `linears_to_pack`; the 2 GiB are for the process, over all targets.
        """
        linears = linears_to_pack(target, asked_for)
        with _sharing:
            packed = cls(linears)  # nothing is copied yet
            fits = asked_for or sum(copy.size for copy in _alive) <= PACKED_BYTES
            return packed if linears and fits else None

    def join(self, groups: Iterable[tuple[nn.Linear, ...]]) -> bool:
        """Lets layers that read the same input share a copy, which replaces those they have; whether any is new."""
        new = False
        with _sharing:
            for group in groups:
                held = [self._of.get(linear) for linear in group]
                if len(group) > 1 and all(copy is not None and len(copy.linears) == 1 for copy in held):
                    self._add(PackedLinears(*group))
                    new = True
        return new

    def serve(self, target: Any, asked_for: bool | None) -> bool:
        """Whether these copies include those that a target would get now; compares all the weights.

        They may be more than the default packs, if a call asked for more.
        """
        able = linears_to_pack(target, True)
        wanted = set(_wanted(able, asked_for))
        if not wanted or not wanted <= set(self._of) <= set(able):
            return False
        with _sharing:
            return _are_unchanged(set(self._of.values()))

    @property
    def made(self) -> bool:
        return all(copy.made for copy in self._of.values())

    @contextlib.contextmanager
    def in_use(self, later: Collection[Any] = ()) -> Iterator[Callable[[], None]]:
        """Within, in this thread, the layers multiply by the copies; `later` is as for `standing_in`."""
        own = _are_products_torchs_own()
        with standing_in(self._of, later) if own else contextlib.nullcontext(lambda: None) as place_rest:
            yield place_rest


def _are_unchanged(copies: Iterable[PackedLinears]) -> bool:
    """Whether all copies match their layers' weights now."""
    return hold((copy, [linear.weight for linear in copy.linears]) for copy in copies)


def _copy_to_share(linear: nn.Linear) -> PackedLinears | None:
    copy = _to_share.get(linear)
    return None if copy is None else copy()
