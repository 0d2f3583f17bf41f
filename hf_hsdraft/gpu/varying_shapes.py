"""Attention on GPUs in calls whose shapes change from forward to forward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_AFFECTED = ("cuda",)
_lock, _calls, _before = threading.Lock(), 0, True


@contextlib.contextmanager
def varying_shapes(device: torch.device) -> Iterator[None]:
    """Within, attention on a GPU leaves cuDNN's kernels out, in all threads; nothing changes on a CPU.

    cuDNN builds a plan for each new shape, which takes 50 ms and more on an H200, and PyTorch prefers it where there is
    a mask. The other kernels take any shape.
    """
    global _calls, _before
    if device.type not in _AFFECTED:
        yield
        return
    with _lock:
        if not _calls:
            _before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _calls += 1
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if not _calls:
                torch.backends.cuda.enable_cudnn_sdp(_before)
