"""Processors that a process may use and gets: quotas of control groups, and threads that are held up."""

import subprocess
import sys

import pytest
import torch
from conftest import make_drafter, make_target

from hf_hsdraft.core import processors
from hf_hsdraft.core.processors import ProcessorTime, quota

only_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says it")


@pytest.fixture
def warnings(monkeypatch):
    told = []
    monkeypatch.setattr(processors.logger, "warning", told.append)
    monkeypatch.setattr(processors, "_warned", set())
    processors.warn_of_quota.cache_clear()
    yield told
    processors.warn_of_quota.cache_clear()


def groups(folder, member, files):
    """A tree of control groups, and what a process reads of its own."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n", encoding="ascii")
    (folder / "member").write_text(f"{member}\n", encoding="ascii")
    return folder, folder / "member"


@pytest.mark.parametrize(
    ("member", "files", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/pods/one", {"pods/one/cpu.max": "max 100000", "pods/cpu.max": "400000 100000"}, 4.0),
        ("0::/pods/one", {"pods/one/cpu.max": "50000 100000", "pods/cpu.max": "400000 100000"}, 0.5),
        ("0::/seen/from/outside", {"cpu.max": "200000 100000"}, 2.0),
        ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "300", "cpu,cpuacct/a/cpu.cfs_period_us": "100"}, 3.0),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/\n2:cpuacct:/", {"cpuset/cpu.cfs_quota_us": "1", "cpuset/cpu.cfs_period_us": "1"}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_the_least_quota_of_a_processs_groups_counts(tmp_path, member, files, expected):
    assert quota(*groups(tmp_path, member, files)) == expected


@pytest.mark.parametrize(("threads", "told"), [(8, True), (3, False), (2, False), (1, False)])
@only_linux
def test_more_threads_than_a_quota_allows_are_told_once(monkeypatch, warnings, threads, told):
    monkeypatch.setattr(processors, "quota", lambda: 2.5)
    for _ in range(2):
        processors.warn_of_quota(threads)
    assert len(warnings) == told and all("OMP_NUM_THREADS=2" in each for each in warnings)


HELD_UP = """
import hashlib, os, threading, time, torch
from hf_hsdraft.core.processors import ProcessorTime
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
found, end = ProcessorTime(torch.device('cpu')), time.monotonic() + 0.5
def work():
    while time.monotonic() < end:
        hashlib.sha256(bytes(10**6))
threads = [threading.Thread(target=work) for _ in range(3)]
[each.start() for each in threads]
time.sleep(0.4)
print(found.share())
"""


@pytest.mark.process
@only_linux
def test_threads_that_wait_for_a_processor_got_a_part_of_what_they_wanted():
    """Three threads on one processor."""
    found = subprocess.run([sys.executable, "-c", HELD_UP], capture_output=True, text=True, check=True).stdout
    assert 0.0 < float(found) < 0.6


def test_calls_whose_threads_are_held_up_warn_once_and_say_how_much(tuned, warnings, monkeypatch, prompt):
    tuned(noticed_seconds=0.0)
    monkeypatch.setattr(processors.torch, "get_num_threads", lambda: 4)
    ran = iter(range(100))
    monkeypatch.setattr(processors, "_times", lambda: (next(ran) * 30, 0))
    target = make_target()
    drafter = make_drafter(target)
    call = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "assistant_model": drafter}
    statistics = target.generate(prompt, **call).statistics
    assert statistics.processor_share == 1.0 and not warnings and "of the processor time" not in repr(statistics)
    waited = iter(range(100))
    monkeypatch.setattr(processors, "_times", lambda: (next(ran) * 30, next(waited) * 70))
    for _ in range(2):
        statistics = target.generate(prompt, **call).statistics
        assert statistics.processor_share == pytest.approx(0.3) and "30% of the processor time" in repr(statistics)
    assert len(warnings) == 1 and "4 threads got 30%" in warnings[0] and "OMP_NUM_THREADS=1" in warnings[0]


def test_a_system_that_does_not_say_it_gives_no_share(monkeypatch):
    monkeypatch.setattr(processors, "_times", lambda: (0, 0))
    assert ProcessorTime(torch.device("cpu")).share() is None
