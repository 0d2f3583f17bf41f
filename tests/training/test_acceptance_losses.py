"""Losses that aim at acceptance are what their formulas say, written out here number by number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import make_target
from test_trainable import borrow, fresh, loss_of, packed

from hf_hsdraft.methods.losses import d_pace, nla
from hf_hsdraft.methods.on_policy import RejectedDrafts, rejected_draft
from hf_hsdraft.training.families.trainable import family_of
from hf_hsdraft.training.loop.arguments import TRAINING_OPTIONS, training_arguments
from hf_hsdraft.training.loss import loss as loss_module
from hf_hsdraft.training.loss.chains import Chains, true_labels, unroll
from hf_hsdraft.training.loss.loss import WEIGHTINGS
from hf_hsdraft.training.loss.objectives import OBJECTIVES, objective_of, total_variation

# One of each way in which predictions depend on slots, states and paths.
kinds = pytest.mark.parametrize(
    "kind", ["hidden-state", "block", "block, rnn", "eagle3", "peagle", "specformer", "lm", "steered-lm"]
)


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=4)


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


def alpha_of(logits: list[float], teacher: list[float]) -> float:
    return sum(min(p, q) for p, q in zip(softmax(teacher), softmax(logits), strict=True))


def by_hand(name: str, logits: list[float], teacher: list[float], share: float, drafted: int = 0) -> float:
    """The value of an objective, in which `share` gets no gradient."""
    p, q = softmax(teacher), softmax(logits)
    pairs = list(zip(p, q, strict=True))
    alpha = sum(min(pair) for pair in pairs)
    ce = -math.log(q[p.index(max(p))])
    tv = sum(abs(a - b) for a, b in pairs) / 2
    kl = sum(a * math.log(a / b) for a, b in pairs)
    reverse = sum(b * math.log(b / a) for a, b in pairs)
    mixed = sum(a * math.log(2 * a / (a + b)) + b * math.log(2 * b / (a + b)) for a, b in pairs) / 2
    r = math.log(p[drafted]) - math.log(q[drafted])
    values = {
        "nla": -math.log(alpha), "lk_hybrid": share * kl + (1 - share) * (1 - alpha), "forward_kl": kl,
        "reverse_kl": reverse, "jensen_shannon": mixed, "total_variation": tv, "hard_labels": ce,
        "ce_tv": share * ce + (1 - share) * tv, "kl_ce": share * ce + (1 - share) * kl, "rejected": math.exp(r) - r - 1,
    }  # fmt: skip
    return values[name]


@pytest.mark.parametrize("name", [*OBJECTIVES, "ce_tv, 0.7", "rejected"])
def test_objectives_and_gradients_are_those_of_the_formulas(name):
    """Logits may be shifted, since only probabilities count."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (2 * torch.randn(6, 7, dtype=torch.float64, generator=generator) for _ in range(2))
    drafted = torch.tensor([0, 3, 6, 1, 1, 5])
    name, _, share = name.partition(", ")
    objective = None if name == "rejected" else objective_of(name, float(share) if share else None)
    logits = (logits + 3.0).requires_grad_()
    value = rejected_draft(logits, teacher, drafted) if objective is None else objective(logits, teacher)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    ce_share = float(share or getattr(OBJECTIVES.get(name), "ce_share", 0))
    for row in range(6):
        x, y, token = logits[row].tolist(), teacher[row].tolist(), int(drafted[row])
        fixed = math.exp(-3 * alpha_of(x, y)) if name == "lk_hybrid" else ce_share
        assert value[row].item() == pytest.approx(by_hand(name, x, y, fixed, token), rel=1e-12)
        for column in range(7):
            ends = [[*x[:column], x[column] + step, *x[column + 1 :]] for step in (1e-5, -1e-5)]
            after, before = (by_hand(name, end, y, fixed, token) for end in ends)
            assert gradient[row, column].item() == pytest.approx((after - before) / 2e-5, rel=1e-5, abs=1e-8)


