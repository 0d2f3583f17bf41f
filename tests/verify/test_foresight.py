"""Drafts that know the random numbers of the draws to come: the draws stay what they would have been."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from conftest import VOCAB, as_plain, each_with_its_seed, make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from session_helpers import expansion_of
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.hidden_state.quick_weights import quick_weights
from hf_hsdraft.engine.decoded_texts import DecodedTexts
from hf_hsdraft.verify.foresight import Draws, Foresight, Race, _Numbers

NEW = 16
SAMPLED = {"do_sample": True, "max_new_tokens": NEW, "top_k": 20, "temperature": 0.9}


def probabilities(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [(3 * torch.randn(1, VOCAB, generator=generator)).softmax(-1) for _ in range(count)]


def plain_draws(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.multinomial(p, 1, generator=generator)) for p in probabilities(count)]


def drawn_by(draws: Draws, given: list[torch.Tensor], ahead: int = 1) -> list[int]:
    """Draws a token from each of these probabilities, with so many draws foreseen."""
    drawn = []
    for p in given:
        draws.foresee(ahead)
        drawn.append(draws(p))
        draws.settle(1)
    return drawn


ROUNDS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=8)


@given(rounds=ROUNDS, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_draws_are_plain_whatever_was_foreseen_or_taken_back(rounds, seed):
    """A round foresees some draws, makes some, and takes the last ones back."""
    generator = torch.Generator().manual_seed(seed)
    draws, drawn, given = Draws(generator, VOCAB), [], probabilities(40)
    for foreseen, kept, cut in rounds:
        draws.foresee(foreseen)
        tokens = [draws(given[len(drawn) + place]) for place in range(kept + cut)]
        draws.settle(kept)
        drawn += tokens[:kept]
    assert drawn == plain_draws(seed, len(drawn))
    again = torch.Generator().manual_seed(seed)
    for p in given[: len(drawn)]:
        torch.multinomial(p, 1, generator=again)
    assert torch.equal(generator.get_state(), again.get_state())


@pytest.mark.parametrize("ahead", [1, 5])
def test_draws_of_others_are_noticed(ahead):
    generator, again = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    draws, given = Draws(generator, VOCAB), probabilities(20)
    for place, p in enumerate(given):
        draws.foresee(ahead)
        draws.foresee(ahead)
        if place >= 10:
            torch.rand(3, generator=generator)
            torch.rand(3, generator=again)
        assert draws(p) == int(torch.multinomial(p, 1, generator=again))
        draws.settle(1)
        assert draws.foreseeable == (place < 12)


def test_foreseen_numbers_are_made_once(monkeypatch):
    calls, multinomial = [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda *args, **kwargs: calls.append(1) or multinomial(*args, **kwargs))
    drawn = drawn_by(Draws(torch.Generator().manual_seed(5), VOCAB), probabilities(10), ahead=2)
    assert len(calls) == 1
    assert drawn == plain_draws(5, 10)


def test_who_draws_meanwhile_gets_other_numbers(monkeypatch):
    """Another thread's draw, while the winner of a race is found out: a draw from the same generator, in its turn."""
    generator, others, winner = torch.Generator().manual_seed(5), [], _Numbers.winner

    def interrupted(numbers, probabilities):
        others.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return winner(numbers, probabilities)

    draws, flat = Draws(generator, 5000), torch.full((1, 5000), 1 / 5000)
    drawn_by(draws, [flat])
    monkeypatch.setattr(_Numbers, "winner", interrupted)
    mine = drawn_by(draws, [flat] * 2)  # after three such misses in a row nothing is foreseen any more
    again = torch.Generator().manual_seed(5)
    plain = [int(torch.multinomial(flat, 1, generator=again)) for _ in range(5)][1:]
    assert [mine[0], others[0], mine[1], others[1]] == plain


