"""The machine that figures are measured on, and the memory that a call takes."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def processor(device: torch.device) -> str:
    """Returns the name of a GPU, or the number and kind of the machine's cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    names, flags = (re.findall(rf"^{field}\s*:\s*(.*)$", text, re.MULTILINE) for field in ("model name", "flags"))
    name = names[0] if names else platform.processor() or platform.machine()
    units = " with AMX" if flags and "amx_bf16" in flags[0] else ""
    return f"{os.cpu_count()} cores of {name}{units} ({torch.backends.cpu.get_cpu_capability()})"


def synchronise(device: torch.device) -> None:
    """Waits for a GPU's queued work, so that a clock counts it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, call: Callable[..., Result], *args: Any, **kwargs: Any) -> tuple[Result, float]:
    synchronise(device)
    begin = time.perf_counter()
    result = call(*args, **kwargs)
    synchronise(device)
    return result, time.perf_counter() - begin


class PeakMemory:
    """Peak bytes since `start`: allocated memory of a GPU, or resident memory of this process.

    It includes the weights of all loaded models. For a process it works on Linux only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> int | None:
        """Resets the peak. Returns the bytes held now, or `None` where the system does not report them."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
        return resident_bytes()

    def peak(self) -> int | None:
        """Returns the peak since `start`; meaningless if that returned `None`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resident_bytes(field="VmHWM")


def resident_bytes(process: int | str = "self", field: str = "VmRSS") -> int | None:
    """Returns a process's resident memory, on Linux; `None` where the system does not report it."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
