"""Options that a family of drafters, or a rule of verification, declares for itself in its own file."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from conftest import as_plain, make_drafter, make_target
from test_protocol import ListDrafter, ListSession

from hf_hsdraft import HSDrafter
from hf_hsdraft.core.checks import Limit
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.core.kept import kept_with
from hf_hsdraft.core.options import Option
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.verify.registry import VERIFIERS
from hf_hsdraft.verify.verdict import OwnChoice

CALL = {"max_new_tokens": 16, "do_sample": False}
SHARE = Limit(lambda value: isinstance(value, float) and 0 <= value <= 1, "a number from 0 to 1")
BONUS = Option("list_bonus", 0.5, SHARE)


class BonusDrafter(ListDrafter):
    own_options = (BONUS,)

    def session(self, call):
        self.seen = call.options.own
        return ListSession(self.texts)


@pytest.fixture(scope="module")
def target():
    return make_target(seed=3)


@pytest.fixture
def drafter(target, prompt):
    drafter = BonusDrafter([target.generate(prompt, **CALL)[0].tolist()])
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
    return drafter


def test_values_reach_the_session_of_the_family(target, drafter, prompt):
    for given, seen in ((None, 0.5), (0.25, 0.25)):
        if given is not None:
            drafter.generation_config.list_bonus = given
        as_plain(target, drafter, prompt, **CALL)
        assert drafter.seen["list_bonus"] == seen


def test_wrong_values_and_names_are_told(target, drafter, prompt):
    drafter.generation_config.list_bonus = 2.0
    with pytest.raises(ValueError, match=r"list_bonus=2\.0 is invalid: expected a number from 0 to 1"):
        target.generate(prompt, **CALL, assistant_model=drafter)
    del drafter.generation_config.list_bonus
    drafter.generation_config.list_bonsu = 0.1
    with pytest.raises(ValueError, match=r"list_bonsu .*: list_bonus is one"):
        target.generate(prompt, **CALL, assistant_model=drafter)


def test_an_option_cannot_take_a_name_that_means_something_else(drafter):
    for taken in ("tree_size", "temperature", "exact"):
        drafter.own_options = (Option(taken, 1),)
        with pytest.raises(ValueError, match=f"{taken} means something else"):
            DraftOptions.of(drafter)
    drafter.own_options = (Option("same", 1), Option("same", 2))
    with pytest.raises(ValueError, match="same means something else"):
        DraftOptions.of(drafter)


@pytest.mark.parametrize(
    ("builder", "sizing"), [("beam", "cost"), ("p_best", "fixed"), ("gumbel", "fixed"), ("stochastic_beam", "fixed")]
)
def test_sizes_by_cost_are_those_of_beams_only(target, builder, sizing):
    drafter = make_drafter(target)
    drafter.generation_config.tree_builder = builder
    assert drafter.generation_config.tree_sizing == "cost" and DraftOptions.of(drafter).tree_sizing == sizing


def test_reuse_belongs_to_the_hidden_state_family(target, drafter):
    assert {"reuse", "reuse_weight"} <= {option.name for option in HSDrafter.own_options}
    reuse = {"reuse": "none", "reuse_weight": 0.4}
    assert reuse.items() <= DraftOptions.of(make_drafter(target)).own.items()
    own = DraftOptions.of(drafter).own
    assert own["list_bonus"] == 0.5 and not reuse.keys() & own.keys()


def test_names_that_mean_nothing_are_told_with_the_nearest_option(target, drafter, prompt, monkeypatch):
    warned = []
    monkeypatch.setattr("hf_hsdraft.drafters.base.draft_options.logger.warning_once", warned.append)
    drafter.generation_config.max_nodes = drafter.generation_config.tree_width = 8
    as_plain(target, drafter, prompt, **CALL)
    assert "max_nodes, tree_width (the nearest option is beam_width)" in warned[0]  # none is near to max_nodes
    assert f"mean nothing to a {type(drafter).__name__}" in warned[0]


class Careful(OwnChoice):
    """Accepts no path deeper than its option says."""

    own_options = (Option("careful_depth", 1, Limit(lambda value: value in (0, 1, 2), "0, 1 or 2")),)

    def judge(self, tree: DraftTree, nodes):
        return super().judge(tree, nodes).cut(tree, self.careful_depth)


def test_a_rule_of_verification_has_options_too(target, drafter, prompt, monkeypatch, tmp_path):
    monkeypatch.setitem(VERIFIERS, "careful", Careful())
    options = drafter.generation_config
    options.verification, options.tree_sizing = "careful", "fixed"
    deepest = {}
    for depth in (None, 0, 2):
        if depth is not None:
            options.careful_depth = depth
        deepest[depth] = max(as_plain(target, drafter, prompt, **CALL).statistics.accepted_lengths)
    assert deepest[0] < deepest[None] < deepest[2]
    options.careful_depth = 7
    with pytest.raises(ValueError, match="careful_depth=7 is invalid: expected 0, 1 or 2"):
        target.generate(prompt, **CALL, assistant_model=drafter)
    saved = make_drafter(target)
    saved.generation_config.careful_depth = 2
    saved.save_pretrained(tmp_path)
    loaded = HSDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.careful_depth == 2 and DraftOptions.of(loaded).own["careful_depth"] == 2
    saved.generation_config.careful_depth = 3
    with pytest.raises(ValueError, match="careful_depth=3"):
        saved.save_pretrained(tmp_path)


def test_rules_may_share_an_option_but_not_its_name(drafter, monkeypatch):
    class MoreCareful(Careful):
        pass

    class Other(OwnChoice):
        own_options = (Option("careful_depth", 5),)

    monkeypatch.setitem(VERIFIERS, "careful", Careful())
    monkeypatch.setitem(VERIFIERS, "more_careful", MoreCareful())
    assert DraftOptions.of(drafter).own["careful_depth"] == 1
    monkeypatch.setitem(VERIFIERS, "other", Other())
    with pytest.raises(ValueError, match="careful_depth means something else"):
        DraftOptions.of(drafter)


@pytest.mark.parametrize("change", [{"reuse": "resample"}, {"assistant_confidence_threshold": 0.2}], ids=str)
def test_what_is_learnt_with_one_setting_is_not_used_with_another(target, prompt, change):
    drafter, habits = make_drafter(target), lambda: len(kept_with(drafter, "habits", dict))
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = None  # so that they are measured
    target.generate(prompt, **CALL, assistant_model=drafter)
    costs, before = set(kept_with(target, "costs", dict)), habits()
    target.generate(prompt, **CALL, assistant_model=drafter)
    assert (set(kept_with(target, "costs", dict)), habits()) == (costs, before)
    for name, value in change.items():
        setattr(drafter.generation_config, name, value)
    target.generate(prompt, **CALL, assistant_model=drafter)
    assert habits() == 2 * before
    assert (set(kept_with(target, "costs", dict)) > costs) == ("reuse" in change)  # a threshold changes no cost


def test_options_given_to_generate_say_where_they_lie(target, drafter, prompt):
    for name in ("tree_size", "reuse", "list_bonus"):
        with pytest.raises(ValueError, match=rf"not used by the model.*{name}.*drafter\.generation_config\.{name}"):
            target.generate(prompt, **CALL, assistant_model=drafter, **{name: 16})
    with pytest.raises(ValueError, match="not used by the model") as error:
        target.generate(prompt, **CALL, unknown=16)
    assert "drafter" not in str(error.value)


@dataclass
class DataDrafter(ListDrafter):
    texts: list[list[int]]

    def __post_init__(self):
        ListDrafter.__init__(self, self.texts)


def test_a_drafter_may_be_a_dataclass(target, prompt):
    plain = target.generate(prompt, **CALL)
    one, other = (DataDrafter([plain[0].tolist()]) for _ in range(2))
    for drafter in (one, other):
        as_plain(target, drafter, prompt, **CALL)
    assert kept_with(one, "habits", dict) and kept_with(other, "habits", dict)
    assert hash(one) != hash(other)
