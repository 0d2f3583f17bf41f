"""On CPUs, sdpa reads each key once for all the heads that share it, under a tree's mask too.

transformers repeats keys and values for every group wherever there is a mask: on most accelerators the fast kernels
want it so. On a CPU they do not, and the copies grow with the context. The numbers are the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from transformers.integrations import sdpa_attention

_grouped: ContextVar[bool] = ContextVar("hsdraft_grouped", default=False)


@contextlib.contextmanager
def grouped_attention(device: torch.device) -> Iterator[None]:
    """Forwards inside, of this thread, do not repeat keys and values if they run on a CPU; compiled ones still do."""
    token = _grouped.set(device.type == "cpu")
    try:
        yield
    finally:
        _grouped.reset(token)


def install() -> None:
    """Asks us wherever sdpa decides; without effect outside of `grouped_attention`. Idempotent."""
    original = getattr(sdpa_attention, "use_gqa_in_sdpa", None)
    if original is None or getattr(original, "_hsdraft", None) is _grouped:
        return

    @functools.wraps(original)
    def use_gqa_in_sdpa(*args: Any, **kwargs: Any) -> bool:
        if torch.compiler.is_compiling():  # a context variable would break the graph in every layer
            return original(*args, **kwargs)
        return _grouped.get() or original(*args, **kwargs)

    use_gqa_in_sdpa._hsdraft = _grouped  # type: ignore[attr-defined]
    sdpa_attention.use_gqa_in_sdpa = use_gqa_in_sdpa
