"""N-grams of the text: what they propose, and a drafter of n-grams alone."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import VOCAB, as_plain, each_with_its_seed, make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.core.draft_tree import NGRAM_LEAST
from hf_hsdraft.drafters.lookup.ngrams import (
    NGRAM_BEYOND,
    NGRAM_EARLIER,
    NGRAM_FOLLOWERS,
    NGRAM_PRIOR,
    NGRAM_RIGHT,
    NgramCache,
)
from hf_hsdraft.runtime.target_runtime import TargetRuntime

TEXTS = st.lists(st.integers(0, 4), min_size=2, max_size=60)
LENGTHS = st.integers(1, 4)


def followers(text, leader):
    """The tokens that followed a leader, the latest first."""
    size = len(leader)
    found = [text[end] for end in range(size, len(text)) if tuple(text[end - size : end]) == leader]
    return list(dict.fromkeys(reversed(found)))[:NGRAM_FOLLOWERS]


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
        first = NGRAM_RIGHT[min(size, len(NGRAM_RIGHT)) - 1]
        shares = []
        for rank, token in enumerate(known):
            assumed = first if rank == 0 else (1 - first) * NGRAM_EARLIER ** (rank + 1)
            prior = NGRAM_PRIOR
            shares.append((right.get((size, rank), 0) + prior * assumed) / (reached[size] + prior))
            found.setdefault(token, left * shares[-1])
        left *= max(1 - sum(shares), 0.0)
        if left < NGRAM_LEAST:
            break
    if drafted:  # what came before was right, then
        found = {token: probability**NGRAM_BEYOND for token, probability in found.items()}
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
                if score + math.log(probability) >= math.log(NGRAM_LEAST):
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


REPEATING = torch.tensor([[0, 0, 5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8, 9, 8]])
FREE = {"node_cost": 0.0, "depth_cost": 0.0}
CHAIN, FIXED = {"beam_width": 1}, {"tree_sizing": "fixed"}
KINDS = {
    "alone": (None, FREE),
    "alone, chains": (None, FREE | CHAIN),
    "alone, fixed sizes": (None, FIXED),
    "alone, measured costs": (None, {}),
    "in front": (3, {}),
    "in front of chains": (3, CHAIN),
}


def check_repeating(target, drafter, do_sample: bool, max_new_tokens: int) -> None:
    """One and two prompts that repeat give the target's own texts."""
    mask = (REPEATING > 0).long()
    for rows in (slice(0, 1), slice(0, 2)):
        call = {"attention_mask": mask[rows], "max_new_tokens": max_new_tokens, "do_sample": do_sample}
        if not do_sample or rows.stop == 1:
            as_plain(target, drafter, REPEATING[rows], **call)
            continue
        torch.manual_seed(0)
        drafted = target.generate(REPEATING, **call, assistant_model=drafter)
        del call["attention_mask"]
        assert drafted.tolist() == each_with_its_seed(target, REPEATING, mask, seed=0, **call).tolist()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_stay_the_targets_own(target, kind, do_sample):
    """Prompts that repeat, so that n-grams are drafted and, at sampling, rejected."""
    length, options = KINDS[kind]
    drafter = CachebackDrafter(**options) if length is None else make_drafter(target)
    if length is not None:
        vars(drafter.generation_config).update(options, ngram_length=length)
    check_repeating(target, drafter, do_sample, 10)


def test_a_text_that_repeats_itself_takes_fewer_forwards(prompt):
    target = make_target(initializer_range=0.02)  # its text soon goes in circles
    plain, found = target.generate(prompt, max_new_tokens=60, do_sample=False), {}
    for length in (None, 0, 3):
        drafter = CachebackDrafter(**FREE) if length is None else make_drafter(target)
        if length is not None:
            drafter.generation_config.ngram_length = length
        call = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
        output = target.generate(prompt, **call, assistant_model=drafter)
        assert torch.equal(output.sequences, plain)
        assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
        found[length] = output.statistics
    assert found[3].target_forwards < 0.7 * found[0].target_forwards
    assert found[None].target_forwards < 30 and found[None].tau > 2


def test_padding_and_ids_that_are_no_tokens_are_not_drafted(target):
    """Placeholders stand beside `inputs_embeds`; nothing of them may reach the target's embedding."""
    ids = torch.tensor([[VOCAB + 5, VOCAB + 5, 7, VOCAB + 5, VOCAB + 5, 7, VOCAB + 5, VOCAB + 5, 7]])
    embeds = target.get_input_embeddings()(ids.clamp(max=VOCAB - 1))
    as_plain(target, CachebackDrafter(**FREE), ids, inputs_embeds=embeds, max_new_tokens=12)


@pytest.mark.parametrize("rows", [1, 2])
def test_no_room_for_a_tree_is_no_error(rows):
    """So close to the last position nothing is drafted, n-grams neither, however much the prompt repeats."""
    target = make_target(max_position_embeddings=64, rope_parameters=None)
    ids = torch.tensor([[5, 6, 7, 5, 8, 7, 5, 6, 9]]).repeat(rows, 7)[:, :62]
    for drafter in (CachebackDrafter(**FREE), make_drafter(target)):
        as_plain(target, drafter, ids, max_new_tokens=2)


def test_other_texts_help_where_the_running_one_knows_nothing(target, prompt):
    plain = target.generate(prompt, max_new_tokens=30, do_sample=False)
    known = CachebackDrafter(texts=[plain[0].tolist()], **FREE)
    alone, helped = (
        as_plain(target, drafter, prompt, max_new_tokens=30).statistics.target_forwards
        for drafter in (CachebackDrafter(**FREE), known)
    )
    assert helped < 0.7 * alone
    before = [dict(table.followers) for table in known.frozen]
    target.generate(REPEATING[1:], max_new_tokens=30, do_sample=False, assistant_model=known)
    assert [dict(table.followers) for table in known.frozen] == before


def test_no_ngram_reaches_from_one_text_into_the_next():
    drafter = CachebackDrafter(texts=[[1, 2], [3, 4]], ngram_length=1)
    assert set(drafter.frozen[0].followers) == {(1,), (3,)}


def test_wrong_arguments_are_refused_before_any_work(target, prompt):
    for length in (0, True):
        with pytest.raises(ValueError, match=f"ngram_length={length}"):
            CachebackDrafter(ngram_length=length)
    for unknown in ({"tree_sise": 3}, {"temperature": 0.3}, {"tree_builder": "gumbel"}):
        with pytest.raises(ValueError, match=next(iter(unknown))):
            CachebackDrafter(**unknown)
    with pytest.raises(ValueError, match=f"token {VOCAB}"):
        target.generate(prompt, max_new_tokens=4, assistant_model=CachebackDrafter(texts=[[1, VOCAB, 2]]))
    with pytest.raises(ValueError, match="tree_size"):
        target.generate(prompt, max_new_tokens=4, assistant_model=CachebackDrafter(tree_size=0))
    with pytest.raises(ValueError, match="num_assistant_tokens=True"):
        target.generate(prompt, max_new_tokens=4, assistant_model=CachebackDrafter(num_assistant_tokens=True))


def test_without_ngrams_there_is_nothing_to_draft_by(target, prompt, monkeypatch):
    drafter = CachebackDrafter()
    drafter.generation_config.ngram_length = 0
    monkeypatch.setattr(TargetRuntime, "prefill", None)  # refused before any work
    with pytest.raises(ValueError, match=r"ngram_length=0 is invalid: expected an integer from 1,.*CachebackDrafter"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)
