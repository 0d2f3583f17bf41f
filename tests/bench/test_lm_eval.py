"""Tasks of lm-evaluation-harness: with a drafter the same texts and the same scores as without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import VOCAB, make_drafter, model_of
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="pip install -e '.[lm-eval]'")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from hf_hsdraft import attached
from hf_hsdraft.cli import main as cli
from hf_hsdraft.methods.lm_eval.model import Comparison, Evaluation, run_tasks

DOCUMENTS = 8
NEW_TOKENS = 20


@pytest.fixture(autouse=True, scope="module")
def no_inventory_of_the_machine():
    """lm_eval lists the machine's hardware and packages at the end of each run, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


def task(folder: Path, name: str, **fields) -> None:
    """Writes a task of lm_eval; JSON is YAML too."""
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    common = {"task": name, **data, "test_split": "test", "doc_to_text": "{{question}}"}
    (folder / f"{name}.yaml").write_text(json.dumps({**common, **fields}))


def generating(folder: Path, name: str, until: list[str]) -> None:
    first_word = {"function": "regex", "regex_pattern": r"(w\d+)"}
    task(
        folder,
        name,
        output_type="generate_until",
        doc_to_target="{{word}}",
        generation_kwargs={"until": until, "max_gen_toks": NEW_TOKENS, "do_sample": False},
        filter_list=[{"name": "first", "filter": [first_word, {"function": "take_first"}]}],
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, chatty, tokenizer) -> Path:
    """Tasks `free` and `stopped`, which end texts at nothing and at strings, and `choice`, which generates nothing."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": " ".join(f"w{(7 * number + step * step) % (VOCAB - 5)}" for step in range(3 + number % 4)),
            "word": f"w{number}",
        }
        for number in range(DOCUMENTS)
    ]
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    generating(folder, "free", [])
    task(folder, "choice", output_type="multiple_choice", doc_to_choice=["w1 w2", "w3"], doc_to_target=0)
    texts = texts_of(run(folder, chatty, tokenizer, None, "free"))
    for row, text in list(zip(rows, texts, strict=True))[::2]:
        row["word"] = text.split()[0]  # so that some of the answers are right
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    halves = [words[len(words) // 2 :] for words in map(str.split, texts[::3])]
    words = [half[0] for half in halves if half]  # where some of the texts would be half done
    generating(folder, "stopped", [f" {word}" for word in words])
    return folder


@pytest.fixture
def guide(chatty):
    return make_drafter(chatty)


def run(folder: Path, target, tokenizer, drafter, name: str, **options) -> Evaluation:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return run_tasks(target, tokenizer, drafter, [name], task_manager=manager, bootstrap_iters=0, **options)


def texts_of(found: Evaluation) -> list[str]:
    return [text for resps in found.answers().values() for [text] in resps]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("free", {"batch_size": 1}),
        ("stopped", {"batch_size": 8}),
        ("stopped", {"batch_size": "auto", "max_batch_size": 4}),
        ("free", {"batch_size": 3, "apply_chat_template": True}),
        ("stopped", {"batch_size": 1, "gen_kwargs": "do_sample=True,temperature=0.9"}),
    ],
    ids=["one", "eight", "auto", "chat", "sampled"],
)
def test_texts_and_scores_are_those_of_plain_decoding(folder, chatty, tokenizer, guide, name, options):
    plain, drafted = (run(folder, chatty, tokenizer, drafter, name, **options) for drafter in (None, guide))
    assert texts_of(drafted) == texts_of(plain)
    assert len(set(texts_of(plain))) > DOCUMENTS // 2
    if options == {"batch_size": 1}:
        assert 0 < plain.scores()[name, "exact_match,first"] < 1
    found = Comparison(plain, drafted)
    assert found.same_scores and not found.other_answers and f"same answers: {DOCUMENTS} of {DOCUMENTS}" in str(found)
    assert drafted.drafting.calls == DOCUMENTS and not drafted.drafting.stepped_aside
    assert len(drafted.seconds) == (len(plain.seconds) if options["batch_size"] == 1 else 1)
    assert drafted.drafting.drafted_tokens > 0 and plain.drafting is None and attached(chatty) is None


def test_texts_that_are_decoded_together_end_by_themselves(folder, chatty, tokenizer, guide):
    """A text emits and reads what it does alone, not what the longest of a batch does; each is cached once, whole."""
    cached = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.api.model.CacheHook.add_partial", lambda *given: cached.append(given))
        alone = run(folder, chatty, tokenizer, guide, "stopped", batch_size=1)
        together = run(folder, chatty, tokenizer, guide, "stopped", batch_size=5)
    assert together.drafting.new_tokens == alone.drafting.new_tokens
    assert together.drafting.target_forwards < together.drafting.row_forwards
    filled = [given[1:] for given in cached if given[0].__dict__ and given[3]]
    assert len(filled) == 2 * DOCUMENTS and filled[:DOCUMENTS] == filled[DOCUMENTS:]


def test_targets_whose_texts_cannot_join_are_drafted_in_padded_batches(folder, tokenizer):
    fields = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = model_of("gemma2", **fields, head_dim=8, initializer_range=0.3, sliding_window=8, eos_token_id=4)
    plain, drafted = (
        run(folder, target, tokenizer, each, "free", batch_size=3) for each in (None, make_drafter(target))
    )
    assert drafted.answers() == plain.answers() and drafted.drafting.calls == len(drafted.seconds) == 3


def test_stop_strings_end_texts_early(folder, chatty, tokenizer, guide):
    free, stopped = (run(folder, chatty, tokenizer, guide, name) for name in ("free", "stopped"))
    shorter = [len(short) < len(long) for short, long in zip(texts_of(stopped), texts_of(free), strict=True)]
    assert sum(shorter) >= 4
    assert all(long.startswith(short) for short, long in zip(texts_of(stopped), texts_of(free), strict=True))
    assert stopped.drafting.new_tokens < free.drafting.new_tokens


def test_likelihoods_call_nothing_that_drafts(folder, chatty, tokenizer, guide):
    plain, drafted = (run(folder, chatty, tokenizer, drafter, "choice") for drafter in (None, guide))
    assert drafted.answers() == plain.answers() and drafted.scores() == plain.scores()
    assert drafted.drafting.calls == 0 and not drafted.drafting.stepped_aside and not drafted.seconds


def test_a_call_that_steps_aside_is_counted_and_scored_alike(folder, chatty, tokenizer, guide):
    plain, drafted = (
        run(folder, chatty, tokenizer, drafter, "stopped", gen_kwargs="num_beams=2", limit=3)
        for drafter in (None, guide)
    )
    assert drafted.answers() == plain.answers()
    assert drafted.drafting.stepped_aside == {"the call decodes by beam search": 3}


def test_a_comparison_names_what_differs(folder, chatty, tokenizer):
    first, second = (run(folder, chatty, tokenizer, None, "free", limit=count) for count in (2, 2))
    first.results["samples"]["free"][1]["resps"] = [["another text"]]
    first.results["results"]["free"]["exact_match,first"] = 7.0
    found = Comparison(first, second)
    assert found.other_answers == [("free", 1)] and not found.same_scores
    assert "same answers: 1 of 2; not those of free 1" in str(found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, chatty, tokenizer) -> tuple[str, str]:
    """Folders of a target and of its drafter."""
    folder = tmp_path_factory.mktemp("saved")
    chatty.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_drafter(chatty).save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


def test_the_command_prints_scores_and_what_drafting_did(folder, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **given: TaskManager(include_defaults=False, **given))
    target, drafter = saved
    arguments = ["measure", "lm-eval", "--target", target, "--drafter", drafter, "--include-path", str(folder)]
    options = ["--tasks", "stopped,choice", "--batch-size", "2", "--limit", "4", "--compare"]
    done = CliRunner().invoke(cli.app, [*arguments, *options, "--json", str(tmp_path / "results.json")])
    assert done.exit_code == 0, done.output
    assert "same answers: 8 of 8" in done.output and "same scores: yes" in done.output
    assert "4 calls of generate() drafted, tau " in done.output and "; 0 stepped aside" in done.output
    assert done.output.count("|stopped|") == 2 and "drafted; speed-up" in done.output
    plain, drafted = (json.loads((tmp_path / "results.json").read_text())[way] for way in ("plain", "drafted"))
    assert plain["results"] == drafted["results"] and drafted["drafting"]["calls"] == 4 and plain["drafting"] is None
    refusals = [["--tasks", "nothing"], ["--tasks", ","], ["--tasks", "free", "--batch-size", "0"]]
    refusals += [["--tasks", "free", "--limit", "0"], ["--tasks", "free", "--json", str(tmp_path / "no" / "file")]]
    for wrong in refusals:
        refused = CliRunner().invoke(cli.app, [*arguments, *wrong])
        assert refused.exit_code == 2 and wrong[-2] in refused.output


def test_lm_eval_knows_the_model_by_name(folder, saved):
    target, drafter = saved
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    given = {"tasks": ["stopped"], "device": "cpu", "batch_size": 4, "task_manager": manager, "bootstrap_iters": 0}
    plain = simple_evaluate("hf", f"pretrained={target},dtype=float32", **given)
    drafted = simple_evaluate("hsdraft", f"pretrained={target},drafter={drafter},dtype=float32", **given)
    assert drafted["results"] == plain["results"]
    assert [one["resps"] for one in drafted["samples"]["stopped"]] == [
        one["resps"] for one in plain["samples"]["stopped"]
    ]
    assert drafted["config"]["drafting"]["calls"] == DOCUMENTS and "drafting" not in plain["config"]
