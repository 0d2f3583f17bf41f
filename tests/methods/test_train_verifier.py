"""Training of the classifier of pivot-aware verification: what is held out, labels that are kept, where it is saved."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_drafter, make_target
from safetensors import safe_open
from typer.testing import CliRunner

from hf_hsdraft import HSDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.hub.drafter_files import CARD, WEIGHTS
from hf_hsdraft.methods.lossy import pivot_training as pivots
from hf_hsdraft.methods.lossy.checked_tasks import Item
from hf_hsdraft.methods.lossy.kept_answers import Labels, labels_run
from hf_hsdraft.methods.lossy.pivot import FILE, PivotClassifier
from hf_hsdraft.methods.lossy.pivot_training import Place, Plan, collect, fit, held_out


def place_of(question: str, state: torch.Tensor, drafted: int = 1) -> Place:
    return Place(Item("sums", question, "1", "number"), torch.zeros(1, 1), (7, 8), 0, drafted, state, (0.5, 0.1))


def test_held_out_figures_are_of_questions_that_were_not_learned():
    """Labels by the toss of a coin for each question: whoever knows the question knows them, and nobody else does."""
    generator = torch.Generator().manual_seed(0)
    places, labels = [], []
    for question in range(80):
        state, coin = torch.randn(32, generator=generator), int(torch.randint(2, (1,), generator=generator))
        for _ in range(6):
            places.append(place_of(str(question), state + 0.01 * torch.randn(32, generator=generator)))
            labels.append(coin)
    _, told = fit(places, labels, Plan())
    assert sum(told.values()) < 1.4  # guessing has 1, and knowing the questions has 2


def test_questions_stay_together_and_each_kind_is_on_both_sides():
    for seed in range(30):
        torch.manual_seed(seed)
        questions = [f"q{index // 3}" for index in range(60)]
        kinds = (torch.rand(60) < 0.3).long()
        held = held_out(questions, kinds)
        sides = {(question, bool(own)) for question, own in zip(questions, held, strict=True)}
        assert len(sides) == 20
        for kind in (0, 1):
            assert held[kinds == kind].any() and (~held)[kinds == kind].any()
        assert 0.1 < float(held.float().mean()) < 0.5
    with pytest.raises(ValueError, match="expected at least two questions with pivots"):
        held_out(["a", "a", "b", "c"], torch.tensor([1, 1, 0, 0]))


def test_a_drafter_whose_ngrams_go_on_has_the_same_mismatches(target, tokenizer):
    item, plan = Item("words", "w3 w5 w8", "w1", "contains"), Plan(places=50, max_new_tokens=12)
    drafter = make_drafter(target)
    expected = [(place.before, place.drafted) for place in collect(target, tokenizer, drafter, item, plan)]
    drafter.generation_config.ngram_continuation = 8
    found = collect(target, tokenizer, drafter, item, plan)
    assert [(place.before, place.drafted) for place in found] == expected != []
    assert drafter.generation_config.ngram_continuation == 8


def test_labels_are_kept_as_they_come(target, tmp_path):
    path, run = tmp_path / "labels.jsonl", labels_run(target, Plan())
    places = [place_of("a", torch.zeros(2), drafted) for drafted in (1, 2)] + [place_of("b", torch.zeros(2))]
    labels = Labels.read(path, run)
    for place, label in zip(places[:2], (1, 0), strict=True):
        labels.add(place, label)
    whole = path.read_text()
    path.write_text(whole + '{"mismatch": ["x", [7')  # killed while it wrote
    again = Labels.read(path, run)
    assert [again.of(place) for place in places] == [1, 0, None] and path.read_text() == whole
    again.add(places[2], 1)
    assert Labels.read(path, run).of(places[2]) == 1
    for other, told in (
        (labels_run(target, Plan(temperature=0.5)), "temperature is 0.7 there and 0.5 here"),
        (labels_run(make_target(seed=5), Plan()), "target's digest is"),
    ):
        before = path.read_text()
        with pytest.raises(ValueError, match=told):
            Labels.read(path, other)
        assert path.read_text() == before
    for other in (b'{"turns": ["a"]}\n', b"a note", b"\n", b"\xff\n", b'{"labels of": 1}\n',
                  b'{"labels of": {}}\n{"mismatch": [], "pivot": 7}\n', b'{"labels of": {}}\n[]\n'):  # fmt: skip
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"is no file of labels|holds something else|another run"):
            Labels.read(path, run)
        assert path.read_bytes() == other


@pytest.fixture
def command(tokenizer, tmp_path):
    target, drafter = make_target(), tmp_path / "drafter"
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(drafter)
    pair = ["--target", str(tmp_path / "target"), "--drafter", str(drafter)]
    return ["train-verifier", *pair, "--tasks", "counting", "--items", "8", "--max-new-tokens", "12"]


@pytest.mark.train
def test_a_run_that_was_stopped_goes_on_and_writes_beside_the_drafter(command, tmp_path, monkeypatch):
    labelled = []

    def label(target, tokenizer, place, plan) -> int:
        if len(labelled) == 5:
            raise KeyboardInterrupt
        labelled.append((place.item.prompt, place.before, place.drafted))
        return len(labelled) % 2

    monkeypatch.setattr(pivots, "label", label)
    path, drafter = tmp_path / "labels.jsonl", tmp_path / "drafter"
    weights = (drafter / WEIGHTS).read_bytes()
    run = CliRunner().invoke(app, [*command, "--labels", str(path)])
    assert run.exit_code != 0 and len(path.read_text().splitlines()) == 6 and not (drafter / FILE).exists()
    assert "the same command goes on from" in run.output
    first, labelled[:] = list(labelled), [()] * 6
    run = CliRunner().invoke(app, [*command, "--labels", str(path)])
    assert run.exit_code == 0, run.output
    assert not set(first) & set(labelled[6:]) and len(labelled) > 6
    classifier = PivotClassifier.load(drafter / FILE)
    assert (classifier.layers, classifier.recipe["target"]) == (3, "target")
    assert (drafter / WEIGHTS).read_bytes() == weights and "counting" in (drafter / CARD).read_text()
    assert HSDrafter.from_pretrained(drafter).loaded_from == drafter
    with safe_open(drafter / FILE, framework="pt") as file:
        assert json.loads(file.metadata()["recipe"])["mismatches"] == len(path.read_text().splitlines()) - 1


def test_a_place_that_cannot_be_written_is_told_before_the_work(command, tmp_path, monkeypatch):
    monkeypatch.setattr(pivots, "collect", lambda *_: pytest.fail("no question may be asked"))
    (tmp_path / "a file").write_text("mine")
    for out in ("a file", "a file/below"):
        run = CliRunner().invoke(app, [*command, "--out", str(tmp_path / out)])
        assert run.exit_code != 0 and "a file" in run.output + str(run.exception), run.output
    (tmp_path / "drafter" / FILE).mkdir()
    run = CliRunner().invoke(app, command)
    assert run.exit_code != 0 and "move it away" in run.output + str(run.exception)
    (tmp_path / "drafter" / FILE).rmdir()
    run = CliRunner().invoke(app, [*command, "--labels", str(tmp_path / "none" / "labels.jsonl")])
    assert run.exit_code != 0 and "no such folder" in run.output
    assert (tmp_path / "a file").read_text() == "mine"
