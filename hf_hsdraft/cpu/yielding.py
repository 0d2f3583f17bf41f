"""Becomes a command that takes nothing from others: `python yielding.py BYTES SECONDS always|seldom COMMAND...`.

The command runs where nothing else does, may use so many bytes of data, and ends first where memory runs out. `seldom`
stops it for most of the time, and kills it after so many seconds. All that the command starts inherits this, so it is
set before, by a script that imports nothing of the package.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

RUNS, RESTS = 0.05, 0.95  # seconds


def yield_to_others(most_bytes: int) -> None:
    """Linux shares processors between sessions first (`autogroup`); a nice value counts within one only."""
    with contextlib.suppress(OSError, AttributeError):  # the system has no such call
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for name, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(value)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))


def run_seldom(command: list[str], seconds: float) -> int:
    end = time.monotonic() + seconds
    process = subprocess.Popen(command, close_fds=False, preexec_fn=os.setpgrp)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    while process.poll() is None:
        time.sleep(RUNS)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(RESTS)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT if time.monotonic() < end else signal.SIGKILL)
    return process.returncode


if __name__ == "__main__":
    yield_to_others(int(sys.argv[1]))
    if sys.argv[3] == "always":
        os.execvp(sys.argv[4], sys.argv[4:])
    sys.exit(run_seldom(sys.argv[4:], float(sys.argv[2])))
