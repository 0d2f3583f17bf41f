"""A drafter's weights laid out for products of a few rows, and how long they are kept; this module does not travel.

The network is that of [`HSDraftNetwork`], but rounded elsewhere: drafts may differ a little from what training
computes, the text cannot.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import RMSNorm, is_unhooked
from ...cpu.products import Product, are_rounded, are_weights, joined
from .injectors import INJECTORS, Injector
from .network import HSDraftAttention, HSDraftLayer, HSDraftNetwork, HSDraftStep, WorkingWeights


@dataclass(frozen=True)
class QuickWeights(WorkingWeights):
    """All of a drafter that decoding multiplies by, joined, packed and in 8 bits.

    Attributes:
        spare: what calls made for these weights and leave to the next one; `None` if they serve a single call.
    """

    spare: list[Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, drafter: HSDraftNetwork, head: torch.Tensor | None) -> QuickWeights:
        assert head is not None or drafter.lm_head is not None
        trunk = drafter.trunk(joined, lambda layer: layer.products(joined), _fusing(drafter))
        return cls(
            **vars(trunk),
            norm=joined(drafter.norm),
            head=Product(head) if drafter.lm_head is None else joined(drafter.lm_head),  # type: ignore[arg-type]
            injector=_by_products(drafter.injector),
        )


def _by_products(injector: Injector) -> Injector:
    """The same rules with products in place of the injector's modules. All else of it stays."""
    other = copy.copy(injector)
    vars(other)["_modules"] = {}
    for name, part in injector.named_children():
        setattr(other, name, joined(part))
    return other


def _fusing(drafter: HSDraftNetwork) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`HSDraftNetwork.fuse_inputs` with one norm for all that stands side by side, their weights in the product's."""
    norms = [*drafter.tap_norms, drafter.token_norm]
    if not are_weights([*norms, drafter.fuse]):
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
    weights: QuickWeights

    def is_of(self, form: tuple[Any, ...], tensors: Sequence[torch.Tensor], values: torch.Tensor) -> bool:
        same = self.form == form and all(map(_Seen.is_still, self.seen, tensors))
        return same and torch.equal(self.values, values)


# Of each output layer and each drafter, so that it ends with either.
_Kept = weakref.WeakKeyDictionary[HSDraftNetwork, _Made]
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


def quick_weights(drafter: HSDraftNetwork, embedding: nn.Embedding, output_head: nn.Linear) -> QuickWeights:
    """Returns the weights of a drafter with the head of a target. They are kept until either changes.

    A change is a write that a tensor counts, however small, or another tensor in its place. Writes to `.data` and in
    inference mode are not counted. They are noticed only where they change practically all values.

    Weights of drafters with adapters or hooks are not kept, and neither are those with packed or offloaded heads.
    """
    # What is made in here outlives the call, and may be read where gradients are wanted.
    with torch.inference_mode(False), torch.no_grad():
        head = drafter.lm_head if drafter.lm_head is not None else output_head
        tensors = [getattr(head, "weight", None), *drafter.parameters()]
        if not all(map(_can_be_sampled, tensors)) or not _is_as_built(drafter):
            return QuickWeights.of(drafter, drafter.borrow(embedding, output_head).head)
        ids = drafter.config.draft_vocab_ids
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        form = (are_rounded(), ids if ids is None else tuple(ids), shapes)
        values = _sample(tensors)
        of_head = _kept.setdefault(head, weakref.WeakKeyDictionary())
        kept = of_head.get(drafter)
        if kept is None or not kept.is_of(form, tensors, values):
            seen = tuple(map(_Seen.of, tensors))
            weights = QuickWeights.of(drafter, drafter.borrow(embedding, output_head).head)
            kept = of_head[drafter] = _Made(form, seen, values, replace(weights, spare=[]))
        return kept.weights


# What a drafter is built of; anything else in its place may change without its parameters.
_PARTS = (
    nn.ModuleList,
    HSDraftLayer,
    HSDraftStep,
    HSDraftAttention,
    *INJECTORS.values(),
    nn.Linear,
    RMSNorm,
)


def _is_as_built(drafter: HSDraftNetwork) -> bool:
    return all(part is drafter or (type(part) in _PARTS and is_unhooked(part)) for part in drafter.modules())


def _can_be_sampled(tensor: Any) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta"
    return plain and tensor.is_floating_point() and tensor.is_contiguous()


def _sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Some values of each: training, merging and loading change practically all of them, where they write uncounted."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    parts = [part[:: len(part) // 32 + 1].to(tensors[0].device, torch.float32) for part in parts]
    return torch.cat(parts).cpu()
