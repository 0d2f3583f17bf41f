"""Columns that stand for a whole vocabulary: what they estimate, and that a drafter learns from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import make_target
from test_acceptance_losses import some_chains
from test_pipeline import plan, run
from test_trainable import KINDS, loss_of

from hf_hsdraft.training.data.features import likely_columns
from hf_hsdraft.training.families.trainable import family_of
from hf_hsdraft.training.loop import run as run_module
from hf_hsdraft.training.loss.loss import WEIGHTINGS
from hf_hsdraft.training.loss.objectives import OBJECTIVES, Candidates

COUNTS = torch.arange(40, 0, -1) ** 3
BY_COLUMNS = ("hidden-state", "eagle3", "peagle", "specformer")  # families and kinds of them


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=4)


def test_draws_are_as_many_as_asked_for_and_frequent_tokens_are_certain():
    candidates = Candidates.of(4, 20, COUNTS)
    assert float(candidates.inclusion.sum()) == pytest.approx(20, abs=0.05)
    assert candidates.inclusion[0] == 1.0 and bool((candidates.inclusion[1:] <= candidates.inclusion[:-1]).all())
    assert bool((candidates.inclusion > 0).all())  # or a column would never be learned
    assert bool((Candidates.of(4, 400, COUNTS).inclusion == 1.0).all())


def test_the_weighted_sum_over_columns_is_the_sum_over_the_vocabulary():
    """Its mean over many draws, of the drafter's normaliser and of a divergence with the normaliser known."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 3, 40)
    candidates = Candidates.of(4, 10, COUNTS)
    likely = teacher.topk(4).indices.to(torch.int32)
    p, q = teacher.softmax(-1), logits.softmax(-1)
    terms = {"normaliser": logits.exp(), "tv": (p - q).abs() / 2, "kl": p * (p / q).log()}
    found = {name: [] for name in terms}
    for _ in range(4000):
        columns = candidates.columns(likely)
        for name, term in terms.items():
            found[name].append((term[:, columns.index] * columns.log_weight.exp()).sum(-1))
    for name, term in terms.items():
        draws, wanted = torch.stack(found[name]), term.sum(-1)
        error = draws.std(dim=0) / len(draws) ** 0.5
        assert bool(((draws.mean(dim=0) - wanted).abs() < 4 * error + 1e-6).all()), name


def test_likely_columns_are_those_of_the_greatest_logits():
    torch.manual_seed(0)
    states, head = torch.randn(700, 8), torch.randn(40, 8)
    found = likely_columns(states, head, 5)
    assert found.dtype == torch.int32
    assert [set(row) for row in found.tolist()] == [set(row) for row in (states @ head.T).topk(5).indices.tolist()]
    assert likely_columns(states[:0], head, 50).shape == (0, 40)


def gradients(drafter, target, pack, chains, labels, candidates, **fields):
    fields = {"objective": OBJECTIVES["ce_tv"], **fields}
    parts = loss_of(drafter, target, pack, chains, labels, candidates=candidates, **fields)
    trained = [part for part in drafter.parameters() if part.requires_grad]
    found = torch.autograd.grad(parts.loss, trained, allow_unused=True)
    return parts, torch.cat([grad.flatten() for grad in found if grad is not None])


@pytest.mark.parametrize("kind", BY_COLUMNS)
@pytest.mark.parametrize(
    "fields",
    [{}, {"terms": [WEIGHTINGS["d-pace"]], "objective": OBJECTIVES["forward_kl"]}],
    ids=["ce_tv", "d_pace"],
)
def test_with_all_columns_the_loss_is_that_of_the_vocabulary(target, kind, fields):
    drafter, pack, chains, labels = some_chains(target, kind)
    whole, expected = gradients(drafter, target, pack, chains, labels, None, **fields)
    every = Candidates.of(2, 400, torch.ones(40))
    parts, found = gradients(drafter, target, pack, chains, labels, every, **fields)
    torch.testing.assert_close(parts.loss, whole.loss)
    torch.testing.assert_close(parts.accuracy, whole.accuracy)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["hidden-state", "eagle3"])
