"""SPEED-Bench: reading its files, and its figures. The files here have its shape, and texts such as `w1 w2 w3`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import speed_bench
from conftest import VOCAB
from pyarrow import Table, parquet
from rich.console import Console

from hf_hsdraft.bench.calls import Run, Settings
from hf_hsdraft.bench.plan import BenchPlan, run_plan
from hf_hsdraft.bench.report import summarise

CATEGORIES = (
    "coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization",
    "writing",
)  # fmt: skip
TIERS = ("high_entropy", "low_entropy", "mixed")
BUCKETS = {"1k": 8, "2k": 16, "8k": 64, "16k": 128, "32k": 300}  # words of a prompt: a tiny target has 256 positions
FIELDS = ("question_id", "category", "sub_category", "turns", "source", "src_id", "difficulty", "multiturn")
SAME = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"  # the data set's own placeholder


def row(number: int, category: str, words: int, turns: int = 1) -> dict:
    first = 7 * (*CATEGORIES, *TIERS).index(category) + number
    texts = [" ".join(f"w{(first + turn + place) % (VOCAB - 6)}" for place in range(words)) for turn in range(turns)]
    values = (f"{category}-{number}", category, "made up", texts, "nowhere", f"n_{number}", "easy", turns > 1)
    return dict(zip(FIELDS, values, strict=True))


def stand_in(folder: Path, placeholders: int = 0) -> Path:
    """Writes all splits: 2 prompts of each category as parquet, as on the Hub; 1 of each bucket and tier as JSONL."""
    qualitative = [row(number, name, 4, turns=1 + number % 2) for name in CATEGORIES for number in range(2)]
    qualitative += [{**row(90 + number, "qa", 4), "turns": [f"{SAME}\n\nmore"]} for number in range(placeholders)]
    place = folder / "qualitative" / "test-00000-of-00001.parquet"
    place.parent.mkdir(parents=True)
    parquet.write_table(Table.from_pylist(qualitative), place)
    for bucket, words in BUCKETS.items():
        lines = []
        for number, tier in enumerate(TIERS):
            found = row(number, tier, words)
            turns = found.pop("turns")  # the prepared files have messages instead
            lines.append(json.dumps({**found, "messages": [{"role": "user", "content": turn} for turn in turns]}))
        (folder / f"throughput_{bucket}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "README.md").write_text("not a split")
    (folder / "other.jsonl").write_text("not JSON")
    return folder


def test_all_splits_of_a_folder_are_read_short_prompts_first(tmp_path):
    prompts, empty = speed_bench.read_prompts(stand_in(tmp_path / "speed", placeholders=3))
    assert empty == 3 and len(prompts) == 2 * 11 + 3 * 5
    assert sorted({prompt["category"] for prompt in prompts[:22]}) == list(CATEGORIES)
    assert [prompt["category"] for prompt in prompts[22:]] == [
        f"{bucket} {tier}" for bucket in BUCKETS for tier in TIERS
    ]
    assert prompts[1]["category"] == "coding" and len(prompts[1]["turns"]) == 2
    groups = [
        speed_bench.group_of(category, kind) for category in ("coding", "32k mixed") for kind in speed_bench.KINDS
    ]
    assert groups == ["coding", "", "", "", "mixed", "32k"]


@pytest.mark.parametrize(
    ("place", "count"),
    [("throughput_8k.jsonl", 3), ("qualitative/test-00000-of-00001.parquet", 22), ("qualitative", 22)],
)
def test_one_split_is_a_file_or_a_folder(tmp_path, place, count):
    prompts, _ = speed_bench.read_prompts(stand_in(tmp_path / "speed") / place)
    assert len(prompts) == count and prompts[0]["category"].startswith("8k " if count == 3 else "coding")


def test_wrong_files_are_errors_that_say_what_to_do(tmp_path, monkeypatch):
    folder = stand_in(tmp_path / "speed")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no SPEED-Bench: expected .parquet or .jsonl files"):
        speed_bench.read_prompts(tmp_path / "empty")
    only = tmp_path / "throughput_1k.jsonl"
    only.write_text(json.dumps({**row(0, "mixed", 3), "turns": [SAME]}))
    with pytest.raises(ValueError, match="has 1 prompts, none with its text"):
        speed_bench.read_prompts(only)
    only.write_text(json.dumps({"turns": ["w1"], "question_id": "1"}))
    with pytest.raises(ValueError, match="row 1: no usable field 'category'"):
        speed_bench.read_prompts(only)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="needs pyarrow: pip install pyarrow"):
        speed_bench.read_prompts(folder)


def made(question: int, accepted: list[int] | None, repeat: int = 0) -> Run:
    return Run(1, 1.0, 1, question=question, repeat=repeat, accepted=accepted, same_rows=1)


def test_al_is_the_mean_of_prompts_without_the_last_step():
    # Prompt 0: steps of 3 and 1 tokens, then the last one. Prompt 1: only a last step, which counts as 1 token.
    length = speed_bench.acceptance_length
    assert length([made(0, [2, 0, 4]), made(1, [3])]) == (2.0 + 1.0) / 2
    assert length([made(0, [2, 0, 4]), made(0, [4, 4], repeat=1)]) == (3 + 1 + 5) / 3
    assert length([made(0, None)]) is None


def test_figures_of_a_report_are_printed_by_group(chatty, tokenizer, tmp_path, capsys):
    chatty.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts, report = tmp_path / "speed.jsonl", tmp_path / "report.json"
    given = [str(stand_in(tmp_path / "speed")), "--out", str(prompts), "--target", str(tmp_path / "target")]
    speed_bench.main([*given, "--max-new-tokens", "6"])
    # 32k is beyond the target's 256 positions, as 32k is for most small targets.
    assert "34 prompts; left out: 0 without a text, 3 too long" in capsys.readouterr().out
    plan = BenchPlan([prompts], "cacheback,lookup", Settings(6), limit=23, json_out=report)
    result = run_plan(plan, chatty, tokenizer, {}, Console(quiet=True))
    speed_bench.main(["--report", str(report)])
    said = capsys.readouterr().out
    for words in (
        "by category",
        "by entropy tier",
        "by prompt length",
        "| 16k |",
        "cacheback (no training): AL",
        "AL, as",
    ):
        assert words in said
    own = "cacheback (no training)"
    found = speed_bench.figures(json.loads(report.read_text()), own)
    assert [*found["prompt length"]] == ["1k", "2k", "8k", "16k"] and [*found["category"]] == list(CATEGORIES)
    length, summary = found["entropy tier"]["mixed"]
    chosen = [index for index, each in enumerate(result.questions) if each.category.endswith(" mixed")]
    runs, plain = (
        [run for run in each if run.question in chosen] for each in (result.measured.runs[own], result.measured.plain)
    )
    assert len(chosen) == 4 and length == speed_bench.acceptance_length(runs)
    expected = summarise(runs, plain)
    assert (summary.tau, summary.speed_up) == (expected.tau, expected.speed_up)
