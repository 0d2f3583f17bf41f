"""SPEED-Bench: reading its files, and its figures. The files here have its shape, and texts such as `w1 w2 w3`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import VOCAB
from pyarrow import Table, parquet
from rich.console import Console
from typer.testing import CliRunner

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.bench.calls import Run, Settings
from hf_hsdraft.bench.plan import BenchPlan, run_plan
from hf_hsdraft.bench.prompts import read_questions
from hf_hsdraft.bench.report import as_document, print_report
from hf_hsdraft.bench.summary import summarise
from hf_hsdraft.cli.main import app
from hf_hsdraft.methods.speed_bench import speed_bench
from hf_hsdraft.methods.speed_bench.speed_bench import SpeedPrompt, acceptance_length, read_speed_bench, speed_figures

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


def test_all_splits_of_a_folder_are_read_with_their_fields(tmp_path, caplog):
    prompts = read_speed_bench(stand_in(tmp_path / "speed", placeholders=3))
    assert "3 prompts of" in caplog.text and "prepare_data.py" in caplog.text
    assert len(prompts) == 2 * 11 + 3 * 5 and len({prompt.key for prompt in prompts}) == len(prompts)
    qualitative = [prompt for prompt in prompts if not prompt.bucket]
    assert sorted({prompt.label for prompt in qualitative}) == list(CATEGORIES)
    first = qualitative[1]
    assert (first.question, first.split, first.category, len(first.turns)) == ("coding-1", "qualitative", "coding", 2)
    assert (first.sub_category, first.difficulty, first.source) == ("made up", "easy", "nowhere")
    assert first.groups == {"category": "coding"}
    longest = prompts[-1]
    assert longest.groups == {"entropy tier": "mixed", "prompt length": "32k"} and longest.category == "32k mixed"
    assert [prompt.bucket for prompt in prompts[22:]] == [bucket for bucket in BUCKETS for _ in TIERS]


def test_a_limit_takes_evenly_from_categories_tiers_and_buckets(tmp_path):
    folder = stand_in(tmp_path / "speed")
    taken = read_questions([folder], 26)
    assert len({prompt.category for prompt in taken}) == 26 == 11 + 5 * 3
    assert {prompt.bucket for prompt in taken} == {"", *BUCKETS}


def test_one_split_is_a_file_or_a_folder(tmp_path):
    folder = stand_in(tmp_path / "speed")
    for place, split in (
        (folder / "throughput_8k.jsonl", "throughput_8k"),
        (folder / "qualitative" / "test-00000-of-00001.parquet", "qualitative"),
        (folder / "qualitative", "qualitative"),
    ):
        assert {prompt.split for prompt in read_questions([place])} == {split}


def test_the_name_finds_a_folder_here_or_in_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"SPEED-Bench is not here: .* fetch nvidia/SPEED-Bench and let"):
        read_questions([Path("speed-bench")])
    snapshot = tmp_path / "cache" / "datasets--nvidia--SPEED-Bench" / "snapshots" / ("1" * 40)
    stand_in(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("1" * 40)
    monkeypatch.setattr(
        speed_bench, "snapshot_download", lambda *names, **how: _cached(tmp_path / "cache", *names, **how)
    )
    assert len(read_questions([Path("speed-bench")])) == 37
    (stand_in(tmp_path / "speed-bench") / "throughput_1k.jsonl").unlink()
    assert len(read_questions([Path("speed-bench")])) == 34, "a folder here goes first"


def _cached(cache: Path, *names, **how):
    from huggingface_hub import snapshot_download

    return snapshot_download(*names, **how, cache_dir=cache)


def test_wrong_files_are_errors_that_say_what_to_do(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no SPEED-Bench: expected .parquet or .jsonl files"):
        read_questions([tmp_path / "empty"])
    with pytest.raises(ValueError, match="does not exist"):
        read_questions([tmp_path / "missing.jsonl"])
    only = tmp_path / "throughput_1k.jsonl"
    only.write_text(json.dumps({**row(0, "mixed", 3), "turns": [SAME]}))
    with pytest.raises(ValueError, match="has 1 prompts, none with its text"):
        read_questions([only])
    only.write_text(json.dumps({"turns": ["w1"], "question_id": "1"}))
    with pytest.raises(ValueError, match="row 1: no usable field 'category'"):
        read_questions([only])
    outcome = CliRunner().invoke(app, ["bench", "--prompts", str(only), "--target", str(tmp_path / "none")])
    assert outcome.exit_code == 2 and "no usable field" in outcome.output


def test_without_pyarrow_parquet_says_what_to_install(tmp_path, monkeypatch):
    folder = stand_in(tmp_path / "speed")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="needs pyarrow: pip install pyarrow"):
        read_questions([folder])


def made(question: int, accepted: list[int] | None, seconds: float = 1.0, repeat: int = 0) -> Run:
    tokens = 10 if accepted is None else 1 + len(accepted) + sum(accepted)
    forwards = 10 if accepted is None else 1 + len(accepted)
    return Run(tokens, seconds, forwards, question=question, repeat=repeat, accepted=accepted, same_rows=1)


def test_al_is_the_mean_of_prompts_without_the_last_step():
    # Prompt 0: steps of 3 and 1 tokens, then the last one. Prompt 1: only a last step, which counts as 1 token.
    assert acceptance_length([made(0, [2, 0, 4]), made(1, [3])]) == (2.0 + 1.0) / 2
    assert acceptance_length([made(0, [2, 0, 4]), made(0, [4, 4], repeat=1)]) == (3 + 1 + 5) / 3
    assert acceptance_length([made(0, None)]) is None


def test_figures_by_group_are_those_of_the_groups_prompts_alone(tmp_path):
    prompts = read_speed_bench(stand_in(tmp_path / "speed"))
    runs = [made(number, [number % 5, number % 3, 1], 0.5 + number / 100) for number in range(len(prompts))]
    plain = [made(number, None) for number in range(len(prompts))]
    figures = speed_figures(runs, plain, prompts)
    assert {kind: list(groups) for kind, groups in figures.items()} == {
        "category": list(CATEGORIES), "entropy tier": list(TIERS), "prompt length": list(BUCKETS)
    }  # fmt: skip
    for kind, groups in figures.items():
        assert sum(each.prompts for each in groups.values()) == (22 if kind == "category" else 15)
        for group, found in groups.items():
            numbers = [number for number, prompt in enumerate(prompts) if prompt.groups.get(kind) == group]
            own = [runs[number] for number in numbers]
            assert found.acceptance_length == pytest.approx(
                sum(1 + (number % 5 + number % 3) / 2 for number in numbers) / len(numbers)
            )
            assert found.summary == summarise(own, [plain[number] for number in numbers])


def test_the_bench_prints_its_figures_beside_ours(chatty, tokenizer, tmp_path, capsys):
    folder, report = stand_in(tmp_path / "speed-bench"), tmp_path / "report.json"
    plan = BenchPlan([folder], "cacheback,lookup", Settings(6), limit=26, json_out=report)
    result = run_plan(plan, chatty, tokenizer, {}, Console(quiet=True))
    # 32k is beyond the target's 256 positions, as 32k is for most small targets.
    assert result.settings["left_out_prompts"] == "3 prompts longer than the target's 250 positions for a prompt"
    assert len(result.questions) == 23 == len(result.measured.plain)
    print_report(result, Console(width=200))
    said = capsys.readouterr().out
    for words in ("SPEED-Bench by category", "SPEED-Bench by entropy tier", "SPEED-Bench by prompt length", "AL, as"):
        assert words in said
    assert "16k" in said and "32k" not in said and "tau (speed-up) by category" not in said
    document = json.loads(report.read_text())["speed_bench"]
    assert document == json.loads(json.dumps(as_document(result)["speed_bench"]))
    own, lookup = "cacheback (no training)", "prompt lookup (transformers)"
    assert set(document["figures"]) == {own, lookup}
    tier = document["figures"][own]["entropy tier"]["mixed"]
    runs = [run for run in result.measured.runs[own] if result.questions[run.question].label == "mixed"]
    assert tier["prompts"] == 4 and tier["acceptance_length"] == acceptance_length(runs)
    assert tier["summary"]["tau"] == sum(run.tokens for run in runs) / sum(run.forwards for run in runs)
    assert document["prompts"][0]["question"] == "coding-0" and "turns" not in document["prompts"][0]
    with pytest.raises(ValueError, match="nothing to measure: all of the 3 prompts longer"):
        only = BenchPlan([folder / "throughput_32k.jsonl"], "lookup", Settings(6))
        run_plan(only, chatty, tokenizer, {}, Console(quiet=True))


def test_other_prompts_have_no_such_figures(chatty, tokenizer, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": ["w1 w2"], "category": "coding"}))
    plan = BenchPlan([tmp_path / "p.jsonl"], "cacheback", Settings(3))
    result = run_plan(plan, chatty, tokenizer, {"": CachebackDrafter()}, Console(quiet=True))
    assert not isinstance(result.questions[0], SpeedPrompt) and "speed_bench" not in as_document(result)
