"""What the profiler counts in a call: reads of the device, launches, and operators."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_hsdraft.bench.calls import synchronise

FIGURES = ("reads", "waits", "launches", "graphs", "kernels", "operators")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_READS = ("aten::_local_scalar_dense",)


def counted(call: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """Profiles a call; returns `FIGURES`, see `figures`."""
    return figures(traced(call, device), device.type == "cuda")


def traced(call: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """Profiles a call; returns the events of a trace in Chrome's format."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as found:
        call()
        synchronise(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def figures(events: Iterable[Mapping[str, Any]], cuda: bool) -> dict[str, int]:
    """Counts the events of a trace in Chrome's format.

    - reads: copies from the device to the host; on a CPU, values that Python reads of a tensor.
    - waits: calls in which the host waits for the device. A copy that waits makes one too.
    - launches: kernels that the host launches, and graphs: recorded graphs that it launches.
    - kernels: kernels that the device runs, those of graphs included.
    - operators: operators that Python or compiled code dispatches; not those that operators call.
    """
    found: Counter[str] = Counter(dict.fromkeys(FIGURES, 0))
    events = list(events)
    for event in events:
        category, name = event.get("cat", ""), str(event.get("name", ""))
        if category in ("cuda_runtime", "cuda_driver"):
            found["waits"] += name in _WAITS
            found["graphs"] += name.startswith("cudaGraphLaunch")
            found["launches"] += name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"))
        elif category == "gpu_memcpy":
            found["reads"] += "DtoH" in name
        elif category == "kernel":
            found["kernels"] += 1
        elif category == "cpu_op":
            found["reads"] += not cuda and name in _READS
    found["operators"] = len(dispatched(events))
    return dict(found)


def dispatched(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """Returns the times in a trace when operators began that no other operator called."""
    threads: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and "::" in str(event.get("name", "")):
            threads[event.get("pid"), event.get("tid")].append((event["ts"], -event.get("dur", 0.0)))
    found = []
    for spans in threads.values():
        end = float("-inf")
        for begin, negative in sorted(spans):
            if begin >= end:
                found.append(begin)
                end = begin - negative
    return sorted(found)


def per_step(whole: Mapping[str, int], first: Mapping[str, int], steps: int) -> dict[str, float]:
    """Counts of one step or round, by those of a call and those of a call for its first token."""
    return {name: round((whole[name] - first[name]) / max(steps, 1), 2) for name in FIGURES}
