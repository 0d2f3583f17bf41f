"""Becomes a command that takes nothing from others: `python yielding.py BYTES SECONDS HOW COMMAND...`.

The command runs where nothing else does, may use so many bytes of data, and ends first where memory runs out. HOW is
`always`; `idle`, which stops it while all processors are busy, but for a small part of the time that grows; or
`seldom`, which stops it for most of the time. The last two kill it after so many seconds. All that the command starts
inherits this, so it is set before, by a script that imports nothing of the package.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

RUNS, RESTS = 0.05, 0.95  # seconds, where processors are busy
# Seconds that it runs for in the end: what it makes pays the more, the longer processors stay busy.
MOST_RUNS, GROWS_FOR = 0.25, 240.0
RUNS_IDLE, LOOKS = 0.25, 0.05  # seconds for which it runs on an idle processor, and looks for one
IDLE = 0.5  # part of a processor that has to be idle


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


def processor_seconds() -> tuple[float, float]:
    """Seconds since the system began for which the processors of this process were idle, and all their seconds."""
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    with open("/proc/stat", encoding="ascii") as file:
        fields = [line.split() for line in file if line.startswith("cpu")]
    ticks = [list(map(int, counted)) for name, *counted in fields if name in own]
    each = os.sysconf("SC_CLK_TCK")
    return sum(idle + waiting for _, _, _, idle, waiting, *_ in ticks) / each, sum(map(sum, ticks)) / each


def is_idle() -> bool:
    """Whether a processor is idle now, also where the system does not tell."""
    try:
        begin, (idle, every) = time.monotonic(), processor_seconds()
        time.sleep(LOOKS)
        later, all_later = processor_seconds()
    except (OSError, ValueError):
        return True
    return all_later == every or later - idle > IDLE * (time.monotonic() - begin)


def run_with_rests(command: list[str], seconds: float, looks: bool) -> int:
    begin = time.monotonic()
    process = subprocess.Popen(command, close_fds=False, preexec_fn=os.setpgrp)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    runs = RUNS
    while process.poll() is None:
        time.sleep(runs)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            grown = min((stopped - begin) / GROWS_FOR, 1.0) if looks else 0.0
            runs = RUNS + grown * (MOST_RUNS - RUNS)
            while time.monotonic() < stopped + RESTS:
                if not looks:
                    time.sleep(RESTS)
                elif is_idle():
                    runs = RUNS_IDLE
                    break
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT if time.monotonic() < begin + seconds else signal.SIGKILL)
    return process.returncode


if __name__ == "__main__":
    yield_to_others(int(sys.argv[1]))
    if sys.argv[3] == "always":
        os.execvp(sys.argv[4], sys.argv[4:])
    sys.exit(run_with_rests(sys.argv[4:], float(sys.argv[2]), looks=sys.argv[3] == "idle"))
