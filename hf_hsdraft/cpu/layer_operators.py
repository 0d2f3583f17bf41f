"""The operators of a compiled layer that the running process provides: its products, and attention over its cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .grouped_attention import attend

_library = torch.library.Library("hf_hsdraft", "DEF")
_library.define("product(Tensor x, int place, int size) -> Tensor")
_library.define("attend(Tensor query, Tensor key, Tensor value, float scaling) -> Tensor")
PRODUCT = torch.ops.hf_hsdraft.product.default
ATTEND = torch.ops.hf_hsdraft.attend.default


@dataclass
class Step:
    """What the operators of one layer work with.

    Attributes:
        products: by place, each of `[..., in]`.
        mask: as attention takes it; `None` where a single token sees all.
    """

    products: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    cache: Any
    layer_idx: int
    mask: torch.Tensor | None
    error: BaseException | None = None  # raised by an operator, which the program reports as one of its own


class _Running(threading.local):
    step: Any = None  # a `Step`, while a program runs


running = _Running()


def _product(x: torch.Tensor, place: int, size: int) -> torch.Tensor:
    step = running.step
    try:
        return step.products[place](x)
    except BaseException as error:
        step.error = error
        raise


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    step = running.step
    try:
        keys, values = step.cache.update(key, value, step.layer_idx)
        return attend(query, keys, values, step.mask, scaling)
    except BaseException as error:
        step.error = error
        raise


_library.impl("product", _product, "CPU")
_library.impl("attend", _attend, "CPU")
_library.impl("product", lambda x, place, size: x.new_empty(*x.shape[:-1], size), "Meta")
_library.impl(
    "attend",
    lambda query, key, value, scaling: query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]),
    "Meta",
)
