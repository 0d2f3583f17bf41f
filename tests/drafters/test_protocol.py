"""The seam of drafting: a family is a drafter and a session, and the engine knows no more of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, as_plain, make_target
from transformers import GenerationConfig

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.draft_options import default_options
from hf_hsdraft.drafters.base.protocol import Ask, Call, Drafter, Session
from hf_hsdraft.runtime.target_runtime import TargetRuntime
from hf_hsdraft.verify.registry import VERIFIERS
from hf_hsdraft.verify.verdict import OwnChoice, Verdict, Verifier

NEW = 12


class ListDrafter(Drafter):
    """Guesses from a fixed list of texts: whatever follows the last token there."""

    num_draft_steps = 8

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.generation_config = self.default_generation_config()
        self.generation_config.ngram_length = 0
        self.config = type("Config", (), {"is_encoder_decoder": False})()

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.num_draft_steps, tree_size=24, beam_width=8)

    def session(self, call: Call) -> Session:
        return ListSession(self.texts)


class ListSession(Session):
    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def draft(self, asks: list[Ask]) -> list[DraftTree]:
        return [self.tree(ask) for ask in asks]

    def tree(self, ask: Ask) -> DraftTree:
        nodes, place = [(ask.root, -1, 0, 0.0)], {}
        for text in self.texts:
            for start in (index + 1 for index, token in enumerate(text) if token == ask.root):
                tip = 0
                for depth, token in enumerate(text[start : start + ask.depth], 1):
                    if (tip, token) not in place:
                        if len(nodes) > ask.size or (ask.chain and any(parent == tip for parent, _ in place)):
                            break
                        place[tip, token] = len(nodes)
                        nodes.append((token, tip, depth, -0.1 * depth))
                    tip = place[tip, token]
        return DraftTree(*zip(*nodes, strict=True))


@pytest.fixture(scope="module")
def target():
    return make_target(seed=3)


def texts_of(target, ids, **kwargs):
    return target.generate(ids, max_new_tokens=NEW, **kwargs)


@pytest.mark.parametrize(("rows", "do_sample"), [(1, False), (1, True), (3, False)])
@pytest.mark.parametrize("sizing", ["cost", "fixed"])
def test_a_family_of_one_file_decodes_exactly(target, rows, do_sample, sizing):
    ids = torch.randint(5, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(rows))
    drafter = ListDrafter(texts_of(target, ids, do_sample=False)[:, 8:].tolist())
    drafter.generation_config.tree_sizing = sizing
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.01  # measured ones may forbid drafts
    output = as_plain(target, drafter, ids, seed=5, max_new_tokens=NEW, do_sample=do_sample)
    assert sum(output.statistics.drafted_nodes) > 0
    if not do_sample and sizing == "fixed":
        assert output.statistics.tau > 2


class WrongSession(ListSession):
    """Gives each text what a function makes of its ask."""

    def __init__(self, made_of) -> None:
        self.made_of = made_of

    def draft(self, asks: list[Ask]) -> list[DraftTree]:
        return self.made_of(asks)


def each(tree_of):
    return lambda asks: [tree_of(ask) for ask in asks]


def path(ask: Ask, length: int, **changes) -> DraftTree:
    nodes = range(length + 1)
    tree = DraftTree((ask.root, *range(5, 5 + length)), tuple(range(-1, length)), tuple(nodes), (0.0,) * len(nodes))
    return replace(tree, **changes)


def star(ask: Ask, length: int) -> DraftTree:
    return path(ask, length, parents=(-1,) + (0,) * length, depths=(0,) + (1,) * length)


WRONG = {
    "none": (lambda asks: None, "NoneType"),
    "missing tree": (lambda asks: [], "0: expected a list with 1 trees"),
    "no tree": (each(lambda ask: None), "got NoneType, expected a DraftTree"),
    "root": (each(lambda ask: path(replace(ask, root=ask.root + 1), 1)), "ask.root="),
    "deep": (each(lambda ask: path(ask, ask.depth + 1)), "ask.depth="),
    "large": (each(lambda ask: star(ask, ask.size + 1)), "ask.size="),
    "late parent": (each(lambda ask: path(ask, 2, parents=(-1, 2, 0))), "node 1 has parent 2"),
    "no parent": (each(lambda ask: path(ask, 2, parents=(-1, 0, -1))), "node 2 has parent -1"),
    "depths": (each(lambda ask: path(ask, 2, depths=(0, 1, 1))), "node 2 has depth 1, its parent 1"),
    "root's depth": (each(lambda ask: path(ask, 1, depths=(1, 2))), "the root has parent -1, depth 1"),
    "token": (each(lambda ask: path(ask, 1, tokens=(ask.root, VOCAB))), f"token {VOCAB}: the target's vocabulary"),
    "negative": (each(lambda ask: path(ask, 1, tokens=(ask.root, -1))), "token -1"),
    "siblings": (each(lambda ask: replace(star(ask, 2), tokens=(ask.root, 7, 7))), "the same parent 0"),
    "scores": (each(lambda ask: path(ask, 1, scores=(0.0,))), "2 tokens have 2 parents, 2 depths, 1 scores"),
    "score of a step": (
        each(lambda ask: path(ask, 2, scores=(0.0, -2.0, -0.1))),
        "node 2 has score -0.1, its parent -2.0",
    ),
    "no number": (each(lambda ask: path(ask, 1, scores=(0.0, float("nan")))), "node 1 has score nan, its parent 0.0"),
    "likelier than certain": (each(lambda ask: path(ask, 1, scores=(0.0, 0.5))), "node 1 has score 0.5"),
    "root's score": (each(lambda ask: path(ask, 1, scores=(-1.0, -1.0))), "depth 0 and score -1.0"),
    "branches": (each(lambda ask: star(ask, 2)), "ask.width=1"),
}


@pytest.mark.parametrize("free", [False, True], ids=["paced", "free"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_tree_that_was_not_asked_for_is_an_error_that_names_the_session(target, wrong, free, monkeypatch):
    """A wrong depth would be a wrong position: the text would change without a word."""
    made_of, message = WRONG[wrong]
    session = WrongSession(made_of)
    session.free = free
    drafter = ListDrafter([])
    drafter.generation_config.tree_sizing = "fixed"
    if wrong == "branches":
        drafter.generation_config.beam_width = 1
    monkeypatch.setattr(drafter, "session", lambda call: session)
    with pytest.raises(ValueError, match=rf"WrongSession\.draft returned .*{message}"):
        texts_of(target, torch.arange(5, 12)[None], do_sample=False, assistant_model=drafter)


@pytest.mark.parametrize("drafter", [ListDrafter([]), CachebackDrafter()], ids=["list", "cacheback"])
@pytest.mark.parametrize("verification", ["walk", "rejection"])
def test_a_drafter_that_draws_no_nodes_takes_no_builder_that_draws(target, drafter, verification, monkeypatch):
    options = drafter.generation_config
    monkeypatch.setattr(options, "tree_builder", "gumbel")
    monkeypatch.setattr(options, "verification", verification)
    monkeypatch.setattr(TargetRuntime, "prefill", None)  # refused before any work
    with pytest.raises(ValueError, match=r"tree_builder='gumbel' is invalid.*expected tree_builder='beam'"):
        texts_of(target, torch.arange(5, 12)[None], do_sample=True, assistant_model=drafter)


class WatchingVerifier(OwnChoice):
    """Notes the hidden states that it gets."""

    taps = (1,)

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def judge(self, tree, nodes):
        verdict = super().judge(tree, nodes)
        self.seen.append(nodes.taps[[0, *verdict.path]])
        return verdict


class WatchingDrafter(ListDrafter):
    taps = (0, 2)

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(texts)
        self.rule = WatchingVerifier()

    def verifier(self, options):
        return self.rule


def test_a_verifier_reads_its_own_hidden_states(target):
    """They are those of one forward over the whole text, at each place whose next token was chosen."""
    ids = torch.arange(5, 14)[None]
    drafter = WatchingDrafter([texts_of(target, ids, do_sample=False)[0, 8:].tolist()])
    drafter.generation_config.tree_sizing = "fixed"
    text = texts_of(target, ids, do_sample=False, assistant_model=drafter)
    expected = target(text, output_hidden_states=True).hidden_states[1][0, 8:-1]
    seen = torch.cat(drafter.rule.seen)[: len(expected)]
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-5)


def test_a_verifier_that_says_nothing_is_lossy_and_takes_any_tree(target, monkeypatch):
    class Taking(Verifier):
        def judge(self, tree, nodes):
            return OwnChoice().judge(tree, nodes)

    monkeypatch.setitem(VERIFIERS, "taking", Taking())
    drafter, ids = ListDrafter([]), torch.arange(5, 14)[None]
    drafter.generation_config.verification = "taking"
    assert not as_plain(target, drafter, ids, max_new_tokens=NEW).statistics.exact


def test_a_rule_that_reads_logits_alone_leaves_scores_and_logits_complete(target, monkeypatch):
    class Greedy(Verifier):
        def judge(self, tree, nodes):
            best, children, path, tokens = nodes.logits.argmax(-1).tolist(), tree.children(), [], []
            while True:
                node = path[-1] if path else 0
                tokens.append(best[node])
                child = children[node].get(best[node])
                if nodes.ends(path, tokens) or child is None:
                    return Verdict(path, tokens[-1], False, len(path))
                path = [*path, child]

    monkeypatch.setitem(VERIFIERS, "greedy", Greedy())
    ids, wanted = torch.arange(5, 14)[None], {"output_scores": True, "output_logits": True, "do_sample": False}
    plain = target.generate(ids, max_new_tokens=12, return_dict_in_generate=True, **wanted)
    drafter = ListDrafter([plain.sequences[0].tolist()])
    drafter.generation_config.verification = "greedy"
    output = target.generate(ids, max_new_tokens=12, assistant_model=drafter, return_dict_in_generate=True, **wanted)
    assert sum(output.statistics.accepted_lengths) > 0 and len(output.scores) == len(output.logits) == 12
    for name in ("scores", "logits"):
        for step, expected in zip(getattr(output, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(step, expected)


def test_a_class_in_a_drafters_place_is_an_error_that_says_so(target):
    with pytest.raises(ValueError, match=r"CachebackDrafter is a class.*CachebackDrafter\(\)"):
        texts_of(target, torch.arange(5, 12)[None], assistant_model=CachebackDrafter)


@pytest.mark.parametrize("free", [False, True], ids=["paced", "free"])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_session_is_asked_for_no_more_than_the_options_depth(target, free, rows, monkeypatch):
    asked = []
    session = WrongSession(lambda asks: asked.extend(asks) or [path(ask, min(ask.depth, ask.size)) for ask in asks])
    session.free = free
    drafter, ids = ListDrafter([]), torch.arange(5, 14).expand(rows, -1)
    drafter.generation_config.tree_sizing, drafter.generation_config.num_assistant_tokens = "fixed", 2
    monkeypatch.setattr(drafter, "session", lambda call: session)
    as_plain(target, drafter, ids, max_new_tokens=NEW)
    assert max(ask.depth for ask in asked) == 2


def test_a_drafter_without_files_says_so(tmp_path):
    with pytest.raises(ValueError, match="a ListDrafter cannot be saved: it has no files of its own; make it again"):
        ListDrafter([]).save_pretrained(tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()
