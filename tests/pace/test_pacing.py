"""How much is drafted: by costs and by what was right, and never so much that it takes longer than not to draft."""

from __future__ import annotations

import math
import random

import pytest
from conftest import as_plain, make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.core.kept import kept_with
from hf_hsdraft.engine import loop
from hf_hsdraft.pace import pacing
from hf_hsdraft.pace.pacing import Calibration, CostPace, Costs, Habits, KindOfCall, MeasuredCosts

COSTS = Costs(tree=0.05, node=0.01, draft=0.08, depth=0.03)


def chain(*probabilities):
    depths = range(len(probabilities) + 1)
    scores = [0.0]
    for probability in probabilities:
        scores.append(scores[-1] + math.log(probability))
    return DraftTree(tuple(depths), tuple(depth - 1 for depth in depths), tuple(depths), tuple(scores))


def fitted_size(pace, trees, depth=0):
    """Number of nodes of the largest tree that is verified; without a depth the trees were proposed for nothing."""
    by_row = dict(enumerate(trees))
    found = pace.fit(by_row if depth else {}, depth, list(by_row), lambda scored: dict(scored) or by_row)
    return max(map(len, found.values())) - 1


def run(pace, rounds, right, drafted=0.6, seconds=None):
    """Lets a drafter draft chains whose tokens are right with probability `right`; returns time and tokens.

    `seconds` gives the times of forward and draft by nodes and depth; without it they are those of `COSTS`.
    """
    draw = random.Random(0)
    time = tokens = 0.0
    for _ in range(rounds):
        depth = pace.plan()
        tree = chain(*[drafted] * depth)
        size = fitted_size(pace, [tree], depth)
        length = next((n for n in range(depth) if draw.random() >= right), depth)
        emitted = 1 + min(length, size)
        forward, drafting = (1.0, 0.0) if seconds is None else seconds(size, depth)
        pace.learn({0: [*range(1, length + 1), 99]}, size, emitted, emitted, depth, drafting, forward)
        time += forward + drafting
        if seconds is None:
            time += COSTS.verifying(size) + COSTS.drafting(depth)
        tokens += emitted
    return time, tokens


@pytest.mark.parametrize(
    ("right", "rounds", "least", "of_best"),
    [
        (0.0, 400, 1 / 1.015, 0.0),  # a useless drafter is hardly asked
        (0.02, 128, 0.97, 0.0),  # nor one of an unpredictable text of some hundred tokens
        *((right, 2000, 0.985, 0.9) for right in (0.1, 0.3, 0.5, 0.7)),
        (0.9, 400, 0.985, 0.95),
    ],
)
def test_it_is_never_slower_and_close_to_the_best_fixed_depth(right, rounds, least, of_best):
    time, tokens = run(CostPace(6, COSTS), rounds, right)
    best = max(
        sum(right**d for d in range(depth + 1)) / (1 + COSTS.verifying(depth) + COSTS.drafting(depth))
        for depth in range(7)
    )
    assert tokens / time > max(of_best * best, least)


@pytest.mark.parametrize("tokens", [8, 16, 48])
def test_ten_calls_of_a_drafter_that_is_always_wrong_lose_at_most_three_percent(tokens):
    """Of short texts too, with costs that have to be measured first."""

    def seconds(size, depth):
        return 1.0 + (0.05 + 0.04 * size if size else 0.0), 0.1 + 0.04 * depth if depth else 0.0

    measured, habits, times = MeasuredCosts(), None, []
    for _ in range(20):
        pace = CostPace(6, measured)
        if habits is not None:
            pace.begin_with(habits)
        times.append(run(pace, tokens, right=0.0, seconds=seconds)[0])
        habits = pace.habits
    assert max(sum(times[start : start + 10]) for start in range(11)) <= 1.03 * 10 * tokens


def test_it_notices_that_a_text_became_predictable():
    pace = CostPace(6, COSTS)
    run(pace, 300, right=0.0)
    time, tokens = run(pace, 300, right=0.9)
    assert tokens / time > 1.8


def test_what_is_proposed_for_nothing_is_not_drafted_again():
    pace = CostPace(6, COSTS)
    run(pace, 100, right=0.5)
    assert pace.plan(certain=0.0) > 0 and pace.plan(certain=0.97) == 0