@pytest.mark.parametrize(
    "change", [torch.Tensor.double, torch.Tensor.bfloat16, lambda p: p[:, :-3], lambda p: p[:, :1]]
)
def test_probabilities_of_another_kind_are_drawn_from_as_ever(change):
    draws, again = Draws(torch.Generator().manual_seed(5), VOCAB), torch.Generator().manual_seed(5)
    given = [change(p) if place > 3 else p for place, p in enumerate(probabilities(12))]
    expected = [int(torch.multinomial(p, 1, generator=again)) for p in given]
    assert drawn_by(draws, given, ahead=2) == expected and not draws.foreseeable


def masked(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_draws_are_plain_where_the_first_one_did_not_come_as_foreseen():
    draws, drawn = Draws(torch.Generator().manual_seed(5), VOCAB), []
    for p in probabilities(10):
        for times in draws.foresee(3):
            times.copy_(times.flip(0))
        drawn.append(draws(p))
        draws.settle(1)
    assert drawn == plain_draws(5, 10) and not draws.foreseeable


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0])
def test_what_cannot_be_drawn_from_is_refused_as_ever(wrong):
    draws = Draws(torch.Generator().manual_seed(5), VOCAB)
    drawn_by(draws, probabilities(3))
    draws.foresee(1)
    with pytest.raises(RuntimeError, match="probabilit"):
        draws(torch.full((1, VOCAB), wrong))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_drafter_that_is_right_foresees_every_draw(temperature):
    torch.manual_seed(2)
    vocab_ids = torch.randperm(VOCAB)
    draws, warm = Draws(torch.Generator().manual_seed(1), VOCAB), TemperatureLogitsWarper(temperature)
    for others, among in (([], 1), ([TopKLogitsWarper(20), TopPLogitsWarper(0.9)], 5)):
        for _ in range(50):
            logits = 2 * torch.randn(1, 1, VOCAB)
            log_probs = Foresight([draws], [warm, *others], VOCAB).race([0], 1, vocab_ids)(1, logits[..., vocab_ids])
            scores = logits[0]
            for warper in (warm, *others):
                scores = warper(None, scores)
            token = draws(scores.softmax(-1))
            draws.settle(1)
            # What the target leaves out a drafter cannot be sure of, so a few such tokens may stand before.
            assert token in vocab_ids[log_probs[0, 0].topk(among).indices]


def test_what_warpers_leave_out_of_the_draft_is_unlikely_but_possible():
    logits, times = torch.tensor([[[4.0, 3.0, 2.9, -3.0]]]), torch.ones(4)
    race = Race([[times]], [TopKLogitsWarper(2)], torch.arange(4))
    probs = race(1, logits)[0, 0].exp()
    free = Race([[times]], [], torch.arange(4))(1, logits)[0, 0].exp()
    assert probs[2] / probs[1] < free[2] / free[1] and probs[3] / probs[1] < 0.1 * free[3] / free[1]
    assert (probs > 0).all() and probs.sum() == pytest.approx(1.0)


def test_counted_probabilities_follow_the_times():
    """Early tokens gain, late ones lose, on average little changes, and no child outranks its parent."""
    half = math.log(0.5)
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 0, 1), (0, 1, 1, 2), (0.0, half, math.log(0.2), 2 * half))
    draws = Draws(torch.Generator().manual_seed(3), VOCAB)
    foresight, total = Foresight([draws], [], VOCAB), torch.zeros(4)
    for p in probabilities(400):
        first, second = draws.foresee(2)
        scored = foresight.scored({0: tree})[0]
        assert (scored.tokens, scored.parents, scored.depths) == (tree.tokens, tree.parents, tree.depths)
        assert (scored.scores[1] > half) == (float(first[2]) < 0.56)
        assert (scored.scores[3] - scored.scores[1] > half) == (float(second[4]) < 0.56)
        assert scored.scores[3] <= scored.scores[1] <= 0.0
        total += torch.tensor(scored.scores).exp()
        draws(p)
        draws.settle(1)
    assert (total / 400)[1:].tolist() == pytest.approx([0.5, 0.2, 0.25], abs=0.04)
    assert foresight.scored({0: DraftTree.root(3)}) == {0: DraftTree.root(3)}


def seeded(target, inputs, seed: int = 11, **settings) -> torch.Tensor:
    torch.manual_seed(seed)
    return target.generate(**inputs, **{**SAMPLED, **settings}, return_dict_in_generate=True)


