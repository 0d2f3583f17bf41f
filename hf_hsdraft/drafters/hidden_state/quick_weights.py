"""A drafter's weights converted for fast products of a few rows, and their cache. This module does not travel.

Computes the same network as [`HSDraftNetwork`] with different rounding: drafts may differ a little from training, the
output cannot. On CPUs with our kernel, a draft's states and the search of its tree take one operator each where all
weights are plain; drafts.h has both.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...core.draft_tree import TreeLimits
from ...core.kept import kept_with
from ...core.tensors import RMSNorm, is_unhooked
from ...core.tuning import LIKELY_COLUMNS
from ...cpu.few_queries import attends
from ...cpu.private_operators import works
from ...cpu.products import PRODUCT_ROWS, Norm, NormedProduct, Product, are_rounded, are_weights, joined
from ...cpu.small_weights import KERNEL
from ..base.target_weights import TargetWeights
from ..base.tree_session import TokenBias
from .network import (
    INJECTORS,
    HSDraftAttention,
    HSDraftLayer,
    HSDraftNetwork,
    HSDraftStep,
    Injector,
    PathInjector,
    WorkingWeights,
)
from .trunk import GrowingText, LayerProducts, Trunk, read

_FAR = 2**40  # a window that is never reached
_SAME = {torch.float32: 1e-3, torch.bfloat16: 1e-1}  # greatest distance of two states, relative to their size


@dataclass(frozen=True)
class _Operands:
    """Tensors as the operators take them, and the formats of the copies of weights among them."""

    parts: list[torch.Tensor | None]
    formats: list[int]

    @classmethod
    def of(cls, norms: Sequence[Any], products: Sequence[Any], biases: Sequence[torch.Tensor | None] = ()) -> _Operands:
        """Norms, copies and scales of products, and biases. Raises a TypeError where some are not plain."""
        if not all(norm is None or isinstance(norm, Norm | NormedProduct) for norm in norms):
            raise TypeError("a norm is more than its weight")
        found = [product.operand if isinstance(product, Product) else None for product in products]
        copies = [operand for operand in found if operand is not None]
        if len(copies) < len(found):
            raise TypeError("a product is more than its weight, or has no copy")
        if not all(product.bias is None or any(product.bias is bias for bias in biases) for product in products):
            raise TypeError("a product has a bias")
        weights = [None if norm is None else norm.weight.flatten().contiguous() for norm in norms]
        sides = [copy for copy, _, _ in copies], [scales for _, scales, _ in copies]
        return cls([*weights, *sides[0], *sides[1], *biases], [form for _, _, form in copies])

    @classmethod
    def joined(cls, operands: Sequence[_Operands]) -> _Operands:
        parts = [part for each in operands for part in each.parts]
        return cls(parts, [form for each in operands for form in each.formats])


def _of_layer(layer: Any) -> _Operands:
    if not isinstance(layer, LayerProducts):
        raise TypeError("a layer is more than its products")
    norms = layer.input_norm, None, None, None, layer.mlp_norm, None
    return _Operands.of(norms, [layer.qkv, layer.output, layer.gate_up, layer.down], [None] * 7)


@dataclass(frozen=True)
class RollingOperator:
    """Reads accepted positions of one text and rolls on from the last of them."""

    trunk: Trunk
    operands: _Operands
    form: list[int]
    eps: float

    @classmethod
    def of(cls, trunk: Trunk) -> RollingOperator | None:
        if KERNEL.operators() is None or trunk.frequencies.device.type != "cpu":
            return None
        try:
            made = cls._made(trunk)
        except TypeError:
            return None
        return made if made is not None and works("drafts by one operator", made._agrees) else None

    @classmethod
    def _made(cls, trunk: Trunk) -> RollingOperator | None:
        inputs, layer, steps = trunk.fuse_inputs, trunk.layers[0], trunk.steps
        if not isinstance(inputs, NormedProduct) or not isinstance(layer, LayerProducts):
            return None
        if inputs.weight.dtype not in _SAME:
            return None
        shared = steps[0].layers[0] is trunk.layers[-len(steps[0].layers)]
        layers = [*trunk.layers, *(() if shared else (layer for step in steps for layer in step.layers))]
        size = 2 * len(trunk.frequencies)
        if size % 32 or size > 256 or not attends(inputs.weight.dtype, layer.heads // layer.kv_heads):
            return None
        of_steps = [_Operands.of([step.norm], [step.project]) for step in steps]
        operands = [_Operands.of([inputs], [inputs.product]), *of_steps, *map(_of_layer, layers)]
        norms: list[Any] = [inputs, *(step.norm for step in steps)]
        norms += [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm)]
        if any((norm.weight.dtype, norm.eps) != (inputs.weight.dtype, inputs.eps) for norm in norms):
            return None
        halves = [layer.gate_up.weight.shape[0] // 2 for layer in layers]
        if any(size % 16 for size in (*halves, *(norm.weight.shape[-1] for norm in norms))):
            return None  # the operator takes whole vectors
        first, rolled = len(trunk.layers), len(steps[0].layers)
        form = [layer.heads, layer.kv_heads, size, first, rolled, len(steps), first - rolled if shared else first]
        return cls(trunk, _Operands.joined(operands), form, inputs.eps)

    def __call__(
        self, taps: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, text: GrowingText, ahead: int
    ) -> torch.Tensor | None:
        """As `read` and `roll`, `[1 + ahead, D]`; `None` for many positions, before anything is read."""
        operators = KERNEL.operators()
        if len(taps) > PRODUCT_ROWS or operators is None or torch.compiler.is_compiling():
            return None
        text.extend(len(taps), ahead)
        rooms = [room for pair in zip(text.keys, text.values, strict=True) for room in pair]
        place = text.length - len(taps), ahead, text.window or _FAR
        weights = self.trunk.frequencies, self.operands.parts, rooms, *place
        return operators.roll_out(taps, embeds, positions, *weights, self.operands.formats, self.form, self.eps)[0]

    def _agrees(self) -> bool:
        """Whether the operator computes what the trunk does, but for rounding."""
        trunk, (heads, size) = self.trunk, self.form[1:3]
        weight = trunk.fuse_inputs.weight  # type: ignore[attr-defined]
        count = 4 * weight.numel()
        numbers = (torch.arange(count, device="cpu", dtype=torch.float32) * 12.9898).sin().to(weight.dtype).view(4, -1)
        pairs = numbers[:, : -weight.shape[1]], numbers[:, -weight.shape[1] :], torch.arange(4, device="cpu")
        like = torch.empty(heads, 0, size, device="cpu", dtype=weight.dtype)
        texts = [GrowingText(len(trunk.layers), like, 3) for _ in range(2)]
        texts[0].extend(4, 0)
        expected, found = read(trunk, *pairs, texts[0], 0)[0], self(*pairs, texts[1], len(trunk.steps))
        assert found is not None  # with a step of each set, which raise where their parts do not fit
        return bool((found[:1] - expected).float().norm() <= _SAME[weight.dtype] * expected.float().norm())


@dataclass(frozen=True)
class SearchingOperator:
    """Searches trees by a path injector."""

    injector: PathInjector
    operands: _Operands
    eps: float

    @classmethod
    def of(cls, injector: Injector) -> SearchingOperator | None:
        if KERNEL.operators() is None or type(injector) is not PathInjector:
            return None
        norm, up, update = injector.token_norm, injector.up, injector.update
        products: list[Any] = [injector.token_proj, update, injector.state_proj, injector.down]
        if not all(isinstance(product, Product) for product in (*products, up)) or up.bias is not None:
            return None
        try:
            operands = _Operands.of([norm], products, [update.bias])
        except TypeError:
            return None
        weights = [norm.weight, up.weight, *(product.weight for product in products)]
        same = {(type(weight), weight.dtype) for weight in weights}  # not quantised, which has a class of its own
        fit = not (up.weight.shape[1] % 32 or update.weight.shape[0] % 32 or norm.weight.numel() % 16)
        fit &= up.weight.is_contiguous()
        return cls(injector, operands, norm.eps) if len(same) == 1 and type(up.weight) is torch.Tensor and fit else None


class SearchedBias(TokenBias):
    """The bias of a path injector, by which an operator searches trees."""

    def __init__(
        self, search: SearchingOperator, weights: TargetWeights, hidden: torch.Tensor, since: torch.Tensor | None
    ) -> None:
        super().__init__(search.injector, weights.embed, hidden, since=since)
        self._operator, self._weights = search, weights

    def search(
        self, logits: torch.Tensor, temperature: float, roots: torch.Tensor, limits: TreeLimits
    ) -> tuple[torch.Tensor, list[int]] | None:
        """As in `TokenBias`; None for what the operator does not take."""
        operators, (texts, _, count), dtype = KERNEL.operators(), logits.shape, logits.dtype
        injector, operands, table = self._operator.injector, self._operator.operands, self._weights.table
        if operators is None or torch.compiler.is_compiling() or limits.tree_size < 1:
            return None
        if table is None or not table.is_contiguous():
            return None
        if not dtype == table.dtype == self.projected.dtype == injector.up.weight.dtype:
            return None
        size, since = injector.update.weight.shape[1] // 2, self._since
        paths = logits.new_zeros(texts, size) if since is None else since[:, 0, size:].contiguous()
        most = limits.tree_size if limits.beam_width > 1 else 1
        columns = count if count < 2 * LIKELY_COLUMNS else LIKELY_COLUMNS
        states = self.projected.contiguous(), paths, since is not None, roots, self._weights.vocab_ids
        own = table, injector.up.weight, operands.parts, operands.formats
        sizes = [most, limits.beam_width, columns]
        return operators.search(logits.contiguous(), *states, *own, sizes, self._operator.eps, temperature)


@dataclass(frozen=True)
class QuickWeights(WorkingWeights):
    """Working weights, fused, packed and in 8 bits; as operands of the kernel's operators, where these compute them."""

    rolling: RollingOperator | None = None
    searching: SearchingOperator | None = None
    spare: list[Any] | None = field(default=None, compare=False, repr=False)  # left for later calls; None for one call

    @classmethod
    def of(cls, drafter: HSDraftNetwork, head: torch.Tensor | None) -> QuickWeights:
        assert head is not None or drafter.lm_head is not None
        trunk = drafter.trunk(joined, lambda layer: layer.products(joined), _fusing(drafter))
        injector = _by_products(drafter.injector)
        return cls(
            **vars(trunk),
            norm=joined(drafter.norm),
            head=Product(head) if drafter.lm_head is None else joined(drafter.lm_head),  # type: ignore[arg-type]
            injector=injector,
            rolling=RollingOperator.of(trunk),
            searching=SearchingOperator.of(injector),
        )