@given(st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=1, max_size=4), st.floats(0.0, 0.3))
@settings(max_examples=100, deadline=None)
def test_a_batch_is_cut_where_a_further_column_does_not_pay(rows, node):
    """Of all widths the one that gains most, by brute force: each costs a node of every row, whatever is in it."""
    pace = CostPace(8, Costs(0.02, node, 0.0, 0.0))
    trees = [chain(*row) for row in rows]
    paths = [sorted((math.exp(score) for score in tree.scores[1:]), reverse=True) for tree in trees]
    worth = [
        sum(sum(path[:size]) for path in paths) / len(rows) - pace.habits.rate * (0.02 + node * size if size else 0.0)
        for size in range(max(map(len, rows)) + 1)
    ]
    assert worth[fitted_size(pace, trees)] == pytest.approx(max(worth), abs=1e-9)


def test_a_node_of_a_batch_costs_less_than_a_plain_round_however_many_rows():
    nodes = [MeasuredCosts.of_rows(rows).costs.node for rows in (1, 2, 4, 8, 16, 32, 1024)]
    assert nodes == sorted(nodes) and nodes[-1] < 1.0
    assert nodes[0] == MeasuredCosts().costs.node


@pytest.mark.parametrize("rows", [2, 8, 32])
@pytest.mark.parametrize("right", [0.0, 0.02])
def test_a_useless_drafter_costs_a_batch_at_most_a_few_percent_from_the_first_call_on(rows, right):
    """Calls of 40 tokens; each first draft reads the prompts, which takes as long as a plain round."""
    costs, habits, draw = MeasuredCosts.of_rows(rows), Habits.assumed(4), random.Random(1)
    lost = []
    for _ in range(6):
        pace, time, tokens, drafts = CostPace(4, costs, rows), 0.0, 0, 0
        pace.begin_with(habits)
        habits = pace.habits
        while tokens < 40:
            depth = pace.plan()
            size = fitted_size(pace, [chain(*[0.6] * depth)] * rows, depth)
            length = int(size > 0 and draw.random() < right)
            draft_seconds = 0.0 if not depth else 0.12 + (0.9 if not drafts else 0.0)
            forward_seconds = 1.0 + size * 0.1
            drafts += depth > 0
            tokens_of_each = {row: [*range(1, length + 1), 99] for row in range(rows)}
            pace.learn(tokens_of_each, size, 1 + length, 1 + length, depth, draft_seconds, forward_seconds)
            time, tokens = time + forward_seconds + draft_seconds, tokens + 1 + length
        lost.append(time - tokens)
    assert lost[0] < 0.04 * 40
    assert sum(lost) < 0.02 * 40 * len(lost)


def batch_rounds(rows, costs, rounds=60):
    """Rounds over a batch, with for each row how probable its next token is; drafts made, and those not verified."""
    pace, drafts, unused = CostPace(1, costs), 0, 0
    for _ in range(rounds):
        depth = pace.plan()
        size = fitted_size(pace, [chain(each) if depth else chain() for each in rows], depth)
        drafts, unused = drafts + (depth > 0), unused + (depth > 0 and size == 0)
        mean = 1.0 + (sum(rows) / len(rows) if size else 0.0)
        pace.learn(dict.fromkeys(range(len(rows)), ()), size, mean, mean, depth, 0.0, None)
    return drafts, unused


@pytest.mark.parametrize(
    ("rows", "costs", "pays"),
    [
        ([0.05] * 5 + [0.95] * 3, Costs(0.0, 0.45, 0.05, 0.05), False),  # a column is one of every row
        ([0.5] * 8, Costs(0.4, 0.15, 0.05, 0.05), False),  # a tree costs something beside its nodes
        ([0.7] * 8, Costs(0.03, 0.1, 0.05, 0.05), True),
    ],
)
def test_a_batch_is_drafted_for_where_a_tree_is_worth_verifying(rows, costs, pays):
    drafts, unused = batch_rounds(rows, costs)
    assert (drafts, unused) == (60, 0) if pays else unused == drafts <= 5


