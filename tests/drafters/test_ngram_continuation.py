"""N-grams that go on from the end of what a drafter drafted: how, and that the text stays the target's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import each_with_its_seed, make_drafter, make_target

from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.drafters.ngrams.ngram_cache import NgramCache
from hf_hsdraft.drafters.ngrams.ngram_session import NgramSession
from hf_hsdraft.methods.lossy.fly import FLy
from hf_hsdraft.verify.verdict import Nodes

# Node 2 is the most probable of the root's children, node 3 is its only child.
TREE = DraftTree((9, 4, 1, 2, 5), (-1, 0, 0, 2, 1), (0, 1, 1, 2, 2), (0.0, -1.0, -0.5, -2.0, -3.0))


def session_of(target, text: list[int], **options) -> NgramSession:
    drafter = make_drafter(target)
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    session = NgramSession(Call(target, 1, DraftOptions.of(drafter)))
    nothing = torch.zeros(0)
    session.observe([Accepted(0, text, nothing, nothing.long(), nothing.long())])
    return session


def test_a_path_goes_on_as_a_chain_of_ngrams_would():
    cache = NgramCache(2)
    cache.extend([1, 2, 3, 4] * 10)
    chain = cache.draft(6, 6, width=1)
    following = cache.follow([1, 2], 4)
    assert [token for token, _ in following] == [3, 4, 1, 2] == list(chain.tokens[3:])
    steps = [chain.scores[node] - chain.scores[node - 1] for node in range(3, 7)]
    assert [math.log(probability) for _, probability in following] == pytest.approx(steps)
    assert cache.follow([1, 7], 4) == [] and len(cache.follow([1], 2)) == 2


def test_the_most_probable_path_goes_on_and_least_probable_nodes_give_way(target):
    session = session_of(target, [1, 2, 3, 4, 1, 2, 3, 4, 9], ngram_length=2, ngram_continuation=3)
    longer = session.continued(TREE, Ask(0, 9, depth=9, size=16))
    assert longer.fault() == "" and longer.tokens == (*TREE.tokens, 3, 4, 9)
    assert [longer.tokens[node] for node in longer.path(len(longer) - 1)] == [1, 2, 3, 4, 9]
    full = session.continued(TREE, Ask(0, 9, depth=9, size=6))
    assert full.fault() == "" and full.tokens == (9, 4, 1, 2, 3, 4, 9)  # without the node of token 5
    assert session.continued(TREE, Ask(0, 9, depth=3, size=16)).depths[-1] == 3
    one = session.continued(TREE, Ask(0, 9, depth=3, size=4))
    assert one.tokens == (9, 4, 1, 2, 3), "for one further node one gives way, not as many as could have come"
    least = session.continued(TREE, Ask(0, 9, depth=9, size=2))
    assert least.fault() == "" and least.tokens == (9, 1, 2), "the path gives way with its end"
    for tree, root in ((DraftTree.root(9), 9), (TREE, 8)):  # nothing is to be drafted; n-grams of another text
        assert session.continued(tree, Ask(0, root, depth=9, size=16)) is tree


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("sizing", ["cost", "fixed"])
def test_texts_stay_the_targets_own(target, width, do_sample, sizing, monkeypatch):
    ids = torch.tensor([[0, 0, 5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8, 9, 8]])
    mask, drafter, grown = (ids > 0).long(), make_drafter(target), []
    options = drafter.generation_config
    options.beam_width, options.tree_sizing, options.ngram_length, options.ngram_continuation = width, sizing, 1, 6
    continued = NgramSession.continued

    def noted(self, tree, ask):
        longer = continued(self, tree, ask)
        grown.append(max(longer.depths) - max(tree.depths))
        assert len(longer) - 1 <= ask.size
        return longer

    monkeypatch.setattr(NgramSession, "continued", noted)
    for rows in (slice(0, 1), slice(0, 2)):
        call = {"attention_mask": mask[rows], "max_new_tokens": 24, "do_sample": do_sample}
        torch.manual_seed(0)
        expected = target.generate(ids[rows], **call)
        torch.manual_seed(0)
        found = target.generate(ids[rows], **call, assistant_model=drafter)
        if do_sample and rows.stop > 1:
            del call["attention_mask"]
            expected = each_with_its_seed(target, ids, mask, seed=0, **call)
        assert found.tolist() == expected.tolist()
    assert max(grown) > 0


def test_a_text_that_repeats_itself_is_accepted_beyond_the_drafters_depth(monkeypatch):
    target, prompt = make_target(initializer_range=0.02), torch.tensor([[5, 6, 7, 8]])  # its text soon goes in circles
    plain = target.generate(prompt, max_new_tokens=60, do_sample=False)
    drafter, longest = make_drafter(target), {}
    options = drafter.generation_config
    options.tree_sizing, options.num_assistant_tokens = "fixed", 1
    draft = NgramSession.draft  # whose trees are deep by themselves; here only their first tokens are drafted
    monkeypatch.setattr(NgramSession, "draft", lambda self, asks: draft(self, [replace(ask, depth=1) for ask in asks]))
    for options.ngram_continuation in (0, 8):
        output = target.generate(
            prompt, max_new_tokens=60, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        assert output.sequences.tolist() == plain.tolist()
        longest[options.ngram_continuation] = max(output.statistics.accepted_lengths)
    assert longest[0] <= 1 < longest[8]


def test_a_window_beyond_the_drafters_depth_is_filled(target):
    """FLy forgives a mismatch only if the whole window after it was drafted."""
    session = session_of(target, [1, 2, 3, 4, 1, 2, 3, 4, 9], ngram_length=2, ngram_continuation=3)
    chain = DraftTree((9, 1, 2), (-1, 0, 1), (0, 1, 2), (0.0, -0.5, -1.0))
    longer = session.continued(chain, Ask(0, 9, depth=9, size=16))
    rule = FLy().with_options({"fly_entropy": 0.3, "fly_window": 3, "fly_most_probable": 0})
    lengths = []
    for tree in (chain, longer):
        logits = torch.zeros(len(tree), 12)
        for node in range(len(tree)):  # the target chooses what follows, but another token at first
            logits[node, 7 if node == 0 else (*tree.tokens, 6)[node + 1]] = 0.1
        nodes = Nodes(logits, lambda node, tokens, scores=logits: scores[node : node + 1], lambda *_: False)
        lengths.append(len(rule.judge(tree, nodes).path))
    assert lengths == [0, 5]


def test_values_are_checked(target, prompt):
    drafter = make_drafter(target)
    assert DraftOptions.of(drafter).ngram_continuation == 0
    for value in (-1, 25, 2.5):
        drafter.generation_config.ngram_continuation = value
        with pytest.raises(ValueError, match="ngram_continuation"):
            target.generate(prompt, max_new_tokens=4, assistant_model=drafter)
    drafter.generation_config.ngram_continuation, drafter.generation_config.ngram_length = 4, 0
    with pytest.raises(ValueError, match="without n-grams there is nothing to append"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)
