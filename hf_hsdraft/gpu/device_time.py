"""How long a device takes for part of its queue."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Self

import torch


class DeviceTime(AbstractContextManager["DeviceTime"]):
    """The time that a device takes for what is queued within, without waiting for it; elsewhere the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._ends: list[Any] = []

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def __enter__(self) -> Self:
        self._ends = [self._now()]
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.append(self._now())

    @property
    def seconds(self) -> float:
        """To be read once the device has finished."""
        begin, end = self._ends
        return begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin
