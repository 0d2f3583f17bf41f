"""Attention on GPUs in calls whose shapes change from forward to forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..core.forks import new_lock

_AFFECTED = ("cuda",)
_lock, _calls, _disabled = new_lock(), 0, False


@contextlib.contextmanager
def varying_shapes(device: torch.device) -> Iterator[None]:
    """Within, cuDNN attention is disabled on a GPU, where another kernel is enabled; nothing changes on a CPU.

    cuDNN builds a plan for each new shape, which takes 50 ms and more on an H200, and PyTorch prefers it where there is
    a mask. The other kernels take any shape. The switch is PyTorch's, so it holds for all threads, and what others
    switch meanwhile may be lost.
    """
    global _calls, _disabled
    if device.type not in _AFFECTED:
        yield
        return
    flags = torch.backends.cuda
    with _lock:
        if not _calls:
            others = flags.flash_sdp_enabled() or flags.mem_efficient_sdp_enabled() or flags.math_sdp_enabled()
            _disabled = others and flags.cudnn_sdp_enabled()
            if _disabled:
                flags.enable_cudnn_sdp(False)
        _calls += 1
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if not _calls and _disabled:
                flags.enable_cudnn_sdp(True)