def test_calibration_finds_how_often_an_overconfident_drafter_is_right():
    calibration, draw = Calibration(), random.Random(1)
    tree = chain(0.9)
    for _ in range(500):
        calibration.learn(tree, [1 if draw.random() < 0.3 else 7])
    assert calibration.probability(math.log(0.9)) == pytest.approx(0.3, abs=0.06)
    scored = calibration.applied(tree)
    assert math.exp(scored.scores[1]) == pytest.approx(calibration.probability(math.log(0.9)))


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_calibrated_trees_stay_trees(seed):
    draw, calibration = random.Random(seed), Calibration()
    nodes = [(0, -1, 0, 0.0)]
    for node in range(1, 20):
        parent = draw.randrange(len(nodes))
        nodes.append((node, parent, nodes[parent][2] + 1, nodes[parent][3] - draw.random() * 4))
    tree = DraftTree(*zip(*nodes, strict=True))
    for _ in range(20):
        calibration.learn(tree, [draw.randrange(20) for _ in range(3)])
    scored = calibration.applied(tree)
    assert all(scored.scores[node] <= scored.scores[scored.parents[node]] for node in range(1, 20))
    for size in (0, 1, 5, 30):
        part = scored.first(size)
        assert len(part) == min(size, 19) + 1
        kept = {tuple(part.tokens[n] for n in part.path(node)) for node in range(1, len(part))}
        worst = min(part.scores)
        for node in range(1, 20):
            path = tuple(scored.tokens[n] for n in scored.path(node))
            assert path in kept or scored.scores[node] <= worst


def follow(measured, forward, rounds, sizes=(24,), depth=6, draft=0.006, rate=2.0):
    """Rounds as a pace would run them, of trees as large as `sizes` and the costs so far allow; their sizes."""
    seen = []
    for count in range(rounds):
        plain = measured.wants_plain(rate)
        nodes = 0 if plain else min(sizes[count % len(sizes)], measured.most_nodes)
        seen.append(nodes)
        measured.add(nodes, forward(nodes), 0 if plain else depth, 0.0 if plain else draft)
    return seen


def test_costs_are_found_within_the_rounds_of_a_short_call():
    measured = MeasuredCosts()
    seen = follow(measured, lambda nodes: 0.040 * (1.0 + (0.05 + 0.01 * nodes if nodes else 0.0)), 14)
    assert seen[:2] == [0, 0] and max(seen) == 24
    assert measured.costs.verifying(24) == pytest.approx(0.29, rel=0.1)
    assert measured.costs.drafting(6) == pytest.approx(0.15, rel=0.2)


def test_no_dear_tree_is_verified_unawares():
    """Where a node costs nearly half a forward, no round takes as long as 24 of them would."""
    sizes = []

    def seconds(size, depth):
        sizes.append(size)
        return 0.040 * (1.0 + 0.4 * size), 0.002 * depth

    time, tokens = run(CostPace(6, MeasuredCosts()), 32, right=0.0, drafted=0.4, seconds=seconds)
    assert max(sizes) <= 8 and time < 1.15 * 0.040 * tokens


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_coarse_clock_makes_nothing_fail(seconds):
    measured = MeasuredCosts()
    follow(measured, lambda nodes: seconds, 100, draft=seconds)
    assert 0 <= measured.costs.node < 100 and 0 <= measured.costs.depth < 100


OPTIONS = [
    {},
    {"ngram_length": 0},
    {"assistant_confidence_threshold": 0.3},
    {"beam_width": 1},
    {"beam_width": 1, "tree_size": 16, "ngram_length": 0},
    {"tree_size": 60},
    {"tree_size": 1},
    {"num_assistant_tokens": 1},
]


def measuring(target, **options):
    """A drafter whose costs are not given."""
    drafter = make_drafter(target)
    for name, value in {"node_cost": None, "depth_cost": None, **options}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.mark.parametrize(
    ("options", "calls", "tokens", "rows"),
    [
        *((options, 1, 40, 1) for options in OPTIONS),
        *((options, 1, 40, 3) for options in ({}, {"beam_width": 1})),
        ({"packed_weights": None}, 12, 10, 1),  # the round that packs, the first one otherwise, is not timed
    ],
    ids=str,
)
def test_costs_are_measured_whatever_the_options(prompt, options, calls, tokens, rows):
    target = make_target()
    drafter = measuring(target, **options)
    for _ in range(calls):
        target.generate(prompt.repeat(rows, 1), max_new_tokens=tokens, do_sample=False, assistant_model=drafter)
    [measured] = kept_with(target, "costs", dict).values()
    assert measured.plain > 0 and measured.widest > 0 and measured.costs != MeasuredCosts().costs


@pytest.mark.parametrize("do_sample", [False, True])
def test_measuring_changes_no_token(prompt, do_sample):
    """With costs unknown the first rounds try sizes; fresh targets start from nothing."""
    target = make_target()
    drafter = measuring(target)
    for _ in range(2):  # unknown, and known
        as_plain(target, drafter, prompt, max_new_tokens=20, do_sample=do_sample)


