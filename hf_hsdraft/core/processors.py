"""The processors that this process may use, and what part of them its threads get.

Threads of a product wait for each other, spinning: where one of two does not run, both take several times as long as a
single thread would alone.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path, PurePosixPath

import torch
from transformers.utils import logging

# Part of the processor time that threads wanted, below which a call that wanted so many seconds warns - by hand:
# one other busy process on 2 cores leaves two threads 0.67, and idle compilers leave them more than 0.95.
LEAST_SHARE = 0.85
NOTICED_SECONDS = 1.0


logger = logging.get_logger(__name__)

_GROUPS, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def quota(groups: Path = _GROUPS, of_process: Path = _OF_PROCESS) -> float | None:
    """How many processors the control groups of this process let it use at a time; `None` for no limit."""
    found = []
    for line in _text(of_process).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if name and not controllers:  # version 2, a single tree
            roots = [groups, groups / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [groups / "cpu", groups / "cpu,cpuacct", groups / "cpuacct,cpu"]
        else:
            continue
        path = PurePosixPath(name.lstrip("/"))  # its last parent is "."
        # A container sees its own group at the root, whatever its name; the groups around one limit it too.
        found += [_quota_of(root / part) for root in roots for part in (path, *path.parents)]
    limits = [each for each in found if each is not None]
    return min(limits, default=None)


def _quota_of(group: Path) -> float | None:
    limit, _, period = _text(group / "cpu.max").strip().partition(" ")
    if not period:
        limit, period = (_text(group / f"cpu.cfs_{each}_us").strip() for each in ("quota", "period"))
    if not limit.isdecimal() or not period.isdecimal() or not int(period):  # "max", -1, or no such file
        return None
    return int(limit) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@cache
def warn_of_quota(threads: int) -> None:
    """Warns once where torch runs more threads than this process may use processors."""
    allowed = quota() if sys.platform.startswith("linux") else None
    if allowed is not None and threads > math.ceil(allowed):
        logger.warning(
            f"PyTorch runs {threads} threads, but this container may use {allowed:g} processors at a time, so threads "
            f"are stopped while others wait for them: set OMP_NUM_THREADS={max(int(allowed), 1)}."
        )


class ProcessorTime:
    """The processor time of this process's threads since it was made. Warns once of what holds them up.

    Args:
        device: where the target is; on others than CPUs nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._measures = device.type == "cpu"
        if self._measures:
            warn_of_quota(torch.get_num_threads())
        self._ran, self._waited = _times()

    def share(self) -> float | None:
        """The part that they got of what they wanted, 0 to 1; `None` where the system does not say it."""
        if not self._measures:
            return None
        ran, waited = (now - then for now, then in zip(_times(), (self._ran, self._waited), strict=True))
        if ran <= 0 or waited < 0:
            return None
        share = ran / (ran + waited)
        if share < LEAST_SHARE and ran + waited >= 1e9 * NOTICED_SECONDS:
            _warn_of_share(torch.get_num_threads(), share)
        return share


def _times() -> tuple[int, int]:
    """Nanoseconds for which the threads ran, and for which they could have run but waited for a processor."""
    ran = waited = 0
    try:
        for thread in Path("/proc/self/task").iterdir():
            fields = _text(thread / "schedstat").split()
            if len(fields) == 3:  # else it has just ended
                ran, waited = ran + int(fields[0]), waited + int(fields[1])
    except OSError:
        pass
    return ran, waited


_warned = set[int]()  # numbers of threads


def _warn_of_share(threads: int, share: float) -> None:
    if threads == 1 or threads in _warned:
        return
    _warned.add(threads)
    logger.warning(
        f"PyTorch's {threads} threads got {share:.0%} of the processor time that they wanted: other processes, or a "
        "quota of the container, hold them up, and they wait for each other. Fewer threads may be several times "
        f"faster: set OMP_NUM_THREADS={max(math.ceil(threads * share) - 1, 1)}, or call torch.set_num_threads."
    )
