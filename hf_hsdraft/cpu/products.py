"""Products and norms as decoding runs them: joined, and laid out for the processor once.

At the size of a drafter each operation costs more to start than to run, and the target's forward has evicted the
weights from a CPU's caches. So products are joined where possible, and read few bytes.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..core.tensors import RMSNorm, Transform, is_unhooked, side_by_side
from .packed_weights import SMALL_ROWS, PackedWeight, has_kernel
from .private_operators import can_multiply_in_8_bits, product_in_8_bits
from .small_weights import KERNEL, SmallCopy, fits, in_int8

ROWS_IN_8_BITS = 8  # number of rows that 8-bit weights are multiplied by - by hand: a default beam has so many
# The same of a large weight, a head, that has a packed copy; and the number of numbers that makes it large
# - by hand: a head of 10 million numbers took 1.1 ms for one row by 8 bits, 2.0 for six, 0.8 packed.
LARGE_ROWS_IN_8_BITS = 2
LARGE_WEIGHT = 2**22
PRODUCT_ROWS = 64  # number of rows that a packed copy is multiplied by - by hand: the rows of several texts
PRODUCT_BYTES = 2**27  # number of bytes of a weight that gets a packed copy - by hand
ROWS_ROUNDED = 4096  # number of rows of a weight that are brought to 8 bits at once - by hand

_rounding: contextvars.ContextVar[bool] = contextvars.ContextVar("hsdraft_8_bits", default=True)


def are_rounded() -> bool:
    """Whether products use rounded weights in this context."""
    return _rounding.get()


@contextlib.contextmanager
def in_full_precision() -> Iterator[None]:
    """Within, drafts use the weights as they are, for comparisons with training."""
    token = _rounding.set(False)
    try:
        yield
    finally:
        _rounding.reset(token)


class Product:
    """x W^T + b, by a constant weight `[out, in]` and bias `[out]`.

    The cost of a few rows on a CPU is fetching the weight. So they are multiplied by 8-bit weights, scaled by each
    output's greatest: close enough for drafts. More rows, and a few where no kernel multiplies so, use a packed copy,
    and a prompt's rows the weight itself.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach().contiguous()
        small = _in_8_bits(self.weight)
        self._by_kernel = None if small is None else _for_kernel(*small)
        self._small = small if weight.dtype == torch.bfloat16 else None  # torch's own product takes no other
        self._few = ROWS_IN_8_BITS if weight.numel() < LARGE_WEIGHT else LARGE_ROWS_IN_8_BITS
        if self._by_kernel is not None and (self._small is None or self._by_kernel.operators.is_quick()):
            self._few = SMALL_ROWS
        packs = self.weight.numel() * self.weight.element_size() <= PRODUCT_BYTES and has_kernel(self.weight)
        self._packed = PackedWeight(self.weight) if _rounding.get() and packs else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = 0 if torch.is_grad_enabled() and x.requires_grad else _rows(x)
        if 0 < rows <= (self._few if self._packed else ROWS_IN_8_BITS):
            if self._by_kernel is not None and self._is_plain(x):
                return self._by_kernel(x, self.bias)
            if self._small is not None:
                y = _times_8_bits(x, *self._small)
                return y if self.bias is None else y + self.bias
        if self._packed is not None and 0 < rows <= PRODUCT_ROWS and self._is_plain(x):
            return self._packed(x, self.bias)
        return F.linear(x, self.weight, self.bias)

    @property
    def operand(self) -> tuple[torch.Tensor, torch.Tensor | None, int] | None:
        """A copy of the weight, its scales and its format, as operators of the kernel take them, if there is one."""
        copy = self._by_kernel or (None if self._packed is None else self._packed.made_copy())
        if isinstance(copy, SmallCopy):
            return copy.blocks, copy.scales, copy.format
        return None if copy is None else (copy, None, -1)

    def _is_plain(self, x: torch.Tensor) -> bool:
        """Whether this is not compiled or autocast."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return False
        return x.dtype == self.weight.dtype

    def of(self, outputs: torch.Tensor) -> Transform:
        """The product for some outputs, `[n]`, int64, without bias; for any number of rows."""
        # A beam's rows are multiplied faster by the weights where there are kernels for their dtype. And a compiler
        # takes constant 8-bit weights only.
        if self._small is None or self._packed is not None or torch.compiler.is_compiling():
            weight = self.weight.index_select(0, outputs)
            return lambda x: F.linear(x, weight)
        weight, scales = (part.index_select(0, outputs) for part in self._small)
        return lambda x: _times_8_bits(x, weight, scales)


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def _times_8_bits(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if x.dim() == 2:
        return product_in_8_bits(x.contiguous(), weight, scales)
    return product_in_8_bits(x.reshape(_rows(x), -1).contiguous(), weight, scales).view(*x.shape[:-1], -1)


def _for_kernel(small: torch.Tensor, scales: torch.Tensor) -> SmallCopy | None:
    """The same 8-bit weights for our own kernel, where it runs: it is quicker than torch's from two rows on."""
    operators = KERNEL.operators() if fits(small) else None
    return None if operators is None else in_int8(operators, small, scales)