def _by_products(injector: Injector) -> Injector:
    """A copy of the injector that uses products instead of modules."""
    other = copy.copy(injector)
    vars(other)["_modules"] = {}
    for name, part in injector.named_children():
        setattr(other, name, joined(part))
    return other


def _fusing(drafter: HSDraftNetwork) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`HSDraftNetwork.fuse_inputs` with one norm over the concatenation."""
    norms = [*drafter.tap_norms, drafter.token_norm]
    if not are_weights([*norms, drafter.fuse]):
        return drafter.fuse_inputs
    return NormedProduct(norms, drafter.fuse)


@dataclass(frozen=True)
class _Made:
    """Cached working weights, and what they were made of."""

    tensors: Sequence[torch.Tensor]  # held, so that no other tensor gets their identity
    stamp: tuple[Any, ...]
    values: torch.Tensor  # a sample, to detect uncounted writes (to `.data`, in inference mode)
    weights: QuickWeights


def quick_weights(drafter: HSDraftNetwork, embedding: nn.Embedding, output_head: nn.Linear) -> QuickWeights:
    """Returns a drafter's weights with the target's head, cached until either changes.

    Counted writes and replaced tensors are always noticed. Writes to `.data` and in inference mode are noticed only if
    they change practically all values. Nothing is cached for drafters with adapters or hooks, or heads that are packed
    or offloaded.
    """
    # The result outlives the call and may be used with gradients enabled, so no inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        head = drafter.lm_head if drafter.lm_head is not None else output_head
        tensors = [getattr(head, "weight", None), *drafter.parameters()]
        as_built = all(part is drafter or (type(part) in _PARTS and is_unhooked(part)) for part in drafter.modules())
        if not as_built or not all(map(_can_be_sampled, tensors)):
            return QuickWeights.of(drafter, drafter.borrow(embedding, output_head).head)
        stamp, values = _stamp(drafter, tensors), _sample(tensors)
        # Kept with output layer and drafter, so that they end with either
        of_head: weakref.WeakKeyDictionary[Any, _Made] = kept_with(head, "weights", weakref.WeakKeyDictionary)
        kept = of_head.get(drafter)
        if kept is None or kept.stamp != stamp or not torch.equal(kept.values, values):
            weights = QuickWeights.of(drafter, drafter.borrow(embedding, output_head).head)
            kept = of_head[drafter] = _Made(tensors, stamp, values, replace(weights, spare=[]))
        return kept.weights


def _stamp(drafter: HSDraftNetwork, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What shows a change without reading values. Inference tensors have no write counter."""
    ids = drafter.config.draft_vocab_ids
    seen = [(id(t), t.data_ptr(), 0 if t.is_inference() else t._version, t.shape, t.dtype, t.device) for t in tensors]
    return are_rounded(), KERNEL.operators() is not None, ids if ids is None else tuple(ids), seen


# Modules of a plain drafter; others may change without a change of parameters.
_PARTS = (
    nn.ModuleList,
    HSDraftLayer,
    HSDraftStep,
    HSDraftAttention,
    *INJECTORS.values(),
    nn.Linear,
    RMSNorm,
)


def _can_be_sampled(tensor: Any) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta"
    return plain and tensor.is_floating_point() and tensor.is_contiguous()


def _sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A few values of each tensor: training, merging and loading change practically all values."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    parts = [part[:: len(part) // 32 + 1].to(tensors[0].device, torch.float32) for part in parts]
    return torch.cat(parts).cpu()