def test_gradients_of_few_columns_average_to_that_of_the_vocabulary(target, kind):
    torch.manual_seed(0)
    drafter, pack, chains, labels = some_chains(target, kind)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter *= 0.5  # else one token would have all the mass, and each draw would miss it or not
    whole, expected = gradients(drafter, target, pack, chains, labels, None)
    few = Candidates.of(4, 24, torch.ones(40))
    draws = [gradients(drafter, target, pack, chains, labels, few) for _ in range(60)]
    mean = torch.stack([grad for _, grad in draws]).mean(dim=0)
    assert torch.cosine_similarity(mean, expected, dim=0) > 0.99
    assert abs(torch.stack([parts.loss for parts, _ in draws]).mean() / whole.loss - 1) < 0.05


def test_first_choices_are_the_targets_though_a_drawn_column_weighs_more(target):
    """Labels are the target's first choices among its own logits, not among the weighted ones."""
    drafter, pack, chains, labels = some_chains(target, "hidden-state")
    flat = replace(labels, teacher=labels.teacher * 0.01)  # all tokens are about equally probable
    outvoted = []

    def of_best(logits, teacher, best):
        outvoted.append(bool((teacher.argmax(dim=-1) != best).any()))
        return teacher.gather(1, best[:, None])[:, 0] + 0.0 * logits.sum(dim=-1)

    whole, _ = gradients(drafter, target, pack, chains, flat, None, objective=of_best)
    rare = Candidates(1, torch.full((40,), 0.2))
    parts, _ = gradients(drafter, target, pack, chains, flat, rare, objective=of_best)
    assert outvoted[-1]
    torch.testing.assert_close(parts.divergence, whole.divergence)


def test_evaluations_compare_the_whole_vocabulary(target):
    drafter, pack, chains, labels = some_chains(target, "hidden-state")
    few = Candidates.of(1, 2, torch.ones(40))
    with torch.no_grad():
        losses = [loss_of(drafter, target, pack, chains, labels, candidates=each) for each in (None, few)]
    torch.testing.assert_close(losses[0].divergence, losses[1].divergence)


def test_families_that_compute_columns_say_so(target):
    for kind in KINDS:
        drafter, *_ = some_chains(target, kind)
        expected = kind.startswith(BY_COLUMNS) and "selector" not in kind
        assert family_of(drafter).by_columns(drafter.config) == expected, kind


@pytest.mark.parametrize("cached", [False, True], ids=["taps in every step", "taps on disk"])
def test_a_run_learns_from_candidates_and_keeps_the_likely_tokens(chatty, tokenizer, tmp_path, cached):
    drafter = run(chatty, tokenizer, plan(tmp_path, cache_taps=cached), candidates=4, drawn_candidates=16, max_steps=2)
    assert drafter.generation_config.num_assistant_tokens > 0
    kept = list((tmp_path / "out" / "features").glob("likely-*.safetensors"))
    assert bool(kept) == cached
    assert "4 likely" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("large", "drafter", "options", "compared"),
    [
        (10**6, {}, {}, 0),
        (1, {}, {}, 16),
        (1, {}, {"candidates": 0}, 0),
        (1, {"injector": "selector"}, {}, 0),  # it computes all logits at once
        (1, {}, {"data_policy": "mixed"}, 0),
    ],
)
def test_large_draft_vocabularies_are_compared_by_candidates(
    chatty, tokenizer, tmp_path, monkeypatch, large, drafter, options, compared
):
    monkeypatch.setattr(run_module, "_LARGE_VOCABULARY", large)
    chosen = plan(tmp_path)
    run(chatty, tokenizer, replace(chosen, drafter={**chosen.drafter, **drafter}), max_steps=1, **options)
    assert ("16 likely" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")) == bool(compared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": -1}, "candidates=-1 is invalid: expected 0 or more"),
        ({"candidates": 4, "drawn_candidates": 0}, "drawn_candidates=0 is invalid: expected 1 or more"),
        ({"candidates": 4, "data_policy": "draft-opd"}, "candidates=4 is invalid with data_policy='draft-opd'"),
    ],
)
def test_candidates_that_do_not_go_with_the_rest_are_refused(chatty, tokenizer, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(chatty, tokenizer, plan(tmp_path), **options)
    assert not (tmp_path / "out").exists()
