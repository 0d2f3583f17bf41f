"""Compilers in the background: one at a time, which gets what no other process wants, within bounds of memory and time.

Where a container's quota leaves it no processor, it runs for a twentieth of the time.

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
from ..core.tuning import TUNING


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
    allowed = None if at_once else quota()
    if allowed is not None and allowed < torch.get_num_threads() + 1:
        # Idle or not, it would use up what the quota leaves to the threads of this process.
        paced = Path(__file__).with_name("paced.py")
        command = [sys.executable, "-I", str(paced), str(TUNING.compiling_seconds), *command]
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
    if not at_once:
        _yield_to_others(process.pid)
    try:
        threading.Thread(target=_hand_over, args=(process, given), name="hsdraft-compiler", daemon=True).start()
    except RuntimeError:
        process.kill()
        process.communicate()
        raise
    return process


_started: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


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


def _yield_to_others(pid: int) -> None:
    """Lets a process that leads a session run where nothing else does, and end first where memory runs out.

    Linux shares processors between sessions first (`autogroup`); a nice value counts within one only.
    """
    with contextlib.suppress(OSError, AttributeError):  # it has ended, or the system has no such call
        os.setpriority(os.PRIO_PROCESS, pid, 19)
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    for name, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/{name}").write_text(value, encoding="ascii")
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        resource.prlimit(pid, resource.RLIMIT_DATA, (TUNING.compiling_bytes, TUNING.compiling_bytes))


def _hand_over(process: subprocess.Popen[bytes], request: bytes) -> None:
    """Writes the request, and waits for the process, so that none is left behind."""
    try:
        process.communicate(request, timeout=TUNING.compiling_seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        process.wait()
    except (OSError, ValueError):  # it ended early
        process.wait()