def test_acceptance_is_finite_where_nothing_overlaps():
    """And where much does, it is what rejection sampling accepts."""
    far, teacher = torch.tensor([[0.0, 90.0, 0.0]], requires_grad=True), torch.tensor([[90.0, 0.0, 0.0]])
    value = nla(far, teacher)
    torch.testing.assert_close(value, torch.tensor([90.0 - math.log(3)]), atol=1e-3, rtol=0)
    (gradient,) = torch.autograd.grad(value, far)
    assert gradient.isfinite().all() and gradient.abs().max() > 0.1
    assert torch.autograd.grad(total_variation(far, teacher), far)[0].abs().max() < 1e-6  # it would learn nothing
    logits, teacher = torch.randn(5, 9), torch.randn(5, 9)
    torch.testing.assert_close((-nla(logits, teacher)).exp(), 1 - total_variation(logits, teacher))


def weights_by_hand(probabilities: list[float], valid: list[bool], floor: float) -> list[float]:
    steps = range(len(valid))
    s = [(1 - floor) * probabilities[j] + floor if valid[j] else 1.0 for j in steps]
    reached = [math.prod(s[: m + 1]) for m in steps]
    return [sum(reached[m] for m in steps if m >= k) for k in steps]


def test_d_pace_is_its_formula():
    probabilities = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]) > 0
    for floor in (0.5, 0.0, 0.2):
        weights = d_pace(probabilities, valid, floor)
        for row in range(5):
            expected = weights_by_hand(probabilities[row].tolist(), valid[row].tolist(), floor)
            assert weights[row].tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(d_pace(probabilities, valid), d_pace(probabilities, valid, 0.5))


def test_d_pace_gives_the_gradient_of_the_expected_length():
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    q, every = logits.sigmoid(), torch.ones(3, 4, dtype=torch.bool)
    length = sum(q[:, : depth + 1].prod(dim=1) for depth in range(4)).sum()
    (expected,) = torch.autograd.grad(-length, logits, retain_graph=True)
    (found,) = torch.autograd.grad((d_pace(q.detach(), every, floor=0.0) * -q.log()).sum(), logits)
    torch.testing.assert_close(found, expected)


def some_chains(target, kind: str):
    """A drafter, a pack and four chains: the last is not followed, the one before it reaches the end of its text."""
    drafter = fresh(target, kind)
    pack = packed(target, drafter, 20, 26)
    chains = Chains(torch.tensor([7, 30, 16, 12]), 3, torch.ones(4, dtype=torch.bool))
    return drafter, pack, chains, true_labels(pack, chains, 3)


