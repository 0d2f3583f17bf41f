"""Compilers in the background: one at a time, which gets what no other process wants, within bounds of memory and time.

Where the threads of this process may take all processors, it rests while these are busy, but for a twentieth of the
time at first and a quarter after four minutes. Where a container's quota leaves it no processor, it always runs for a
twentieth.

A compiler is a process in a session of its own. So it outlives an interrupt of the process that started it, and the
next one finds what it has made.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..core.cache_folder import compiler_places, private_folder
from ..core.processors import quota

# Seconds after which a compiler is taken for stuck, and bytes of its data beyond which it ends - by hand: at idle
# priority it may take many times the minute that it takes alone.
COMPILING_SECONDS = 3600.0
COMPILING_BYTES = 2**32


def start_compiler(
    command: Sequence[str], request: Callable[[], bytes] = bytes, at_once: bool = False, **environment: str
) -> subprocess.Popen[bytes] | None:
    """Starts a compiler; `None` while another one runs, of any process that shares the cache.

    Args:
        request: makes its standard input; raises what this raises.
        at_once: whether the caller waits for it: beside other compilers, and at the caller's priority.
        environment: variables besides the caller's.

    Raises:
        OSError: it cannot be started.
        RuntimeError: no more threads may be started.
    """
    turn = None if at_once else _next_turn()
    if turn is None and not at_once:
        return None
    if not at_once:
        allowed = quota()
        # Idle or not, it would use up what a tight quota leaves to the threads of this process, and what it takes of
        # one of these, also of the caches, holds up all of them.
        needed = torch.get_num_threads() + 1
        often = "always" if len(os.sched_getaffinity(0)) >= needed else "idle"
        often = often if allowed is None or allowed >= needed else "seldom"
        limits = str(COMPILING_BYTES), str(COMPILING_SECONDS)
        command = [sys.executable, "-I", str(Path(__file__).with_name("yielding.py")), *limits, often, *command]
    try:
        given = request()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **compiler_places(), **environment},
            start_new_session=True,
            pass_fds=() if turn is None else (turn,),  # it and all that it starts hold the turn until they end
        )
    finally:
        if turn is not None:
            os.close(turn)
    _started.add(process)
    try:
        threading.Thread(target=_hand_over, args=(process, given), name="hsdraft-compiler", daemon=True).start()
    except RuntimeError:
        process.kill()
        process.communicate()
        raise
    return process


_started: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def is_compiling() -> bool:
    """Whether something that this process has started is still being compiled."""
    return any(process.poll() is None for process in list(_started))


def end_compilers() -> None:
    """Ends what this process has started, for measurements and tests: elsewhere another process finds what it makes."""
    for process in list(_started):
        _end(process)
        process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)  # with all that it has started


def _next_turn() -> int | None:
    """A file that this process holds locked now, or `None` while another one does."""
    import fcntl  # on Linux, as all compilers here

    turn = os.open(private_folder("compiler") / "turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(turn)
        return None
    return turn


def _hand_over(process: subprocess.Popen[bytes], request: bytes) -> None:
    """Writes the request, and waits for the process, so that none is left behind."""
    try:
        process.communicate(request, timeout=COMPILING_SECONDS)
    except subprocess.TimeoutExpired:
        _end(process)
        process.wait()
    except (OSError, ValueError):  # it ended early
        process.wait()
