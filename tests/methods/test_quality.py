"""`measure quality` and `make verifier`: questions with answers, figures by their definitions, labels, training."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from conftest import make_drafter, make_target
from test_lossy import LOOSE
from typer.testing import CliRunner

from hf_hsdraft import CachebackDrafter, CascadeDrafter, CausalLMDrafter, HSDrafter, LayerSkipDrafter
from hf_hsdraft.bench.calls import Settings
from hf_hsdraft.bench.systems import PLAIN
from hf_hsdraft.cli.main import app
from hf_hsdraft.methods.lossy import pivot_training as pivots
from hf_hsdraft.methods.lossy import quality as quality_module
from hf_hsdraft.methods.lossy.checked_tasks import GENERATED, Item, items_of, make_items, numbers_of, read_items
from hf_hsdraft.methods.lossy.kept_answers import digest, kept_answers, model_digest
from hf_hsdraft.methods.lossy.pivot import FILE, PivotClassifier
from hf_hsdraft.methods.lossy.quality import (
    EXACT,
    Answer,
    Quality,
    Rule,
    log_probability,
    measure_quality,
    rules_of,
    systems_of,
)
from hf_hsdraft.methods.lossy.quality_figures import as_document, bootstrap, row_of, tables_of, told_by


@pytest.mark.parametrize("task", GENERATED)
def test_a_task_has_two_hundred_questions_whose_answers_are_right(task):
    items = make_items(task, 200, seed=3)
    assert len({item.prompt for item in items}) == 200 and items == make_items(task, 200, seed=3)
    assert items != make_items(task, 200, seed=4)
    for item in items:
        assert item.is_right(item.answer) and item.is_right(f"The answer is: {item.answer}.")
        assert not item.is_right("") and not item.is_right("I do not know 12345 things")
        numbers = [int(found) for found in re.findall(r"\d+", item.prompt)]
        if task in ("addition", "explaining"):
            assert int(item.answer) == sum(numbers)
        elif task == "counting":
            assert item.answer.split() == [str(number) for number in range(numbers[0], numbers[-1] + 1)]
        elif task == "sentiment":
            assert ("loved" in item.prompt) == (item.answer == "positive")
        else:
            assert item.answer in item.prompt


def test_answers_are_read_as_a_person_would():
    number = Item("sums", "", "1,234", "number")
    assert number.is_right("It is 3 + 4, so 1234.0") and not number.is_right("1234, not 12")
    assert numbers_of("-3 or 1,000.5, not 2.") == [-3.0, 1000.5, 2.0]
    word = Item("mood", "", "positive", "label", ("positive", "negative"))
    assert word.is_right("**Positive**, not negative") and not word.is_right("Negative; hardly positive")
    assert not word.is_right("It is positively so")
    moscow = Item("place", "", "Москва", "contains")
    assert moscow.is_right("Это Москва.") and not moscow.is_right("Это Киев.")
    yes = Item("told", "", "да", "label", ("да", "нет"))
    assert yes.is_right("Да, конечно") and not yes.is_right("Нет.")
    named = Item("place", "", "New York", "contains")
    assert named.is_right("She lives in new-york!") and not named.is_right("She lives in New Yorkshire.")
    plural = Item("writing", "", "Anna, bush, cow", "all")
    assert plural.is_right("Two cows saw Anna's bushes.") and not plural.is_right("A coward saw Anna and a bush.")


def test_questions_of_files(tmp_path):
    rows = [
        {"turns": ["How many?"], "answer": "3 + 4 = 7\n#### 7", "category": "math"},
        {"turns": ["Which?"], "answer": "B", "labels": ["A", "B"]},
        {"turns": ["Where?"], "answer": "in Rome"},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    math_, label_, text = read_items(path)
    assert (math_.task, math_.answer, math_.kind) == ("math", "7", "number")
    assert (label_.task, label_.kind, label_.labels) == ("own", "label", ("A", "B"))
    assert text.kind == "contains"
    assert len(items_of(["copying"], [path], 1)) == 3  # one of each task: copying, math, own
    path.write_text(json.dumps({"turns": ["How many?"], "answer": 2, "labels": [1, 2, 3]}) + "\n")
    assert read_items(path)[0].labels == ("1", "2", "3")
    for row, told in (
        ({"answer": "+", "labels": ["+", "-"]}, "has '\\+': expected an answer with letters or digits"),
        ({}, "has no `answer`"),
        ({"answer": "C", "labels": ["A", "B"]}, r"expected one of its labels \['A', 'B'\]"),
    ):
        path.write_text(json.dumps({"turns": ["Which?"], **row}) + "\n")
        with pytest.raises(ValueError, match=told):
            read_items(path)
    with pytest.raises(ValueError, match="no task 'none': expected some of copying"):
        items_of(["none"], [], 1)
    with pytest.raises(ValueError, match="no questions with answers"):
        items_of([], [], 1)


def test_rules_are_read_with_their_options():
    rule = Rule.parse("fly+fly_window=2+fly_entropy=0.5")
    assert rule.options == {"fly_window": 2, "fly_entropy": 0.5} and rule.value == 0.5 and not rule.is_published
    longer = Rule.parse("fly+ngram_continuation=8")
    assert longer.options == {"ngram_continuation": 8} and longer.is_published
    assert Rule.parse("typical").is_published and Rule.parse("typical").value == 0.09
    found = rules_of(["fly", "pivot"], [0.3, 0.7])
    assert [each.text for each in found] == [
        "fly", "fly+fly_entropy=0.7", "pivot", "pivot+pivot_threshold=0.3", "pivot+pivot_threshold=0.7",
    ]  # fmt: skip
    for wrong, told in (
        ("walk", "'walk' is no lossy rule: expected some of fly, typical, pivot"),
        ("fly+window=2", "fly has no option 'window=2': expected some of fly_entropy"),
        ("fly+fly_window=2.5", "fly_window=2.5 is invalid: expected an integer"),
        ("fly+fly_window=two", "fly_window='two' is invalid: expected an integer"),
        ("fly+fly_entropy=7", "fly_entropy=7.0 is invalid: expected a number from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            Rule.parse(wrong)


def test_intervals_cover_what_varies_and_nothing_else():
    def ratio(a, b):
        return a / b

    same = bootstrap(([0.5] * 9, [1.0] * 9), ratio)
    assert same.value == same.low == same.high == 0.5
    generator = torch.Generator().manual_seed(0)
    coins = (torch.rand(400, generator=generator) < 0.3).double().tolist()
    found = bootstrap((coins, [1.0] * 400), ratio)
    share = sum(coins) / 400
    spread = 1.96 * math.sqrt(share * (1 - share) / 400)  # of the binomial distribution
    assert found.value == pytest.approx(share)
    assert found.low == pytest.approx(share - spread, abs=0.012) and found.high == pytest.approx(
        share + spread, abs=0.012
    )


def answer(task="a", right=True, tokens=10, **changes) -> Answer:
    fields = {"forwards": 5, "seconds": 1.0, "relaxed": 0, "log_probability": -10.0, "repeated": 0, "ngrams": 7}
    return Answer(task, right, tokens, **{**fields, "same": True, **changes})


def test_figures_without_a_value_or_a_meaning_are_left_out():
    """Ratios over nothing, and speeds of a busy machine."""
    found = bootstrap(([1.0, 0.0], [0.0, 1.0]), torch.divide)  # a quarter of the samples divide by nothing
    assert found.value == 1.0 and 0.0 <= found.low <= found.high <= 1.0
    answers = {"greedy": {PLAIN: [answer(right=False)], EXACT: [answer(right=False)]}}
    quiet, busy = (Quality({}, {}, answers, timed=timed) for timed in (True, False))
    whole, part = (json.loads(json.dumps(as_document(each)), parse_constant=pytest.fail) for each in (quiet, busy))
    figures, fewer = (document["figures"]["greedy"][EXACT] for document in (whole, part))
    assert figures["kept"] == {"value": None, "low": None, "high": None}
    assert list(tables_of(quiet)[0].columns[1].cells) == ["-", "-"]
    assert set(figures) - set(fewer) == {"speed_up", "gain"} and "speed_up" in whole["definitions"]
    assert "speed_up" not in part["definitions"] and "seconds" not in part["answers"]["greedy"][PLAIN][0]
    columns = [column.header for column in tables_of(busy)[1].columns]
    assert "tau" in columns and "gain" not in columns


def test_a_rule_gains_over_exact_drafting_of_the_same_drafts(target):
    rules = rules_of(["fly", "fly+ngram_continuation=8"], [])
    systems = systems_of(make_drafter(target), rules)
    longer = f"{EXACT}+ngram_continuation=8"
    assert [system.name for system in systems] == [PLAIN, EXACT, longer, "fly", "fly+ngram_continuation=8"]
    assert systems[2].exact and systems[2].options == {"verification": "walk", "ngram_continuation": 8}
    sizes = [{system.options.get("tree_sizing") for system in systems_of(make_drafter(target), rules, timed)[1:]}
             for timed in (True, False)]  # fmt: skip
    assert sizes == [{None}, {"fixed"}], "on a busy machine a cost says nothing"
    seconds = {PLAIN: 8.0, EXACT: 4.0, longer: 2.0, "fly": 2.0, "fly+ngram_continuation=8": 1.0}
    answers = {"greedy": {name: [answer(seconds=each)] for name, each in seconds.items()}}
    figures = as_document(Quality({}, {rule.text: rule for rule in rules}, answers))["figures"]["greedy"]
    assert [figures[name]["gain"]["value"] for name in seconds] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_figures_are_those_of_their_definitions():
    plain = [answer(forwards=10, seconds=2.0) for _ in range(8)] + [answer("b", right=False, forwards=10, seconds=2.0)]
    own = [answer(right=index > 1, relaxed=1, log_probability=-15.0, repeated=3, same=False) for index in range(9)]
    assert told_by(plain) == {"a"}
    row = {name: figure.value for name, figure in row_of(own, plain, [answer() for _ in range(9)]).items()}
    assert row == pytest.approx({
        "accuracy": 6 / 8, "kept": 6 / 8, "relaxed": 0.1, "same": 0.0, "log_probability": -0.5, "tokens": 10.0,
        "repetition": 3 / 7, "tau": 2.0, "speed_up": 2.0, "gain": 1.0,
    })  # fmt: skip
    quality = Quality({}, {}, {"greedy": {PLAIN: plain, EXACT: plain, "fly": own}})
    assert as_document(quality)["figures"]["greedy"]["fly"]["kept"]["value"] == pytest.approx(6 / 8)
    assert "say nothing" in str(tables_of(quality)[2].caption) and "b" in str(tables_of(quality)[2].caption)


def test_log_probabilities_are_the_targets(target):
    prompt, tokens = torch.arange(5, 12)[None], [3, 9, 40]
    scores = target(torch.cat([prompt, torch.tensor([tokens])], dim=1)).logits[0].log_softmax(-1)
    expected = sum(float(scores[6 + place, token]) for place, token in enumerate(tokens))
    assert log_probability(target, prompt, tokens) == pytest.approx(expected, abs=1e-4)


def test_a_run_that_was_stopped_goes_on(target, tokenizer, tmp_path):
    """See `test_labels_are_kept_as_they_come` for what else may be in such a file."""
    items = [Item("words", f"w{index} w{index + 3}", "w1", "contains") for index in range(3)]
    systems, path = systems_of(make_drafter(target), []), tmp_path / "answers.jsonl"

    def measured(count: int) -> dict[str, list[Answer]]:
        """Of the first questions, with the log of all."""
        log = kept_answers(path, {"seed": 1}, items, systems, target)
        return measure_quality(
            target,
            tokenizer,
            systems,
            items[:count],
            Settings(6, 0.0),
            lambda place, ask: log.of(("greedy", place), ask),
        )

    first = measured(2)
    path.write_text(path.read_text() + '{"mode": "greedy", "place": 2, "answ')  # killed while it wrote
    answers = measured(3)
    assert all(own[:2] == first[name] for name, own in answers.items())  # the seconds too: nothing was asked again
    assert measured(3) == answers and len(path.read_text().splitlines()) == 4
    with pytest.raises(ValueError, match="questions is"):
        kept_answers(path, {"seed": 1}, items[:2], systems, target)


def test_answers_of_other_weights_are_not_taken(tmp_path):
    """Names say nothing: a drafter may be trained anew in its folder, or another folder be called the same."""
    items = [Item("words", "w1 w4", "w1", "contains")]

    def kept_for(model, drafter) -> None:
        kept_answers(tmp_path / "answers.jsonl", {"seed": 1}, items, systems_of(drafter, []), model)

    target = make_target()
    folder, same = tmp_path / "drafter", make_drafter(target)
    same.save_pretrained(folder)
    kept_for(target, HSDrafter.from_pretrained(folder))
    kept_for(make_target(), HSDrafter.from_pretrained(folder))
    with pytest.raises(ValueError, match="another run: target's digest is"):
        kept_for(make_target(seed=1), HSDrafter.from_pretrained(folder))
    with torch.no_grad():
        same.norm.weight[-1] += 1e-3  # trained a little further
    same.save_pretrained(folder)
    with pytest.raises(ValueError, match="another run: drafter's digest is"):
        kept_for(target, HSDrafter.from_pretrained(folder))
    (folder / "refiner").mkdir()
    for weights in (b"one", b"other"):
        before = model_digest(HSDrafter.from_pretrained(folder))
        (folder / "refiner" / "model.safetensors").write_bytes(weights)
        assert model_digest(HSDrafter.from_pretrained(folder)) != before
    assert model_digest(CachebackDrafter()) == model_digest(CachebackDrafter())
    one, other = (LayerSkipDrafter.for_target(target, [layer]) for layer in (0, 1))
    assert model_digest(one) != model_digest(other)
    other.config = one.config
    other.generation_config.tree_size = 3
    assert model_digest(one) != model_digest(other), "drafting options decide what lossy rules accept"
    drafter = CausalLMDrafter(target)
    one, other = (CascadeDrafter([CachebackDrafter(), drafter], tokens=[2, most]) for most in (4, 5))
    assert model_digest(one) != model_digest(other)
    known = model_digest(one)
    one.levels[0].generation_config.ngram_length = 2
    assert model_digest(one) != known


@pytest.mark.slow
def test_systems_answer_the_same_questions(target, tokenizer):
    drafter = make_drafter(target)
    drafter.generation_config.tree_sizing = "fixed"
    rule = Rule("fly", dict(LOOSE["fly"]))
    items = [Item("words", f"w{index} w{index + 3}", "w1", "contains") for index in range(4)]
    for heat in (0.0, 1.0):
        settings = Settings(24, heat)
        systems = systems_of(drafter, [rule])
        found = measure_quality(target, tokenizer, systems, items, settings)
        assert [len(each) for each in found.values()] == [4, 4, 4]
        assert all(each.same and each.relaxed == 0 for each in found[EXACT])
        assert [each.forwards for each in found[PLAIN]] == [24] * 4
        assert sum(each.relaxed for each in found[rule.text]) > 0 and not all(each.same for each in found[rule.text])
        assert all(each.log_probability == plain.log_probability
                   for each, plain in zip(found[EXACT], found[PLAIN], strict=True))  # fmt: skip
    assert drafter.generation_config.verification == "walk"
    with pytest.raises(ValueError, match="make verifier"):
        systems_of(drafter, [Rule("pivot")])


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make_target()
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    return folder


@pytest.mark.slow
def test_the_commands(saved, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pair = ["--target", str(saved / "target"), "--drafter", str(saved / "drafter")]
    monkeypatch.setattr(pivots, "label", lambda target, tokenizer, place, plan: place.drafted % 2)
    train = ["make", "verifier", *pair, "--tasks", "counting,copying", "--items", "6", "--max-new-tokens", "12"]
    run = CliRunner().invoke(app, [*train, "--out", str(tmp_path / "drafter")])
    assert run.exit_code == 0, run.output
    trained = PivotClassifier.load(tmp_path / "drafter" / FILE)
    assert trained.recipe["tasks"] == "counting, copying"
    assert "counting, copying" in (tmp_path / "drafter" / "README.md").read_text()
    assert HSDrafter.from_pretrained(tmp_path / "drafter").loaded_from == tmp_path / "drafter"

    pair[3] = str(tmp_path / "drafter")
    out, picture = tmp_path / "quality.json", tmp_path / "quality.png"
    command = [
        "measure",
        "quality",
        *pair,
        "--tasks",
        "counting",
        "--items",
        "2",
        "--max-new-tokens",
        "8",
        "--thresholds",
        "0.9",
    ]
    files = ["--json", str(out), "--picture", str(picture), "--answers", str(tmp_path / "pivot.jsonl")]
    run = CliRunner().invoke(app, [*command, "--rules", "fly,typical,pivot", *files])
    assert run.exit_code == 0, run.output
    asked, known = make_items("counting", 8), trained.questions
    new = [item for item in asked if item.digest not in known][:2]
    assert new != asked[:2] and len(new) == 2, "the classifier was trained with the first questions"
    assert json.loads((tmp_path / "pivot.jsonl").read_text().splitlines()[0])["run"]["questions"] == digest(new)
    document = json.loads(out.read_text())
    assert set(document["figures"]) == {"greedy", "sampled"} and picture.stat().st_size > 5000
    names = [PLAIN, EXACT, "fly", "fly+fly_entropy=0.9", "typical", "typical+typical_threshold=0.9", "pivot",
             "pivot+pivot_threshold=0.9"]  # fmt: skip
    assert list(document["figures"]["greedy"]) == names
    assert document["figures"]["greedy"][EXACT]["same"]["value"] == 1.0
    assert [name for name in names[2:] if document["rules"][name]["published"]] == ["fly", "typical", "pivot"]
    run = CliRunner().invoke(app, [*command, "--rules", "walk"])
    assert run.exit_code != 0 and "no lossy rule" in run.output
    for wrong, told in (
        (["--rules", ""], "names no rule"),
        (["--thresholds", "abc"], "expected numbers"),
        (["--picture", "a.txt"], "ends in .png"),
    ):
        run = CliRunner().invoke(app, [*command, *wrong])
        assert run.exit_code == 2 and told in " ".join(run.output.replace("│", " ").split())

    kept = ["--rules", "fly", "--temperature", "0", "--no-speed", "--answers", str(tmp_path / "answers.jsonl")]
    run = CliRunner().invoke(app, [*command, *kept, "--json", str(out)])
    assert run.exit_code == 0 and "speed_up" not in run.output, run.output
    busy = CliRunner().invoke(app, [*command, *[each for each in kept if each != "--no-speed"]])
    assert busy.exit_code != 0 and "timed is False" in str(busy.exception) + busy.output
    before = out.read_text()
    assert json.loads(before)["settings"]["drafter"] == "drafter" and not json.loads(before)["settings"]["timed"]
    monkeypatch.setattr(quality_module, "time_call", None)  # all answers are known
    run = CliRunner().invoke(app, [*command, *kept, "--json", str(out)])
    assert run.exit_code == 0 and out.read_text() == before, run.output
