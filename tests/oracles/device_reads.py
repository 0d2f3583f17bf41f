"""Counts what makes the host wait for a device, on a CPU that stands for the device.

Tensors count as the host's if they were made of Python's values without a device, or copied from the device. All others
are the device's. So a read is what would make the host wait there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

READS = {"item", "tolist", "numpy", "nonzero", "masked_select", "equal", "__contains__"}
READS |= {f"__{name}__" for name in ("int", "bool", "float", "index", "iter", "len")} - {"__iter__", "__len__"}


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from tensors_in(each)


class DeviceCounts(TorchFunctionMode):
    """Counts reads of the device, and copies to it that wait, by name; and calls of compiled functions."""

    def __init__(self) -> None:
        super().__init__()
        self.host = WeakIdKeyDictionary()
        self.reads: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.inside = False

    def copy(self, result: torch.Tensor) -> torch.Tensor:
        """A copy that is no operator of the round."""
        before, self.inside = self.inside, True
        result = result.clone()
        self.inside = before
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        given = list(tensors_in([*args, *kwargs.values()]))
        on_host = all(each in self.host for each in given)
        moved = name == "to" and any(isinstance(each, torch.device | str) for each in (*args[1:], *kwargs.values()))
        if name == "__getitem__":  # a mask's result has a size to wait for, a list is copied to the device at once
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            masked = any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in index)
            if not on_host and (masked or any(isinstance(each, list) for each in index)):
                self.reads["index"] += 1
        if given and not on_host and (name in READS or name == "cpu"):
            self.reads[name] += 1
        if given and on_host and moved and not kwargs.get("non_blocking"):
            self.reads["copy that waits"] += 1
        if name in ("tensor", "new_tensor", "as_tensor") and (kwargs.get("device") or name == "new_tensor"):
            self.reads["copy that waits"] += 1
        result = func(*args, **kwargs)
        if name == "cpu" or (moved and any(result is each for each in given)):
            result = self.copy(result)  # on a CPU these return the same tensor
        from_host = on_host and not moved and (given or kwargs.get("device") is None)
        if name == "cpu" or from_host:
            for each in tensors_in(result):
                self.host[each] = True
        return result


class WaitingOperators(TorchDispatchMode):
    """Counts operators whose result has a size or a value that the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("nonzero", "masked_select", "unique_consecutive"):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """Yields the counts of all reads within, complete at the end."""
    total: Counter[str] = Counter()
    with WaitingOperators() as operators, DeviceCounts() as counts:
        yield total
    total.update(operators.seen)
    total.update(counts.reads)
