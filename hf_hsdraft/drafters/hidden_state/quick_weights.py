"""A drafter's weights converted for fast products of a few rows, and their cache. This module does not travel.

Computes the same network as [`HSDraftNetwork`] with different rounding: drafts may differ a little from training, the
output cannot.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...core.tensors import RMSNorm, is_unhooked
from ...cpu.products import NormedProduct, Product, are_rounded, are_weights, joined
from ...cpu.small_weights import KERNEL
from .draft_operators import RollingOperator, SearchingOperator
from .network import INJECTORS, HSDraftAttention, HSDraftLayer, HSDraftNetwork, HSDraftStep, Injector, WorkingWeights


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

    def is_of(self, tensors: Sequence[torch.Tensor], stamp: tuple[Any, ...], values: torch.Tensor) -> bool:
        same = self.stamp == stamp and all(map(operator.is_, self.tensors, tensors))
        return same and torch.equal(self.values, values)


# Keyed by output layer and drafter, so an entry ends with either.
_Kept = weakref.WeakKeyDictionary[HSDraftNetwork, _Made]
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


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
        of_head = _kept.setdefault(head, weakref.WeakKeyDictionary())
        kept = of_head.get(drafter)
        if kept is None or not kept.is_of(tensors, stamp, values):
            weights = QuickWeights.of(drafter, drafter.borrow(embedding, output_head).head)
            kept = of_head[drafter] = _Made(tensors, stamp, values, replace(weights, spare=[]))
        return kept.weights


def _stamp(drafter: HSDraftNetwork, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What shows a change without reading values. Inference tensors have no write counter."""
    ids = drafter.config.draft_vocab_ids
    seen = [(t.data_ptr(), 0 if t.is_inference() else t._version, t.shape, t.dtype, t.device) for t in tensors]
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