def bloom():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "initializer_range": 0.3}
    config = AutoConfig.for_model("bloom", **sizes, eos_token_id=None, bos_token_id=1, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("make", [make_target, bloom], ids=["trees", "chains, rows in step"])
def test_each_row_of_a_batch_is_plain_decoding_with_a_seed_of_its_own(make):
    target = make()
    ids = torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(3))
    inputs = masked(ids)
    expected = each_with_its_seed(target, ids, inputs["attention_mask"], seed=11, **SAMPLED)
    for drafter in (make_drafter(target), make_drafter(target, seed=4, num_draft_steps=2)):
        drafted = seeded(target, inputs, assistant_model=drafter)
        assert drafted.sequences.tolist() == expected.tolist()
        assert max(drafted.statistics.accepted_lengths) > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_of_large_vocabularies_each_row_races_among_its_likely_tokens(rows, target, tuned):
    tuned(likely_columns=20)
    drafter = make_drafter(target)
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    weights, working = drafter.borrow(*modules), quick_weights(drafter, *modules)
    torch.manual_seed(0)
    hidden = torch.randn(rows, 3, drafter.config.hidden_size)
    draws = [Draws(torch.Generator().manual_seed(row), VOCAB) for row in range(rows)]
    race = Foresight(draws, [TopKLogitsWarper(8)], VOCAB).race(range(rows), 3, weights.vocab_ids)
    with torch.no_grad():
        parts = expansion_of(working, weights, hidden, race=race)
        tokens, states = torch.randint(VOCAB, (rows, 1)), None
        scores = torch.zeros(rows, 1)
        for level in (1, 2, 3):
            log_probs, _ = parts(level, tokens, states)
            scores, columns, parents, states = parts.best(level, tokens, states, scores, 4)
            for row in range(rows):
                likely = parts.logits[row].amax(dim=0).topk(20).indices
                assert set(columns[row].tolist()) <= set(likely.tolist())
                if level == 1:  # below, the parents' own races were cut too, which shifts their scores
                    assert columns[row].tolist() == likely[log_probs[row, 0, likely].topk(4).indices].tolist()
            states = states[torch.arange(rows)[:, None], parents]
            tokens = weights.vocab_ids[columns]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hidden states", "chain", "ensemble", "resample"])
def test_foresight_accepts_more_of_the_same_text(method, target, monkeypatch):
    """Of a drafter that knows nothing; `VOCAB` tokens are few enough for it to meet the target's draws by the race."""
    ids = torch.randint(2, VOCAB, (1, 60), generator=torch.Generator().manual_seed(5))
    drafter = make_drafter(target)
    options = drafter.generation_config
    options.ngram_length = 0
    if method == "chain":
        options.beam_width = 1
    if method in ("ensemble", "resample"):
        options.reuse = method
    settings = {"inputs": masked(ids), "assistant_model": drafter, "max_new_tokens": 40}
    plain = seeded(target, settings["inputs"], max_new_tokens=40).sequences
    foreseen = [seeded(target, seed=seed, **settings) for seed in range(4)]
    assert seeded(target, **settings).sequences.tolist() == plain.tolist()
    monkeypatch.setattr(DecodedTexts, "foresee", lambda *_: None)
    blind = [seeded(target, seed=seed, **settings) for seed in range(4)]
    assert [one.sequences.tolist() for one in blind] == [one.sequences.tolist() for one in foreseen]
    accepted, before = (sum(sum(one.statistics.accepted_lengths) for one in all_) for all_ in (foreseen, blind))
    assert accepted > 1.2 * before


