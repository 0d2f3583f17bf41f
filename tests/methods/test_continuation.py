"""N-grams that continue the most probable drafted path."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import as_plain, make_drafter, make_target
from test_ngrams import CHAIN, FIXED, check_repeating

from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Ask
from hf_hsdraft.drafters.lookup.ngrams import NgramCache, NgramSession
from hf_hsdraft.methods.lossy import continuation
from hf_hsdraft.methods.lossy.continuation import continued, followed
from hf_hsdraft.methods.lossy.relaxed import FLy
from hf_hsdraft.verify.verdict import Nodes

# Node 2 is the most probable of the root's children, node 3 is its only child.
TREE = DraftTree((9, 4, 1, 2, 5), (-1, 0, 0, 2, 1), (0, 1, 1, 2, 2), (0.0, -1.0, -0.5, -2.0, -3.0))


def ngrams_of(text: list[int]) -> NgramCache:
    cache = NgramCache(2)
    cache.extend(text)
    return cache


def test_a_path_goes_on_as_a_chain_of_ngrams_would():
    cache = NgramCache(2)
    cache.extend([1, 2, 3, 4] * 10)
    chain = cache.draft(6, 6, width=1)
    following = followed(cache, [1, 2], 4)
    assert [token for token, _ in following] == [3, 4, 1, 2] == list(chain.tokens[3:])
    steps = [chain.scores[node] - chain.scores[node - 1] for node in range(3, 7)]
    assert [math.log(probability) for _, probability in following] == pytest.approx(steps)
    assert followed(cache, [1, 7], 4) == [] and len(followed(cache, [1], 2)) == 2


def test_the_most_probable_path_goes_on_and_least_probable_nodes_give_way():
    ngrams = ngrams_of([1, 2, 3, 4, 1, 2, 3, 4, 9])
    longer = continued(ngrams, 3, TREE, Ask(0, 9, depth=9, size=16))
    assert longer.fault() == "" and longer.tokens == (*TREE.tokens, 3, 4, 9)
    assert [longer.tokens[node] for node in longer.path(len(longer) - 1)] == [1, 2, 3, 4, 9]
    full = continued(ngrams, 3, TREE, Ask(0, 9, depth=9, size=6))
    assert full.fault() == "" and full.tokens == (9, 4, 1, 2, 3, 4, 9)  # without the node of token 5
    assert continued(ngrams, 3, TREE, Ask(0, 9, depth=3, size=16)).depths[-1] == 3
    one = continued(ngrams, 3, TREE, Ask(0, 9, depth=3, size=4))
    assert one.tokens == (9, 4, 1, 2, 3), "for one further node one gives way, not as many as could have come"
    least = continued(ngrams, 3, TREE, Ask(0, 9, depth=9, size=2))
    assert least.fault() == "" and least.tokens == (9, 1, 2), "the path gives way with its end"
    for tree, root in ((DraftTree.root(9), 9), (TREE, 8)):  # nothing is to be drafted; n-grams of another text
        assert continued(ngrams, 3, tree, Ask(0, root, depth=9, size=16)) is tree


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("options", [{}, CHAIN, FIXED, FIXED | CHAIN], ids=["", "chains", "fixed", "fixed chains"])
def test_texts_stay_the_targets_own(target, options, do_sample, monkeypatch):
    drafter, grown = make_drafter(target), []
    vars(drafter.generation_config).update(options, ngram_length=1, ngram_continuation=6)

    def noted(ngrams, most, tree, ask):
        longer = continued(ngrams, most, tree, ask)
        grown.append(max(longer.depths) - max(tree.depths))
        assert len(longer) - 1 <= ask.size
        return longer

    monkeypatch.setattr(continuation, "continued", noted)
    check_repeating(target, drafter, do_sample, 24)
    assert max(grown) > 0


def test_a_text_that_repeats_itself_is_accepted_beyond_the_drafters_depth(monkeypatch):
    target, prompt = make_target(initializer_range=0.02), torch.tensor([[5, 6, 7, 8]])  # its text soon goes in circles
    drafter, longest = make_drafter(target), {}
    options = drafter.generation_config
    options.tree_sizing, options.num_assistant_tokens = "fixed", 1
    draft = NgramSession.draft  # whose trees are deep by themselves; here only their first tokens are drafted
    monkeypatch.setattr(NgramSession, "draft", lambda self, asks: draft(self, [replace(ask, depth=1) for ask in asks]))
    for options.ngram_continuation in (0, 8):
        output = as_plain(target, drafter, prompt, max_new_tokens=30)
        longest[options.ngram_continuation] = max(output.statistics.accepted_lengths)
    assert longest[0] <= 1 < longest[8]


def test_a_window_beyond_the_drafters_depth_is_filled():
    """FLy forgives a mismatch only if the whole window after it was drafted."""
    ngrams = ngrams_of([1, 2, 3, 4, 1, 2, 3, 4, 9])
    chain = DraftTree((9, 1, 2), (-1, 0, 1), (0, 1, 2), (0.0, -0.5, -1.0))
    longer = continued(ngrams, 3, chain, Ask(0, 9, depth=9, size=16))
    rule = FLy().with_options({"fly_entropy": 0.3, "fly_window": 3, "fly_most_probable": 0})
    lengths = []
    for tree in (chain, longer):
        logits = torch.zeros(len(tree), 12)
        for node in range(len(tree)):  # the target chooses what follows, but another token at first
            logits[node, 7 if node == 0 else (*tree.tokens, 6)[node + 1]] = 0.1
        nodes = Nodes(logits, lambda node, tokens, scores=logits: scores[node : node + 1], lambda *_: False)
        lengths.append(len(rule.judge(tree, nodes).path))
    assert lengths == [0, 5]


def test_a_continuation_needs_ngrams(target, prompt):
    drafter = make_drafter(target)
    assert not DraftOptions.of(drafter).of_methods
    drafter.generation_config.update(ngram_continuation=4, ngram_length=0)
    with pytest.raises(ValueError, match="without n-grams there is nothing to append"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)
