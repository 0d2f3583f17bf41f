"""Training of the classifier of pivot-aware verification: what is held out, labels that are kept, where it is saved."""

from __future__ import annotations

import json
import math

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
from hf_hsdraft.methods.lossy.kept_answers import kept_labels, key_of
from hf_hsdraft.methods.lossy.pivot import FILE, PivotClassifier, tap_of
from hf_hsdraft.methods.lossy.pivot_training import Place, Plan, collect, fit, held_out, label, utility
from hf_hsdraft.runtime.prompt_inputs import encode_prompt

PLAN = Plan(places=50, roll_outs=3, max_new_tokens=16)


def place_of(question, state=(0.0, 0.0), before=(7, 8), own=0, drafted=1, answer="1") -> Place:
    item = Item("sums", question, answer, "contains")
    return Place(item, torch.tensor([[5, 6]]), before, own, drafted, torch.as_tensor(state), (0.5, 0.1))


@pytest.mark.parametrize("continuation", [0, 8])
def test_mismatches_are_those_of_the_greedy_answer(target, tokenizer, continuation):
    """Also of a drafter whose n-grams go on, which stays as it was."""
    item, drafter = Item("words", "w3 w5 w8", "w1", "contains"), make_drafter(target)
    drafter.generation_config.ngram_continuation = continuation
    found = collect(target, tokenizer, drafter, item, PLAN)
    assert drafter.generation_config.ngram_continuation == continuation
    prompt = encode_prompt(tokenizer, item.prompt)["input_ids"]
    answer = target.generate(prompt, do_sample=False, max_new_tokens=16)[0, prompt.shape[1] :].tolist()
    assert len(found) > 3
    for place in found:
        before = len(place.before)
        assert list(place.before) == answer[:before] and place.own == answer[before] != place.drafted
        text = torch.cat([prompt, torch.tensor([[*place.before, place.drafted]])], dim=1)
        output = target(text, output_hidden_states=True)
        torch.testing.assert_close(place.state, output.hidden_states[tap_of(3)][0, -1], atol=1e-4, rtol=1e-4)
        p = output.logits[0, -2].softmax(-1)
        entropy = float(torch.special.entr(p).sum()) / math.log(len(p))
        assert place.figures == pytest.approx((entropy, float(p[place.drafted])), abs=1e-4)


def test_a_place_is_a_pivot_if_answers_after_it_are_right_less_often(target, tokenizer, monkeypatch):
    word = tokenizer.convert_ids_to_tokens(10)
    place = place_of("w3", before=(9,), own=10, drafted=11, answer=word)
    assert utility(target, tokenizer, place, 10, PLAN) == 1.0  # the token itself is in each of the answers
    assert utility(target, tokenizer, place, 11, Plan(roll_outs=3, max_new_tokens=2)) == 0.0  # and nothing follows here
    shares = {10: 0.8, 11: 0.71}
    monkeypatch.setattr(pivots, "utility", lambda target, tokenizer, place, token, plan: shares[token])
    assert label(target, tokenizer, place, PLAN) == 1
    shares[11] = 0.73  # more than nine tenths of 0.8
    assert label(target, tokenizer, place, PLAN) == 0


def test_a_classifier_learns_what_can_be_told():
    """Not what is known of a question only: figures are of questions that were not learned."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(400, 8, generator=generator)
    places = [place_of(f"question {index}", state) for index, state in enumerate(states)]
    classifier, told = fit(places, (states[:, 0] > 0.5).long().tolist(), Plan())
    assert told["pivots found"] > 0.8 and told["others passed"] > 0.8
    assert classifier.recipe["tasks"] == "sums" and classifier.recipe["mismatches"] == 400
    with pytest.raises(ValueError, match="0 of 40 mismatches are pivots"):
        fit(places[:40], [0] * 40, Plan())
    places, labels = [], []
    for question in range(80):  # labels by the toss of a coin for each question
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


def test_labels_are_kept_as_they_come(target, tmp_path):
    path, asked = tmp_path / "labels.jsonl", []
    places = [place_of("a"), place_of("a", drafted=2), place_of("b")]

    def labelled(count: int, plan: Plan = PLAN, model=target) -> list[int]:
        kept = kept_labels(path, model, plan)
        return [kept.of(key_of(place), lambda place=place: asked.append(place) or place.drafted % 2)
                for place in places[:count]]  # fmt: skip

    assert labelled(2) == [1, 0] and asked == places[:2]
    whole = path.read_text()
    path.write_text(whole + '{"mismatch": ["x", [7')  # killed while it wrote
    assert labelled(2) == [1, 0] and asked == places[:2] and path.read_text() == whole
    assert labelled(3) == labelled(3) == [1, 0, 1] and asked == places
    before = path.read_text()
    for plan, model, told in (
        (Plan(temperature=0.5, roll_outs=3, max_new_tokens=16), target, "temperature is 0.7 there and 0.5 here"),
        (PLAN, make_target(seed=5), "target's digest is"),
    ):
        with pytest.raises(ValueError, match=told):
            labelled(0, plan, model)
    assert path.read_text() == before
    head = before.splitlines()[0]
    for other in (b'{"turns": ["a"]}\n', b"a note", b"\n", b"{", b"\xff\n", b'{"labels of": 1}\n',
                  b'{"labels of": {}}\n{"mismatch": [], "pivot": 7}\n', b'{"labels of": {}}\n[]\n'):  # fmt: skip
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"is no file of labels|holds something else|another run"):
            labelled(0)
        assert path.read_bytes() == other
    for begun in ("", '{"labels of": {"seed'):  # killed while it wrote its first line
        path.write_text(begun)
        labelled(0)
        assert path.read_text() == head + "\n"


@pytest.fixture
def command(tokenizer, tmp_path):
    target, drafter = make_target(), tmp_path / "drafter"
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(drafter)
    pair = ["--target", str(tmp_path / "target"), "--drafter", str(drafter)]
    return ["make", "verifier", *pair, "--tasks", "counting", "--items", "8", "--max-new-tokens", "12"]


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
    assert "the same command resumes from" in run.output
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
