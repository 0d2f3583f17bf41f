"""A drafter's weights as decoding multiplies by them: joined, and laid out for the processor once.

At the size of a drafter every operation costs more to start than to run, and on a CPU the weights have left its caches
by the time the target has run. So what can be one product is one here, of few bytes. The network is that of
[`HSDrafter`], but rounded elsewhere: drafts may differ a little from what training computes, the text cannot.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...acceleration.cpu.packed_weights import PackedWeight, has_kernel
from ...common.norms import RMSNorm
from ...common.tensors import is_unhooked
from .injectors import INJECTORS, Injector
from .modeling_hsdraft import HSDraftAttention, HSDrafter, HSDraftLayer

Transform = Callable[[torch.Tensor], torch.Tensor]  # of the last axis


_FEW_ROWS, _LARGE_FEW = 8, 2  # that 8-bit weights are multiplied by: what a default beam has, and of a large weight
_LARGE = 2**22  # numbers: a head
_MOST_BYTES = 2**27  # of a weight that is packed; the copy is kept
_MORE_ROWS = 64  # those of several texts; by more, as of a prompt, a weight is multiplied as it is
_ROWS_AT_ONCE = 4096  # of a weight that is brought to 8 bits

_rounding: contextvars.ContextVar[bool] = contextvars.ContextVar("hsdraft_8_bits", default=True)


@contextlib.contextmanager
def in_full_precision() -> Iterator[None]:
    """Within, drafts are made with the weights as they are, for comparisons with training."""
    token = _rounding.set(False)
    try:
        yield
    finally:
        _rounding.reset(token)


class Product:
    """x W^T + b, by a weight that stays as it is.

    What a few rows cost on a CPU is fetching the weight. So in half precision they are multiplied by 8-bit weights,
    each output's scaled by its greatest: close enough for drafts. More rows, and a few in other types, take a packed
    copy, and those of a prompt the weight itself.

    Args:
        weight: `[out, in]`; bias: `[out]`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._small = _in_8_bits(self._weight)
        self._few = _FEW_ROWS if weight.numel() < _LARGE else _LARGE_FEW
        small = self._weight.numel() * self._weight.element_size() <= _MOST_BYTES
        self._packed = PackedWeight(self._weight) if _rounding.get() and small and has_kernel(self._weight) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = _rows(x)
        if self._small is not None and 0 < rows <= (self._few if self._packed else _FEW_ROWS):
            y = _times_8_bits(x, *self._small)
            return y if self._bias is None else y + self._bias
        if self._packed is not None and 0 < rows <= _MORE_ROWS and self._is_plain(x):
            return self._packed(x, self._bias)
        return F.linear(x, self._weight, self._bias)

    def _is_plain(self, x: torch.Tensor) -> bool:
        """Whether nobody compiles this, differentiates it, or chooses types on the way."""
        differentiated = torch.is_grad_enabled() and x.requires_grad
        if torch.compiler.is_compiling() or differentiated or torch.is_autocast_enabled("cpu"):
            return False
        return x.dtype == self._weight.dtype

    def of(self, outputs: torch.Tensor) -> Transform:
        """Some of the outputs, `[n]`, int64, without their bias; for any rows, as they are few where this is asked."""
        if self._small is None:
            weight = self._weight.index_select(0, outputs)
            return lambda x: F.linear(x, weight)
        weight, scales = (part.index_select(0, outputs) for part in self._small)
        return lambda x: _times_8_bits(x, weight, scales)


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def _times_8_bits(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch._weight_int8pack_mm(x.reshape(_rows(x), -1).contiguous(), weight, scales).view(*x.shape[:-1], -1)


def _in_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`[out, in]` as integers, and what to multiply each output with `[out]`, where a kernel makes that quicker.

    There is one for bfloat16 and vectors of these widths; it does not check that the inputs fill whole vectors.
    """
    quick = weight.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not (quick and _rounding.get()) or sys.platform == "win32":
        return None
    if weight.dtype != torch.bfloat16 or weight.shape[1] % 64 or not hasattr(torch, "_weight_int8pack_mm"):
        return None
    least = torch.finfo(torch.bfloat16).tiny
    scales = (weight.abs().amax(dim=1).float() / 127).clamp(min=least).to(torch.bfloat16)
    small = torch.empty_like(weight, dtype=torch.int8)
    for first in range(0, len(weight), _ROWS_AT_ONCE):  # in float32, a whole head would be large
        rows = slice(first, first + _ROWS_AT_ONCE)
        small[rows] = (weight[rows].float() / scales[rows, None].float()).round_()
    return small, scales


class Norm:
    """The root-mean-square norm of a module, without the module."""

    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        self._shape, self._weight, self._eps = tuple(norm.weight.shape), norm.weight.detach().to(dtype), norm.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


def is_plain(module: nn.Module) -> bool:
    """Whether a product or a norm is its weight and no more: no adapter, nothing that makes or fetches the weight."""
    return type(module) in (nn.Linear, RMSNorm) and is_unhooked(module)


def _are_weights(modules: Sequence[nn.Module]) -> bool:
    return all(is_plain(module) and getattr(module, "bias", None) is None for module in modules)


def _product_of(part: nn.Module, dtype: torch.dtype) -> Transform:
    return normed(part, dtype) if type(part) is RMSNorm else joined(part)


def joined(*modules: nn.Module) -> Transform:
    """What the modules make of the same input, side by side."""
    if len(modules) == 1:
        return Product(modules[0].weight, modules[0].bias) if is_plain(modules[0]) else modules[0]  # type: ignore[arg-type]
    if not _are_weights(modules):
        return lambda x: torch.cat([module(x) for module in modules], dim=-1)
    return Product(torch.cat([module.weight for module in modules]))  # type: ignore[misc]


def normed(module: nn.Module, dtype: torch.dtype) -> Transform:
    return Norm(module, dtype) if is_plain(module) else module  # type: ignore[arg-type]


@dataclass(frozen=True)
class LayerWeights:
    """Those of one trunk layer: q, k and v are one product, gate and up another."""

    input_norm: Transform
    qkv: Transform
    output: Transform
    mlp_norm: Transform
    gate_up: Transform
    down: Transform

    @classmethod
    def of(cls, layer: HSDraftLayer, dtype: torch.dtype) -> LayerWeights:
        attention = layer.attention
        return cls(
            normed(layer.input_norm, dtype),
            joined(attention.q_proj, attention.k_proj, attention.v_proj),
            joined(attention.o_proj),
            normed(layer.mlp_norm, dtype),
            joined(layer.gate_proj, layer.up_proj),
            joined(layer.down_proj),
        )


@dataclass(frozen=True)
class WorkingWeights:
    """All of a drafter that decoding multiplies by.

    Attributes:
        fuse_inputs: trunk inputs `[n, D]`, as `HSDrafter.fuse_inputs` makes them.
        roll_norm, roll: from a drafted state to the next input.
        norm, head: from drafted states to draft logits.
        spare: what calls made for these weights and leave to the next one; `None` if they serve a single call.
    """

    fuse_inputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    roll_norm: Transform
    roll: Transform
    layers: tuple[LayerWeights, ...]
    norm: Transform
    head: Transform
    injector: Injector
    spare: list[Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, drafter: HSDrafter, head: torch.Tensor | None) -> WorkingWeights:
        """
        Args:
            head: `TargetWeights.head`.
        """
        dtype = drafter.dtype
        assert head is not None or drafter.lm_head is not None
        return cls(
            _fusing(drafter),
            normed(drafter.roll_norm, dtype),
            joined(drafter.roll_proj),
            tuple(LayerWeights.of(layer, dtype) for layer in drafter.layers),  # type: ignore[arg-type]
            normed(drafter.norm, dtype),
            Product(head) if drafter.lm_head is None else joined(drafter.lm_head),  # type: ignore[arg-type]
            drafter.injector.with_products(lambda part: _product_of(part, dtype)),
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., V']` of drafted states `[..., D]`, before any token information."""
        return self.head(self.norm(hidden))


def _fusing(drafter: HSDrafter) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`HSDrafter.fuse_inputs` with one norm for all that stands side by side, their weights in the product's."""
    norms = [*drafter.tap_norms, drafter.token_norm]
    if not _are_weights([*norms, drafter.fuse]):
        return drafter.fuse_inputs
    scale = torch.cat([norm.weight for norm in norms])
    fuse, eps = Product((drafter.fuse.weight.float() * scale.float()).to(drafter.dtype)), drafter.token_norm.eps

    def fuse_inputs(taps: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        parts = torch.cat([taps, embeds], dim=-1).view(len(taps), len(norms), -1)
        return fuse(F.rms_norm(parts, parts.shape[-1:], None, eps).flatten(1))

    return fuse_inputs


@dataclass(frozen=True)
class _Seen:
    """A tensor as it was when it was last looked at, by what tells of a change without reading its values.

    Attributes:
        tensor: gone with the tensor itself, so that a new one at an old address is another one.
        place: where its values lie.
        version: how often it was written to; `None` of a tensor made in inference mode, which does not count.
    """

    tensor: weakref.ref[torch.Tensor]
    place: int
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        return cls(weakref.ref(tensor), tensor.data_ptr(), None if tensor.is_inference() else tensor._version)

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the one that was seen, and was not written to since, as far as it counts."""
        now = _Seen.of(tensor)
        return self.tensor() is tensor and (now.place, now.version) == (self.place, self.version)


@dataclass(frozen=True)
class _Made:
    """Working weights, and what they were made of.

    Attributes:
        form: shapes, types and devices of the tensors, and all else that decides what is made of them.
        seen: the tensors.
        values: a sample of their values, for writes that no tensor counts: those to `.data`, and in inference mode.
        weights: what they became.
    """

    form: tuple[Any, ...]
    seen: tuple[_Seen, ...]
    values: torch.Tensor
    weights: WorkingWeights

    def is_of(self, form: tuple[Any, ...], tensors: Sequence[torch.Tensor], values: torch.Tensor) -> bool:
        same = self.form == form and all(map(_Seen.is_still, self.seen, tensors))
        return same and torch.equal(self.values, values)


# Of each output layer and each drafter, so that it ends with either.
_Kept = weakref.WeakKeyDictionary[HSDrafter, _Made]
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


def working_weights(drafter: HSDrafter, embedding: nn.Embedding, output_head: nn.Linear) -> WorkingWeights:
    """Those of a drafter with the head of a target; kept until either changes.

    A change is a write that a tensor counts, however small, or another tensor in its place. Writes to `.data` and in
    inference mode are not counted: of those only such are noticed as change values throughout.

    What is not kept: of drafters with adapters or hooks, and of heads that are packed or offloaded.
    """
    # What is made in here outlives the call, and may be read where gradients are wanted.
    with torch.inference_mode(False), torch.no_grad():
        head = drafter.lm_head if drafter.lm_head is not None else output_head
        tensors = [getattr(head, "weight", None), *drafter.parameters()]
        if not all(map(_can_be_sampled, tensors)) or not _is_as_built(drafter):
            return WorkingWeights.of(drafter, drafter.borrow(embedding, output_head).head)
        ids = drafter.config.draft_vocab_ids
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        form = (_rounding.get(), ids if ids is None else tuple(ids), shapes)
        values = _sample(tensors)
        of_head = _kept.setdefault(head, weakref.WeakKeyDictionary())
        kept = of_head.get(drafter)
        if kept is None or not kept.is_of(form, tensors, values):
            seen = tuple(map(_Seen.of, tensors))
            weights = WorkingWeights.of(drafter, drafter.borrow(embedding, output_head).head)
            kept = of_head[drafter] = _Made(form, seen, values, replace(weights, spare=[]))
        return kept.weights


# What a drafter is built of; anything else in its place may change without its parameters.
_PARTS = (
    nn.ModuleList,
    HSDraftLayer,
    HSDraftAttention,
    *INJECTORS.values(),
    nn.Linear,
    RMSNorm,
)


def _is_as_built(drafter: HSDrafter) -> bool:
    return all(part is drafter or (type(part) in _PARTS and is_unhooked(part)) for part in drafter.modules())


def _can_be_sampled(tensor: Any) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta"
    return plain and tensor.is_floating_point() and tensor.is_contiguous()


def _sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Some values of each: training, merging and loading change practically all of them, where they write uncounted."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    parts = [part[:: len(part) // 32 + 1].to(tensors[0].device, torch.float32) for part in parts]
    return torch.cat(parts).cpu()
