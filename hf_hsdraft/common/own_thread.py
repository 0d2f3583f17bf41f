"""Work on a thread that ends with it, so that a process computes on one thread at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def on_own_thread(work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """Does something on a thread that ends with it; returns the result or raises what it raises.

    torch on a CPU has workers for each thread that has computed, as long as that thread lives. With those of two
    threads there are more workers than cores. OpenMP then lets them sleep between operations, and each operation waits
    for them to wake. So a process that decodes on one thread loads its models on another one that ends.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="own-thread") as thread:
        return thread.submit(work, *args, **kwargs).result()
