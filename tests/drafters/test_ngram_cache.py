"""N-grams of the text: what they propose and how likely they hold it, against counting the text by hand."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import VOCAB, each_with_its_seed, make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hsdraft.core.tuning import TUNING
from hf_hsdraft.drafters.ngrams.ngram_cache import NgramCache

TEXTS = st.lists(st.integers(0, 4), min_size=2, max_size=60)
LENGTHS = st.integers(1, 4)


def followers(text, leader):
    """The tokens that followed a leader, the latest first."""
    size = len(leader)
    found = [text[end] for end in range(size, len(text)) if tuple(text[end - size : end]) == leader]
    return list(dict.fromkeys(reversed(found)))[: TUNING.ngram_followers]


def counts(text, length):
    """For each leader length how often it was asked and which rank was right, token by token over the text."""
    reached, right = dict.fromkeys(range(1, length + 1), 0), {}
    for end in range(1, len(text)):
        for size in range(min(length, end), 0, -1):
            known = followers(text[:end], tuple(text[end - size : end]))
            if not known:
                continue
            reached[size] += 1
            if text[end] in known:
                right[size, known.index(text[end])] = right.get((size, known.index(text[end])), 0) + 1
                break
    return reached, right


def next_tokens(text, length, path, drafted=False):
    """Probabilities of the tokens after a path, longer leaders first and shorter ones for what those miss."""
    reached, right = counts(text, length)
    found, left = {}, 1.0
    for size in range(min(length, len(path)), 0, -1):
        known = followers(text, tuple(path[-size:]))
        if not known:
            continue
        first = TUNING.ngram_right[min(size, len(TUNING.ngram_right)) - 1]
        shares = []
        for rank, token in enumerate(known):
            assumed = first if rank == 0 else (1 - first) * TUNING.ngram_earlier ** (rank + 1)
            prior = TUNING.ngram_prior
            shares.append((right.get((size, rank), 0) + prior * assumed) / (reached[size] + prior))
            found.setdefault(token, left * shares[-1])
        left *= max(1 - sum(shares), 0.0)
        if left < TUNING.ngram_least:
            break
    if drafted:  # what came before was right, then
        found = {token: probability**TUNING.ngram_beyond for token, probability in found.items()}
        found = {token: value / max(sum(found.values()), 1.0) for token, value in found.items()}
        assert sum(found.values()) < 1.0 + 1e-9
    return found


@settings(max_examples=60, deadline=None)
@given(TEXTS, LENGTHS, st.integers(1, 12), st.integers(1, 5))
def test_a_draft_holds_the_most_probable_continuations(text, length, tree_size, depth):
    cache = NgramCache(length)
    cache.extend(text[: len(text) // 2])
    cache.extend(text[len(text) // 2 :])
    tree = cache.draft(tree_size, depth)
    assert tree.tokens[0] == text[-1] and len(tree) <= tree_size + 1 and max(tree.depths) <= depth
    seen = {}
    for node in range(1, len(tree)):
        path = tuple(tree.tokens[each] for each in tree.path(node))
        expected, known = 0.0, list(text[-length:])
        for place, token in enumerate(path):
            expected += math.log(next_tokens(text, length, known, drafted=place > 0)[token])
            known.append(token)
        assert tree.scores[node] == pytest.approx(expected)
        seen[path] = tree.scores[node]
    # All paths there are, by brute force: none that was left out is more probable than one that is there.
    every, ends = {}, [((), 0.0)]
    for _ in range(depth):
        longer = []
        for path, score in ends:
            for token, probability in next_tokens(text, length, [*text[-length:], *path], drafted=bool(path)).items():
                if score + math.log(probability) >= math.log(TUNING.ngram_least):
                    longer.append(((*path, token), score + math.log(probability)))
        every |= dict(longer)
        ends = longer if len(longer) < 300 else []
        if not ends:
            break
    if len(tree) == tree_size + 1:
        left_out = [score for path, score in every.items() if path not in seen]
        assert max(left_out, default=-math.inf) <= min(seen.values()) + 1e-9
    elif ends or not every:
        assert set(seen) == set(every)


def test_a_chain_follows_the_first_choice_and_a_threshold_cuts():
    cache = NgramCache(2)
    cache.extend([1, 2, 3, 4] * 10)
    chain = cache.draft(6, 6, width=1)
    assert chain.tokens == (4, 1, 2, 3, 4, 1, 2) and chain.parents == (-1, 0, 1, 2, 3, 4, 5)
    kept = cache.draft(6, 6, width=1, threshold=math.exp(chain.scores[3]) - 1e-9)
    assert kept.tokens == chain.tokens[:4]


def test_what_was_not_used_for_longest_is_forgotten(tuned):
    tuned(ngram_leaders=3)
    cache = NgramCache(1)
    cache.extend([1, 2, 3, 4, 1, 2, 5, 6])  # leaders 1 2 3 4, then 1 and 2 again, then 5
    [table] = cache._tables
    assert set(table.followers) == {(1,), (2,), (5,)}


def test_a_text_that_repeats_itself_takes_fewer_forwards():
    target, prompt = make_target(initializer_range=0.02), torch.tensor([[5, 6, 7, 8]])  # its text soon goes in circles
    plain = target.generate(prompt, max_new_tokens=60, do_sample=False)
    drafter = make_drafter(target)
    forwards = {}
    for length in (0, 3):
        drafter.generation_config.ngram_length = length
        output = target.generate(
            prompt, max_new_tokens=60, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        assert output.sequences.tolist() == plain.tolist()
        forwards[length] = output.statistics.target_forwards
    assert forwards[3] < 0.7 * forwards[0]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("width", [1, 5])
def test_texts_stay_the_targets_own_in_batches_too(target, width, do_sample):
    """Prompts that repeat, so that n-grams are drafted and, at sampling, rejected."""
    ids = torch.tensor([[0, 0, 5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8, 9, 8]])
    mask = (ids > 0).long()
    drafter = make_drafter(target)
    drafter.generation_config.beam_width = width
    drafter.generation_config.ngram_length = 3
    for rows in (slice(0, 1), slice(0, 2)):
        call = {"attention_mask": mask[rows], "max_new_tokens": 20, "do_sample": do_sample}
        outputs = []
        for assistant in (None, drafter):
            torch.manual_seed(0)
            outputs.append(target.generate(ids[rows], **call, assistant_model=assistant))
        expected = outputs[0]
        if do_sample and rows.stop > 1:
            del call["attention_mask"]
            expected = each_with_its_seed(target, ids, mask, seed=0, **call)
        assert outputs[1].tolist() == expected.tolist()
        assert int(outputs[1].max()) < VOCAB


def test_lengths_are_checked(target, prompt):
    drafter = make_drafter(target)
    for value in (-1, 17, 2.5):
        drafter.generation_config.ngram_length = value
        with pytest.raises(ValueError, match="ngram_length"):
            target.generate(prompt, max_new_tokens=4, assistant_model=drafter)