def logits_of(drafter, target, pack, chains, labels) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Logits of drafter and target of each chain and depth, one prediction at a time."""
    weights = borrow(drafter, target)
    rows = target.get_output_embeddings().weight.detach()[weights.vocab_ids]
    predictions = family_of(drafter).predictions(drafter, weights)
    hidden = unroll(drafter, predictions, pack, chains, labels.tokens).hidden_states
    states = predictions.states(labels.tokens, hidden)
    found = {}
    for depth, each in enumerate(hidden):
        for chain in range(len(each)):
            state = None if states[depth] is None else states[depth][chain : chain + 1]
            teacher = labels.teacher[labels.rows[chain, depth]] @ rows.T
            found[chain, depth] = (predictions.logits(each[chain : chain + 1], state)[0].double(), teacher.double())
    return found


def gradients(loss: torch.Tensor, drafter) -> dict[str, torch.Tensor]:
    trained = {name: each for name, each in drafter.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: torch.zeros(1) if each is None else each for name, each in zip(trained, found, strict=True)}


@kinds
@pytest.mark.parametrize("streams", ["fixed", "d-pace", "rejected", "both", "valid prefix"])
def test_the_loss_of_chains_is_the_sum_of_its_predictions(target, kind, streams):
    """Each prediction by itself, in float64: weights of depths, and rejected drafts at some places; with gradients."""
    drafter, pack, chains, labels = some_chains(target, kind)
    every, rejected = logits_of(drafter, target, pack, chains, labels), None
    if streams in ("rejected", "both"):
        costs = torch.tensor([[0.0, 0.9, 0.0], [1.0, 0.9, 0.81], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
        columns = torch.zeros(4, 3, dtype=torch.int64)
        for place, (logits, _) in every.items():
            columns[place] = logits.argmax()  # drafts are first choices
        rejected = RejectedDrafts(columns, costs)
        labels = replace(labels, further=rejected, count=labels.count + costs.sum(dim=0))
    pace, prefix = streams in ("d-pace", "both"), streams == "valid prefix"
    terms = [WEIGHTINGS["d-pace"]] * pace + [TRAINING_OPTIONS["valid_prefix"].term(None, True)] * prefix
    parts = loss_of(drafter, target, pack, chains, labels, terms=terms, chunk_logits=2 * 40, scored_logits=40)
    found = gradients(parts.loss, drafter)

    total, count = torch.zeros((), dtype=torch.float64), 1.0 if streams == "fixed" else labels.valid.sum().item()
    for chain in range(4):
        valid = labels.valid[chain].tolist()
        reached = [every[chain, depth] for depth in range(3) if (chain, depth) in every]
        right = [float(logits.detach().softmax(-1)[teacher.argmax()]) for logits, teacher in reached]
        weights = weights_by_hand([*right, 0.0, 0.0], valid, 0.5) if pace else [1.0] * 3
        if prefix:
            first = [float(logits.argmax() == teacher.argmax()) for logits, teacher in reached]
            weights = [math.prod(first[:depth]) for depth in range(3)]
        if streams == "fixed":  # the mean over depths of the mean of each
            weights = (1 / labels.count / 1.75).tolist()
        for depth, (logits, teacher) in enumerate(reached):
            log_p, log_q = teacher.log_softmax(-1), logits.log_softmax(-1)
            if valid[depth]:
                total = total + weights[depth] * [1.0, 0.5, 0.25][depth] * (log_p.exp() * (log_p - log_q)).sum()
            if rejected is not None and costs[chain, depth]:
                column = rejected.columns[chain, depth]
                ratio = log_p[column] - log_q[column]
                total = total + costs[chain, depth] * (ratio.exp() - ratio - 1)
                count += costs[chain, depth].item()
    assert labels.valid.sum(dim=1).tolist() == [3, 3, 2, 1]
    torch.testing.assert_close(parts.loss.double(), total / count, rtol=1e-4, atol=1e-6)
    for name, expected in gradients(total / count, drafter).items():
        torch.testing.assert_close(found[name], expected, rtol=2e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@kinds
def test_d_pace_takes_one_more_product_by_each_head(target, kind, monkeypatch):
    """And never computes more logits at a time than without it."""
    drafter, pack, chains, labels = some_chains(target, kind)
    predictions = type(family_of(drafter).predictions(drafter, borrow(drafter, target)))
    logits, linear, products = predictions.logits, torch.nn.functional.linear, {"drafter": [], "target": []}

    def counted(self, hidden, states, columns):
        products["drafter"].append(len(hidden))
        return logits(self, hidden, states, columns)

    def teacher(rows, head, *bias):
        if head is drafter.loss_function.teacher_head:
            products["target"].append(len(rows))
        return linear(rows, head, *bias)

    monkeypatch.setattr(predictions, "logits", counted)
    monkeypatch.setattr(loss_module.F, "linear", teacher)
    rows = {}
    for pace in (False, True):
        for counts in products.values():
            counts.clear()
        loss_of(
            drafter, target, pack, chains, labels, terms=[WEIGHTINGS["d-pace"]] * pace, chunk_logits=2 * 40
        ).loss.backward()
        rows[pace] = {name: sum(counts) for name, counts in products.items()}
        assert max(map(max, products.values())) == drafter.loss_function.rows_per_chunk <= 2
    assert rows[False] == {"drafter": 10, "target": 10}  # four chains, of which three are followed
    assert rows[True] == {"drafter": 20, "target": 20}


def test_the_target_says_once_what_follows_a_token(target, monkeypatch):
    """Chains that start side by side predict the same tokens at different depths."""
    drafter = fresh(target, "hidden-state")
    pack, chains = packed(target, drafter, 20), Chains(torch.tensor([8, 9, 10]), 3, torch.ones(3, dtype=torch.bool))
    linear, rows = torch.nn.functional.linear, []

    def counted(states, weight, *bias):
        rows.extend([len(states)] if weight is drafter.loss_function.teacher_head else [])
        return linear(states, weight, *bias)

    monkeypatch.setattr(loss_module.F, "linear", counted)
    loss_of(drafter, target, pack, chains)
    # The first depth predicts the tokens 10, 11 and 12. The others, which know their paths, predict 11 to 14.
    assert rows == [3, 4]


@kinds
def test_d_pace_in_bfloat16_leaves_no_parameter_without_gradient(target, kind):
    """The first pass needs no gradients; what it casts must not serve the second one."""
    drafter, pack, chains, labels = some_chains(target, kind)
    found = {}
    for pace in (False, True):
        drafter.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(drafter, target, pack, chains, labels, terms=[WEIGHTINGS["d-pace"]] * pace).loss
        found[pace] = {name for name, each in gradients(loss, drafter).items() if each.abs().max() > 0}
    least = 4 if kind == "steered-lm" else 6  # a steering has four
    assert found[True] == found[False] and len(found[True]) >= least


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": "lk"}, "objective='lk' is unknown: expected one of .*ce_tv, .*nla, lk_hybrid"),
        ({"ce_share": 0.5}, "ce_share=0.5 is invalid with objective='forward_kl'"),
        ({"objective": "ce_tv", "ce_share": 1.5}, "ce_share=1.5 is invalid: expected 0 to 1"),
        (
            {"depth_weighting": "pace"},
            "depth_weighting='pace' is unknown: expected one of fixed, by-prediction, d-pace",
        ),
        ({"depth_weighting": "d-pace", "depth_decay": 0.5}, "depth_decay=0.5 is invalid with depth_weighting='d-pace'"),
        ({"depth_weighting": "d-pace", "depth_weights": [1.0]}, r"depth_weights=\[1.0\] is invalid with"),
        ({"rejected_drafts": 2}, "rejected_drafts=2 is invalid with data_policy='teacher'"),
        ({"data_policy": "draft-opd", "rejected_drafts": -1}, "rejected_drafts=-1 is invalid: expected 0 or more"),
        ({"data_policy": "own"}, "data_policy='own' is unknown: expected one of teacher, student, mixed, draft-opd"),
    ],
)
def test_options_that_do_not_apply_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        training_arguments(tmp_path, given, "cpu")


def test_d_pace_weighs_depths_evenly_where_drafters_are_compared(tmp_path):
    arguments = training_arguments(tmp_path, {"depth_weighting": "d-pace"}, "cpu")
    assert arguments.weights_of_depths(3) == [1.0, 1.0, 1.0]


def test_the_regression_on_states_fades(tmp_path):
    given = {"regression_weight": 2.0, "regression_steps": 4}
    added = training_arguments(tmp_path, given, "cpu").terms["regression_weight"].of_states
    states = torch.full((2, 3), 0.5), torch.zeros(2, 3), torch.tensor([0.5, 0.25])  # each differs by 0.5 ** 2 / 2
    found = [float(added(*states, step)) for step in range(6)]
    assert found == pytest.approx([2 * share * 0.75 * 0.125 for share in (1, 0.75, 0.5, 0.25, 0, 0)])