def test_ngrams_that_are_drawn_are_worth_more_of_their_nodes(target, monkeypatch):
    """Where nodes cost something, those that will hardly be drawn are left out: more of the rest is accepted."""
    ids = torch.randint(2, 8, (1, 120), generator=torch.Generator().manual_seed(5))
    drafter = CachebackDrafter()
    drafter.generation_config.node_cost, drafter.generation_config.depth_cost = 0.05, 0.0
    allowed = SuppressTokensLogitsProcessor([token for token in range(VOCAB) if not 2 <= token < 8])
    settings = {"top_k": 0, "temperature": 1.0, "logits_processor": LogitsProcessorList([allowed])}
    settings |= {"max_new_tokens": 24}

    def accepted_of_drafted() -> tuple[list[list[int]], float]:
        texts, accepted, nodes = [], 0, 0
        for seed in range(6):
            output = seeded(target, masked(ids), seed, **settings, assistant_model=drafter)
            texts += output.sequences.tolist()
            accepted += sum(output.statistics.accepted_lengths)
            nodes += sum(output.statistics.drafted_nodes)
        return texts, accepted / nodes

    texts, foreseen = accepted_of_drafted()
    monkeypatch.setattr(DecodedTexts, "foresee", lambda *_: None)
    same, blind = accepted_of_drafted()
    assert texts == same and foreseen > 1.1 * blind


class Noisy(LogitsProcessor):
    """Draws random numbers of its own."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


@pytest.mark.parametrize(
    "settings",
    [
        *({name: value} for name, value in (("top_p", 0.7), ("min_p", 0.05), ("typical_p", 0.8), ("top_k", 1))),
        *({name: 0.01} for name in ("epsilon_cutoff", "eta_cutoff")),
        {"logits_processor": LogitsProcessorList([Noisy()]), "top_k": 20, "temperature": 0.9},
    ],
    ids=lambda given: ", ".join(map(str, given)),
)
def test_whatever_changes_the_scores_the_text_is_plain(settings, target, drafter, prompt):
    settings = {"do_sample": True, "max_new_tokens": NEW, "top_k": 0, **settings}
    texts, states = [], []
    for assistant in (None, drafter):
        torch.manual_seed(1)
        texts.append(target.generate(prompt, **settings, assistant_model=assistant).tolist())
        states.append(torch.get_rng_state())
    assert texts[0] == texts[1] and torch.equal(*states)


@pytest.mark.parametrize(
    ("verification", "builder"), [("walk", "gumbel"), ("rejection", "gumbel"), ("rejection", "stochastic_beam")]
)
def test_drawn_trees_foresee_nothing(verification, builder, target, drafter, prompt, monkeypatch):
    """Rejection holds only for nodes that were drawn independently of what they are compared with."""
    seeded(target, {"input_ids": prompt}, assistant_model=drafter)  # finds out how draws are made
    monkeypatch.setattr(Draws, "foresee", lambda *_: pytest.fail("looked ahead"))
    drafter.generation_config.verification, drafter.generation_config.tree_builder = verification, builder
    for rows in (1, 2):
        seeded(target, masked(prompt.repeat(rows, 1)), assistant_model=drafter)


def test_texts_of_two_threads_have_nothing_in_common(target, drafter):
    """Whoever looks ahead on the generator that they share would give them the same numbers now and then."""
    seen: list[list[int]] = []
    prompt = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
    flat = {"do_sample": True, "max_new_tokens": 50, "top_k": 0, "temperature": 1000.0}

    def write() -> None:
        for _ in range(2):
            seen.append(target.generate(prompt, **flat, assistant_model=drafter)[0, 9:].tolist())

    torch.manual_seed(0)
    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Of evenly drawn tokens, runs of three in common are as rare as VOCAB^-3 a pair of places.
    runs = [{tuple(text[i : i + 3]) for i in range(len(text) - 2)} for text in seen]
    common = sum(len(one & other) for one, other in itertools.combinations(runs, 2))
    assert len(seen) == 4 and common <= 1


def test_where_draws_are_made_otherwise_nothing_is_foreseen(target, drafter, prompt, monkeypatch):
    monkeypatch.setattr("hf_hsdraft.verify.foresight._draws_are_races", lambda *_: False)
    as_plain(target, drafter, prompt, **SAMPLED)
    drafted = seeded(target, masked(prompt.repeat(2, 1)), assistant_model=drafter)
    assert drafted.sequences.shape == (2, prompt.shape[1] + NEW)
