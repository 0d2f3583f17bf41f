"""The card of a training run says what was measured, and that it was not where it was not."""

from __future__ import annotations

from conftest import make_drafter
from huggingface_hub import ModelCard

from hf_hsdraft.training.card import write_card


def test_the_card_holds_the_last_evaluation_and_visible_gaps(target, tmp_path):
    config = make_drafter(target, target_name="org/target").config
    history = [
        {"step": 1, "eval_loss": 9.0, "eval_tau": 1.1},
        {"step": 2, "eval_loss": 1.25, "eval_tau": 2.5, "eval_accuracy_1": 0.75, "eval_acceptance_1": float("nan")},
    ]
    picture = tmp_path / "acceptance.png"
    write_card(tmp_path, config, {"conversations": "12"}, history, [picture])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "org/target" and "hsdraft" in card.data.tags
    assert "tau 2.5" in card.text and "| conversations | 12 |" in card.text and "(acceptance.png)" in card.text
    assert "| 1 | 0.75 | not measured |" in card.text and "| 2 | not measured | not measured |" in card.text


def test_a_card_that_somebody_wrote_is_kept(target, tmp_path):
    (tmp_path / "README.md").write_text("my own words")
    write_card(tmp_path, make_drafter(target).config, {}, [], [])
    assert (tmp_path / "README.md").read_text() == "my own words"
    (tmp_path / "README.md").unlink()
    for tau in (1.5, 1.75):
        write_card(tmp_path, make_drafter(target).config, {}, [{"eval_loss": 1.0, "eval_tau": tau}], [])
    assert "tau 1.75" in (tmp_path / "README.md").read_text()
