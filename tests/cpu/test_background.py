"""Compilers in the background: one at a time for all processes, beside which nothing else notices them."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_hsdraft.cpu import background, yielding
from hf_hsdraft.cpu.background import start_compiler
from hf_hsdraft.cpu.kernel import Kernel

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="compilers run on Linux only"),
]
LONG = ["sleep", "60"]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def started():
    """Starts compilers that end with the test."""
    yield start_compiler
    background.end_compilers()


def eventually(holds) -> bool:
    return any(holds() or time.sleep(0.02) for _ in range(500))


def test_one_runs_at_a_time_of_all_processes_until_all_that_it_started_has_ended(started):
    first = started(["sh", "-c", "sleep 60 &"])
    assert first is not None
    first.wait()
    script = "from hf_hsdraft.cpu.background import start_compiler\nprint(start_compiler(['true']) is None)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True" and started(LONG) is None
    os.killpg(first.pid, signal.SIGTERM)
    assert eventually(lambda: started(LONG) is not None)


def test_one_that_is_waited_for_runs_at_once_and_as_the_caller_does(started):
    assert started(LONG) is not None
    found = started(LONG, at_once=True)
    assert found is not None and os.sched_getscheduler(found.pid) == os.sched_getscheduler(0)


def test_it_reads_the_request_which_is_made_only_for_one_that_starts(started, tmp_path):
    made = []

    def request() -> bytes:
        made.append(1)
        return b"a layer"

    process = started(["sh", "-c", 'cat > "$0"; sleep 60', str(tmp_path / "read")], request)
    assert process is not None and started(LONG, request) is None and made == [1]
    assert eventually(lambda: (tmp_path / "read").exists() and (tmp_path / "read").read_bytes() == b"a layer")


def test_a_request_that_fails_leaves_the_turn_to_others(started):
    def request() -> bytes:
        raise ValueError("no layer")

    with pytest.raises(ValueError, match="no layer"):
        started(LONG, request)
    assert started(LONG) is not None


def test_it_yields_to_all_other_processes_and_to_their_memory(started, monkeypatch):
    monkeypatch.setattr(background, "quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(torch.get_num_threads() + 1))
    process = started(LONG)
    assert process is not None
    assert eventually(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes()[:6])
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    assert Path(f"/proc/{process.pid}/oom_score_adj").read_text(encoding="ascii").strip() == "1000"
    limits = Path(f"/proc/{process.pid}/limits").read_text(encoding="ascii")
    assert "unlimited" not in next(line for line in limits.splitlines() if line.startswith("Max data size"))
    group = Path(f"/proc/{process.pid}/autogroup")
    if group.exists():  # its nice value alone would count within its own session only
        assert group.read_text(encoding="ascii").split()[-1] == "19"


def test_a_kernel_waits_for_its_turn(started, tmp_path):
    other = started(LONG)
    source = tmp_path / "slow.cpp"
    source.write_text("no C++", encoding="utf-8")
    kernel = Kernel(source, "slow products", lambda found: True)
    kernel._may_run = True
    assert kernel.operators() is None and kernel._thread.is_alive()
    os.killpg(other.pid, signal.SIGKILL)
    kernel._thread.join(60)
    assert not kernel._thread.is_alive() and kernel.operators() is None, "it was tried, and is no C++"


@pytest.mark.parametrize("tight", [True, False])
def test_a_quota_that_the_callers_threads_use_up_leaves_it_a_small_part(started, monkeypatch, tmp_path, tight):
    monkeypatch.setattr(background, "quota", lambda: float(torch.get_num_threads() + (0 if tight else 1)))
    script = "import os, sys, time\nbegin = time.monotonic()\nwhile time.monotonic() - begin < 3: pass\n"
    script += (
        f"open({str(tmp_path / 'ran')!r}, 'w').write(sys.stdin.read() + ' ' + str(sum(os.times()[:2])))\nsys.exit(3)"
    )
    process = started([sys.executable, "-c", script, str(tmp_path / "ran")], lambda: b"a layer")
    assert process.wait() == 3 and started(["true"]) is not None, "its turn has ended with it"
    read, seconds = (tmp_path / "ran").read_text().rsplit(" ", 1)
    assert read == "a layer" and (not tight or float(seconds) < 1.5)


def test_it_looks_for_an_idle_processor_where_the_callers_threads_may_take_all(started, monkeypatch):
    monkeypatch.setattr(background, "quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(torch.get_num_threads()))
    process = started(LONG)
    assert process is not None
    command = Path(f"/proc/{process.pid}/cmdline")
    assert eventually(lambda: b"idle" in command.read_bytes().split(b"\0"))
    assert eventually(lambda: os.sched_getscheduler(process.pid) == os.SCHED_IDLE)


@pytest.mark.parametrize("idle", [True, False])
def test_it_rests_while_processors_are_busy(monkeypatch, tmp_path, idle):
    monkeypatch.setattr(yielding, "is_idle", lambda: idle or time.sleep(yielding.LOOKS))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # that of the tests stays
    script = "import sys, time\nlast = begin = time.monotonic()\nlongest = 0.0\nwhile last < begin + 2.5:\n"
    script += " time.sleep(0.01)\n now = time.monotonic()\n longest, last = max(longest, now - last), now\n"
    script += "sys.exit(longest > 0.6)"
    assert yielding.run_with_rests([sys.executable, "-c", script], 60.0, looks=True) == (not idle)


@pytest.mark.parametrize(
    ("idle", "busy", "expected"), [(1, 4, False), (9, 1, True), (0, 0, True)], ids=["busy", "idle", "not counted"]
)
def test_idle_processors_are_told_from_busy_ones(monkeypatch, tmp_path, idle, busy, expected):
    """By the ticks of this process's processors, of which another one's are no part."""
    stat, looks = tmp_path / "stat", itertools.count()

    def read(*_, **__):
        seen = next(looks)
        stat.write_text(f"cpu 0 0 0 0 0\ncpu0 {busy * seen} 0 0 {idle * seen} 0 0\ncpu1 0 0 0 {100 * seen} 0 0\n")
        return stat.open()

    monkeypatch.setattr(yielding, "open", read, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert yielding.is_idle() == expected
    monkeypatch.setattr(yielding, "open", lambda *_, **__: (tmp_path / "missing").open(), raising=False)
    assert yielding.is_idle(), "where nothing tells, it runs"


@pytest.mark.parametrize("tight", [True, False])
def test_compilers_can_be_ended(started, monkeypatch, tight):
    monkeypatch.setattr(background, "quota", lambda: 0.5 if tight else None)
    process = started(LONG)
    background.end_compilers()
    assert process.returncode and eventually(lambda: started(["true"]) is not None)
