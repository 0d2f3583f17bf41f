"""`hsdraft bench --cold`: the first calls of new processes, and what the figures mean."""

import json

import pytest
from conftest import make_drafter, write_prompts
from typer.testing import CliRunner

from hf_hsdraft.bench.systems import PLAIN
from hf_hsdraft.cli.main import app
from hf_hsdraft.methods.cold_calls import ColdCall, ColdCalls


def calls(*seconds: float, tokens: int = 10) -> list[ColdCall]:
    return [ColdCall(tokens, each) for each in seconds]


def test_figures_compare_as_many_tokens_and_take_medians_over_repeats():
    plain = [calls(2.0, 2.0, 2.0), calls(9.0, 2.0, 2.0), calls(2.0, 2.0, 2.0)]
    own = [calls(4.0, 1.0, 0.5, tokens=5), calls(4.0, 1.0, 0.5, tokens=5), calls(4.0, 8.0, 0.5, tokens=5)]
    found = ColdCalls(1, {PLAIN: plain, "own": own})
    assert found.ratios("own") == [0.25, 1.0, 2.0]
    assert found.speed_up("own") == pytest.approx(3.0 / 5.5) and found.worst_in_a_row("own", 2) == pytest.approx(0.4)
    assert found.row("own") == ("0.55", "0.25", "0.25", "0.55", "-, -")
    drafted = [ColdCall(5, 1.0), ColdCall(5, 1.0, packed=True), ColdCall(5, 1.0, packed=True, compiled=True)]
    assert ColdCalls(1, {PLAIN: plain, "own": [drafted]}).row("own")[-1] == "2, 3"


@pytest.mark.slow
@pytest.mark.process
def test_every_call_of_each_process_is_in_the_report_and_the_picture(chatty, tokenizer, tmp_path):
    chatty.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(chatty).save_pretrained(tmp_path / "drafter")
    prompts, report = write_prompts(tmp_path / "prompts.jsonl", 5), tmp_path / "report.json"
    arguments = ["bench", "--cold", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    arguments += ["--prompts", str(prompts), "--batch-sizes", "2", "--max-new-tokens", "3", "--json", str(report)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    [pairs] = json.loads(report.read_text())["cold"]
    assert pairs["batch_size"] == 2 and str(tmp_path) not in report.read_text()
    for runs in pairs["calls"].values():
        assert [len(run) for run in runs] == [2] and all(call["seconds"] > 0 for call in runs[0])
    assert len(pairs["ratios"]["default"]) == 2
    plain, own = ([call["tokens"] for call in pairs["calls"][name][0]] for name in ("plain", "default"))
    assert plain == own
    assert {path.name for path in tmp_path.glob("*.png")} == {"report_2.png"}
    assert "worst 10" in result.output


def test_what_does_not_go_with_cold_is_refused(tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 1)
    for option in (["--profile"], ["--new-tokens", "1"], ["--drafter", "a", "--drafter", "b"]):
        found = CliRunner().invoke(app, ["bench", "--cold", "--prompts", str(prompts), *option], env={"COLUMNS": "200"})
        assert found.exit_code == 2 and "--cold takes one --drafter" in found.output, option