def _in_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`[out, in]` as int8 and a scale for each output `[out]`, where a kernel makes that quicker; else `None`.

    For bfloat16 and vectors of these widths there is torch's, which does not check that the inputs fill whole vectors;
    for float32 our own.
    """
    quick = weight.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not (quick and _rounding.get()) or sys.platform == "win32":
        return None
    by_torch = weight.dtype == torch.bfloat16 and not weight.shape[1] % 64 and can_multiply_in_8_bits()
    by_kernel = weight.dtype == torch.float32 and fits(weight) and KERNEL.operators() is not None
    if not (by_torch or by_kernel):
        return None
    least = torch.finfo(torch.bfloat16).tiny
    scales = (weight.abs().amax(dim=1).float() / 127).clamp(min=least).to(weight.dtype)
    small = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    for first in range(0, len(weight), ROWS_ROUNDED):  # in float32, a whole head would be large
        rows = slice(first, first + ROWS_ROUNDED)
        small[rows] = (weight[rows].float() / scales[rows, None].float()).round_()
    return small, scales


class Norm:
    """A module's root-mean-square norm, without the module."""

    def __init__(self, norm: RMSNorm) -> None:
        self.weight, self.eps = norm.weight.detach(), norm.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class NormedProduct:
    """A product of normed inputs that are joined."""

    def __init__(self, norms: Sequence[RMSNorm], product: nn.Linear) -> None:
        self.weight, self.eps = torch.stack([norm.weight.detach() for norm in norms]), norms[0].eps
        self.product = Product(product.weight)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Maps inputs `[n, ...]`, which are the norms' inputs side by side, to `[n, out]`."""
        parts = torch.cat(inputs, dim=-1).unflatten(-1, self.weight.shape)
        return self.product((F.rms_norm(parts, parts.shape[-1:], None, self.eps) * self.weight).flatten(1))


def is_plain(module: nn.Module) -> bool:
    """Whether a product or a norm is only its weight: no adapter, nothing that makes or fetches the weight."""
    return type(module) in (nn.Linear, RMSNorm) and is_unhooked(module)


def are_weights(modules: Sequence[nn.Module]) -> bool:
    """Whether these are plain and without biases."""
    return all(is_plain(module) and getattr(module, "bias", None) is None for module in modules)


def joined(*modules: nn.Module) -> Transform:
    """The modules' outputs for the same input, side by side; products are fused."""
    if len(modules) > 1:
        return Product(torch.cat([each.weight for each in modules])) if are_weights(modules) else side_by_side(*modules)  # type: ignore[misc]
    [module] = modules
    if not is_plain(module):
        return module
    return Norm(module) if isinstance(module, RMSNorm) else Product(module.weight, module.bias)  # type: ignore[arg-type]
