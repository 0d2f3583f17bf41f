"""torch's CPU worker threads.

torch creates workers for each thread that computes in parallel, for as long as that thread lives. Two such threads have
more workers than cores. OpenMP then lets workers sleep between operations, and each operation waits until they wake: a
forward over a few tokens takes up to half as long again. So in a process that decodes on one thread, no other thread
may keep workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@contextlib.contextmanager
def without_workers() -> Iterator[None]:
    """Makes this thread compute alone. For loading what another thread decodes with."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def on_own_thread(work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """Runs `work` on a new thread, which has ended with its workers on return; returns or raises its outcome."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, *args, **kwargs).result()