def test_given_costs_draft_the_same_in_every_run(target, prompt, monkeypatch):
    drafter = measuring(target, node_cost=0.01, depth_cost=0.02)
    call = {"max_new_tokens": 40, "assistant_model": drafter, "return_dict_in_generate": True}
    nodes = [target.generate(prompt, **call).statistics.drafted_nodes]
    monkeypatch.setattr(loop.time, "perf_counter", iter(range(10**6)).__next__)
    nodes.append(target.generate(prompt, **call).statistics.drafted_nodes)
    assert nodes[0] == nodes[1] and 0 in nodes[0]  # an untrained drafter is soon left alone


@pytest.mark.parametrize(
    ("node", "depth", "match"), [(0.1, None, "depth_cost"), (-1, 0.1, "node_cost"), (0.1, "x", "depth_cost")]
)
def test_costs_are_checked(target, prompt, node, depth, match):
    drafter = measuring(target, node_cost=node, depth_cost=depth)
    with pytest.raises(ValueError, match=match):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)


@pytest.mark.parametrize("seed", range(20))
def test_what_disturbs_rounds_is_not_taken_for_the_cost_of_a_tree(seed):
    """Times up to a fifth too long, those of large trees more than of others."""
    draw, measured = random.Random(seed), MeasuredCosts()

    def forward(nodes):
        late = 0.2 * draw.random() + (0.1 if nodes > 12 else 0.0)
        return 0.040 * (1.0 + 0.024 * nodes) * (1.0 + late)

    follow(measured, forward, 40, sizes=(24, 6, 12))
    costs = measured.costs
    assert costs.tree < 0.1 and 0.015 < costs.node < 0.037


@pytest.mark.parametrize("tree", [0.0, 0.1, 0.25])
def test_costs_are_found_of_trees_of_any_size(tree):
    """N-grams propose now many nodes, now few."""
    for seed in range(6):
        draw, measured = random.Random(seed), MeasuredCosts()
        sizes = [draw.choice([1, 2, 4, 8, 16, 24]) for _ in range(97)]
        follow(measured, lambda nodes: 0.040 * (1.0 + (tree + 0.01 * nodes if nodes else 0.0)), 200, sizes)
        assert measured.costs.verifying(24) == pytest.approx(tree + 0.24, rel=0.1)
        assert measured.costs.verifying(4) == pytest.approx(tree + 0.04, abs=0.06)


@pytest.mark.parametrize("tree_size", [1, 2, 3])
def test_costs_of_small_trees(tree_size):
    measured = MeasuredCosts()
    follow(measured, lambda nodes: 0.040 * (1.0 + 0.02 * nodes), 60, sizes=(tree_size,))
    assert measured.costs.verifying(tree_size) == pytest.approx(0.02 * tree_size, abs=0.02)


def found(plain=0.040, tree=0.02, node=0.01, depth=0.03) -> MeasuredCosts:
    """Costs after rounds in which everything took as long as it is said here."""
    measured = MeasuredCosts()
    forward = lambda nodes: plain * (1.0 + (tree + node * nodes if nodes else 0.0))  # noqa: E731
    follow(measured, forward, 120, sizes=(24, 8), draft=6 * depth * plain)
    return measured


def test_costs_become_what_later_rounds_take():
    """In a batch, in a longer text, beside another job: nodes and drafts may cost more, or less, than in the trial."""
    for node, depth in ((0.05, 0.03), (0.01, 0.09), (0.004, 0.015)):
        measured = found()
        for nodes in [8, 12, 3, 20] * 30:
            measured.add(nodes, 0.040 * (1.02 + node * nodes), 4, 0.040 * 4 * depth)
        assert measured.costs.verifying(10) == pytest.approx(0.02 + 10 * node, rel=0.15)
        assert measured.costs.drafting(4) == pytest.approx(4 * depth, rel=0.15)


def test_one_late_round_is_no_new_cost():
    measured = found()
    before = measured.costs
    measured.add(8, 2.0, 4, 1.0)
    after = measured.costs
    assert after.verifying(8) < before.verifying(8) + 0.06 and after.drafting(4) < before.drafting(4) + 0.2


