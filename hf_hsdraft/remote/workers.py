"""The workers by which torch computes on a CPU.

torch has workers for each thread that has computed in parallel, as long as that thread lives. With those of two threads
there are more workers than cores. OpenMP then lets them sleep between operations, and each operation waits until they
are awake: a forward over a few tokens takes up to half as long again. So a process that decodes on one thread gives no
other thread workers to keep.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@contextlib.contextmanager
def without_workers() -> Iterator[None]:
    """Inside, this thread computes by itself. For loading what another thread decodes with."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def on_own_thread(work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """Does something on a new thread, which has ended with its workers when this returns.

    Returns:
        what the work returns; raises what it raises.
    """
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(*args, **kwargs))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return outcome.result()