def test_costs_stay_where_a_longer_text_makes_every_round_longer():
    """What a plain round takes is looked at again where drafting hardly pays."""
    measured, plain = found(), 0.040
    for count in range(4000):
        plain = 0.040 + 0.040 * count / 4000
        nodes = 0 if measured.wants_plain(rate=1.1) else 8
        measured.add(nodes, plain * (1.0 + (0.02 + 0.01 * nodes if nodes else 0.0)), 0, 0.0)
    assert measured.costs.verifying(8) == pytest.approx(0.1, abs=0.03)
    measured.add(8, plain, 0, 0.0)
    assert not measured.wants_plain(rate=2.0)


@pytest.mark.parametrize("right", [0.2, 0.4])
def test_nothing_is_drafted_once_rounds_take_longer_than_they_earn(right):
    """A trial found drafts and nodes cheap, and then they are dear: not slower than without a drafter for long."""
    dear = lambda size, depth: (0.040 * (1.0 + 0.1 * size), 0.040 * 0.15 * depth)  # noqa: E731
    time, tokens = run(CostPace(6, found()), 600, right, right, dear)
    assert tokens * 0.040 / time > 0.96


def test_what_drafting_loses_is_bounded_where_expectations_stay_wrong():
    """All drafted tokens are right in the rows that decide, and yet the batch gains nothing by them."""
    pace, lost = CostPace(4, Costs(0.1, 0.1, 0.1, 0.05)), []
    for _ in range(400):
        depth = pace.plan()
        size = fitted_size(pace, [chain(*[0.9] * depth)], depth)
        pace.learn({0: ()}, size, 1.0 + size, 1.0, depth, 0.0, None)
        lost.append(pace.costs.verifying(size) + pace.costs.drafting(depth))
    assert max(lost) > 0.3 and sum(lost) < 0.05 * len(lost)
    assert sum(lost[200:]) < 0.03 * 200


def kind(name, depth, tree_size, **fields) -> KindOfCall:
    return KindOfCall((name,), (), depth, tree_size, **fields)


def test_rows_that_have_ended_make_nodes_cheaper():
    target, drafter = make_target(), Drafter()
    whole = pacing.pace_for(target, drafter, kind("whole", 2, 4, rows=4), None)
    follow(whole.measured, lambda nodes: 0.040 * (1.0 + 0.08 * nodes), 40, sizes=(4,), depth=2, draft=0.004)
    left = pacing.pace_for(target, drafter, kind("part", 4, 8, rows=2), None, whole, share=0.5)
    assert left.costs.node == pytest.approx(whole.costs.node / 2)
    assert left.costs.depth == pytest.approx(whole.costs.depth)
    assert left.plan() == 0 and fitted_size(left, [chain(0.9)]) == 0  # the first round says what a plain one takes now
    left.learn({}, 0, 1.0, 1.0, 0, 0.0, 0.030)
    assert left.measured.plain == 0.030
    again = pacing.pace_for(target, drafter, kind("part", 4, 8, rows=2), None, whole, share=0.5)
    assert again.measured is left.measured
    given = pacing.pace_for(target, drafter, kind("part", 4, 8, rows=2), COSTS, whole, share=0.5)
    assert given.costs == COSTS and given.measured is None


class Drafter:
    """What habits are kept of."""


def test_a_text_begins_with_what_the_last_one_taught():
    target, drafter, a_kind = make_target(), Drafter(), kind("any", 6, 24)
    first = pacing.pace_for(target, drafter, a_kind, None)
    assert first.habits == Habits.assumed(6)
    run(first, 60, right=0.9, drafted=0.6)
    second = pacing.pace_for(target, drafter, a_kind, None)
    assert second.habits is not first.habits, "what comes of one text does not change another that runs beside it"
    assert second.habits.calibration.probability(math.log(0.6)) > 0.65 > Calibration().probability(math.log(0.6))
    assert sum(second.habits.gains) > sum(Habits.assumed(6).gains)
    run(second, 60, right=0.1, drafted=0.6)  # and yet it soon goes by its own
    assert second.habits.calibration.probability(math.log(0.6)) < 0.5
    stranger = pacing.pace_for(target, Drafter(), a_kind, None)
    assert stranger.habits == Habits.assumed(6)


def test_nothing_is_kept_where_costs_are_given():
    target, drafter = make_target(), Drafter()
    run(pacing.pace_for(target, drafter, kind("any", 6, 24), COSTS), 60, right=0.9)
    assert pacing.pace_for(target, drafter, kind("any", 6, 24), COSTS).habits == Habits.assumed(6)
