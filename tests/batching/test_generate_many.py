"""Texts that join and leave a running batch are what `generate()` gives each of them alone."""

import asyncio
import gc
import random
import time
import traceback
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import LLAMA, VOCAB, make_drafter, make_target, model_of
from oracles.scripted import random_tree
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_hsdraft import (
    BlockDrafter,
    CachebackDrafter,
    CausalLMDrafter,
    EagleConfig,
    EagleDrafter,
    attach,
    detach,
    generate_many,
    harmless,
)
from hf_hsdraft.batching.scheduler import ContinuousBatching
from hf_hsdraft.core.cache_name import given_cache
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call, Session, WrappedDrafter


class KnowingDrafter(WrappedDrafter):
    """Drafts along the texts of known prompts, down to random depths among wrong branches."""

    def __init__(self, drafter: Any, texts: dict[tuple[int, ...], list[int]], takes_new_texts: bool) -> None:
        super().__init__(drafter)
        self.texts, self.takes_new_texts = texts, takes_new_texts

    def session(self, call: Call) -> Session:
        return KnowingSession(self.texts, self.takes_new_texts)


class KnowingSession(Session):
    def __init__(self, texts: dict[tuple[int, ...], list[int]], takes_new_texts: bool) -> None:
        self.texts, self.takes_new_texts = texts, takes_new_texts
        self._left: dict[int, list[int]] = {}
        self._rng = random.Random(0)

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            if each.row not in self._left:
                assert len(each.taps) == len(each.positions) == len(each.earlier)
                self._left[each.row] = list(self.texts[tuple(each.earlier)])
            del self._left[each.row][: len(each.tokens)]

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = (random_tree(ask.root, self._left[ask.row], ask.depth, VOCAB, self._rng) for ask in asks)
        return [tree.first(ask.size) for tree, ask in zip(trees, asks, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        self._left = {row: self._left[row] for row in rows}


def requests_of(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests with prompts and options of all kinds; every prompt differs."""
    rng, found = random.Random(seed), []
    for index in range(count):
        length = rng.choice([1, 2, 7, 20, 45])
        ids = torch.randint(6, VOCAB, (1, length), generator=torch.Generator().manual_seed(100 * seed + index))
        options: dict[str, Any] = {"input_ids": ids, "max_new_tokens": rng.choice([1, 2, 9, 30, 60])}
        if rng.random() < 0.4:
            options |= {"do_sample": True, "temperature": rng.choice([0.6, 1.0]), "top_k": rng.choice([0, 20])}
            options["seed"] = rng.randrange(10**6)
        if rng.random() < 0.3:
            options["repetition_penalty"] = 1.3
        if rng.random() < 0.2:
            options |= {"return_dict_in_generate": True, "output_scores": True}
        found.append(options)
    return found


def alone(target: Any, options: dict[str, Any]) -> Any:
    given = dict(options)
    torch.manual_seed(given.pop("seed", 0))
    return target.generate(**given)


def new_tokens(output: Any, options: dict[str, Any]) -> list[int]:
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    return sequences[0, options["input_ids"].shape[1] :].tolist()


def knowing(target: Any, requests: Sequence[dict[str, Any]], takes_new_texts: bool = True) -> KnowingDrafter:
    texts = {tuple(each["input_ids"][0].tolist()): new_tokens(alone(target, each), each) for each in requests}
    return KnowingDrafter(make_drafter(target), texts, takes_new_texts)


def decoded_at_random(batching: ContinuousBatching, requests: Sequence[dict[str, Any]], seed: int) -> dict[int, Any]:
    """Submits requests at random times, and decodes all."""
    rng, waiting, found = random.Random(seed), list(requests), {}
    while waiting or batching.busy:
        while waiting and (rng.random() < 0.5 or not batching.busy):
            arguments = dict(waiting.pop(0))
            batching.submit(arguments, arguments.pop("seed", None))
        for done in batching.step():
            if done.error is not None:
                traceback.print_exception(done.error)
            found[done.index] = done
    return found


def check_schedule(target: Any, seed: int, takes_new_texts: bool) -> None:
    requests = requests_of(12, seed)
    drafter = knowing(target, requests, takes_new_texts)
    rng = random.Random(seed)
    batching = ContinuousBatching(target, drafter, rng.choice([1, 2, 3, 5]), rng.choice([4, 16, 512]))
    found = decoded_at_random(batching, requests, seed)
    assert sorted(found) == list(range(12))
    for index, options in enumerate(requests):
        output, plain = found[index].output, alone(target, options)
        assert new_tokens(output, options) == new_tokens(plain, options), f"request {index} of schedule {seed}"
        if "output_scores" in options:
            assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(output.scores, plain.scores, strict=True))
    assert not batching.alone
    assert batching.tally.statistics.new_tokens > 1.2 * batching.tally.statistics.row_forwards  # drafts are accepted


@pytest.mark.parametrize("takes_new_texts", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_every_text_is_what_it_is_alone(seed: int, takes_new_texts: bool, chatty: Any) -> None:
    check_schedule(chatty, seed, takes_new_texts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_every_text_of_many_schedules_is_what_it_is_alone(seed: int, chatty: Any) -> None:
    """benchmarks/schedules.py decodes hundreds, with more options."""
    check_schedule(chatty, seed + 100, takes_new_texts=seed % 4 > 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["hidden_state", "n-grams", "language_model", "eagle", "block"])
def test_real_drafters_draft_for_texts_that_join(kind: str, attention: str) -> None:
    target = make_target(attention, eos_token_id=4)
    drafter: Any = {
        "hidden_state": lambda: make_drafter(target),
        "n-grams": CachebackDrafter,
        "language_model": lambda: CausalLMDrafter(make_target(seed=3)),
        "eagle": lambda: EagleDrafter(EagleConfig.for_target(target, 4)).eval(),
        "block": lambda: BlockDrafter.for_target(target, num_draft_steps=4, num_hidden_layers=1, markov_rank=8).eval(),
    }[kind]()
    if kind in ("eagle", "block"):
        drafter.reset_parameters(std=0.3)
    requests = requests_of(9, 7)
    for done in generate_many(target, iter(requests), drafter, max_batch_size=3, chunk_size=8):
        assert done.error is None, done.error
        options = requests[done.index]
        assert new_tokens(done.output, options) == new_tokens(alone(target, options), options)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3", "gemma2"])
def test_other_architectures(model_type: str) -> None:
    fields = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    own = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    more = own if model_type == "gpt2" else {**fields, "head_dim": 8, "initializer_range": 0.3, "sliding_window": 8}
    target = model_of(model_type, **more)
    requests = requests_of(6, 11)
    drafter = knowing(target, requests)
    batching = ContinuousBatching(target, drafter, 3)
    found = decoded_at_random(batching, requests, 1)
    for index, options in enumerate(requests):
        assert found[index].error is None
        assert new_tokens(found[index].output, options) == new_tokens(alone(target, options), options)
    assert bool(batching.alone) == (model_type == "gemma2")  # its windows cannot have rows of their own


class Fails(LogitsProcessor):
    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise RuntimeError("of this text alone")
        return scores


class Listens(BaseStreamer):
    def __init__(self) -> None:
        self.tokens, self.ended = list[int](), False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_an_error_of_a_text_is_its_own(target: Any) -> None:
    requests = requests_of(5, 3)
    for each in requests:
        each["max_new_tokens"] = 30
    drafter = knowing(target, requests)
    requests[2]["logits_processor"] = [Fails(at=6)]
    requests[3]["input_ids"] = torch.zeros(1, 0, dtype=torch.int64)
    found = {done.index: done for done in generate_many(target, requests, drafter, max_batch_size=3)}
    assert str(found[2].error) == "of this text alone" and found[2].output is None
    assert found[3].error is not None
    for index in (0, 1, 4):
        assert (
            new_tokens(found[index].output, requests[index])
            == drafter.texts[tuple(requests[index]["input_ids"][0].tolist())]
        )


def test_each_text_has_its_own_streamer_and_criteria(target: Any) -> None:
    class Stops(StoppingCriteria):
        def __init__(self, length: int) -> None:
            self.length = length

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)

    requests, streamers = requests_of(6, 5), [Listens() for _ in range(6)]
    for index, each in enumerate(requests):
        each |= {"stopping_criteria": [Stops(each["input_ids"].shape[1] + 3 + index)], "max_new_tokens": 40}
    drafter = knowing(target, requests)
    given = [{**each, "streamer": streamer} for each, streamer in zip(requests, streamers, strict=True)]
    for done in generate_many(target, given, drafter, max_batch_size=4):
        sequences = done.output if isinstance(done.output, torch.Tensor) else done.output.sequences
        assert streamers[done.index].tokens == sequences[0].tolist() and streamers[done.index].ended
        assert len(new_tokens(done.output, requests[done.index])) == 3 + done.index


def test_what_cannot_share_forwards_is_decoded_alone(target: Any) -> None:
    ids = torch.randint(6, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    padded = {"input_ids": torch.cat([ids[:, :2] * 0, ids], dim=1), "attention_mask": torch.tensor([[0] * 2 + [1] * 9])}
    requests = [
        {"input_ids": ids, "num_beams": 2},
        {"input_ids": ids, "num_return_sequences": 2, "do_sample": True, "seed": 3},
        padded,
        {"input_ids": ids, "output_hidden_states": True, "return_dict_in_generate": True},
        {"input_ids": ids},
        {"input_ids": ids, "cache_implementation": "static", "disable_compile": True},
    ]
    batching = ContinuousBatching(target, make_drafter(target))
    for each in requests:
        arguments = {**each, "max_new_tokens": 8}
        batching.submit(arguments, arguments.pop("seed", 0))
    found = {}
    while batching.busy:
        found.update({done.index: done for done in batching.step()})
    assert sum(batching.alone.values()) == 5
    for index in (0, 2, 3, 4, 5):
        options = {**requests[index], "max_new_tokens": 8}
        assert new_tokens(found[index].output, options) == new_tokens(alone(target, options), options)
    assert found[1].output.shape == (2, 17)


def test_beside_harmless_hooks_texts_share_forwards(caplog: Any) -> None:
    target, requests = make_target(), requests_of(6, 3)
    steer = torch.linspace(-1, 1, 32)
    hook = target.model.layers[1].register_forward_hook(harmless(lambda _, inputs, states: states + steer))
    batching = ContinuousBatching(target, knowing(target, requests))
    found = decoded_at_random(batching, requests, 3)
    assert not batching.alone and batching.tally.statistics.tau > 1
    for index, options in enumerate(requests):
        assert new_tokens(found[index].output, options) == new_tokens(alone(target, options), options)
    hook.remove()

    def of_a_library(module: Any, inputs: Any, states: torch.Tensor) -> torch.Tensor:
        return states

    of_a_library = types.FunctionType(of_a_library.__code__, {"__name__": "peft.tuners"})
    target.model.layers[1].register_forward_hook(of_a_library)
    decoded_at_random(batching, requests[:2], 3)
    assert list(batching.alone) == ["hooks of its modules may depend on the row"]
    assert "Not decoded together with other texts: hooks of its modules may depend on the row." in caplog.text


def test_a_text_that_turns_out_to_be_alone_is_streamed_once() -> None:
    """So close to the target's last position no draft can be tried, which shows once the prompt is read."""
    target = make_target(max_position_embeddings=32)
    streamer, ids = Listens(), torch.randint(6, VOCAB, (1, 30), generator=torch.Generator().manual_seed(2))
    batching = ContinuousBatching(target, make_drafter(target))
    batching.submit({"input_ids": ids, "max_new_tokens": 2, "streamer": streamer})
    [done] = [each for _ in range(2) for each in batching.step()]
    assert batching.alone and streamer.tokens == done.output[0].tolist() and done.output.shape == (1, 32)


def test_beams_draw_by_the_seed_and_a_prompt_that_is_none_is_an_error_of_its_request(target: Any) -> None:
    beams = {"input_ids": [7, 8, 9], "num_beams": 2, "do_sample": True, "max_new_tokens": 8, "seed": 4}
    found = {done.index: done for done in generate_many(target, [beams, "no prompt", [7, 8]], CachebackDrafter())}
    torch.manual_seed(4)
    plain = target.generate(torch.tensor([[7, 8, 9]]), num_beams=2, do_sample=True, max_new_tokens=8)
    assert found[0].output.tolist() == plain.tolist()
    assert found[1].error is not None and found[2].error is None


def test_cancelled_requests_leave(target: Any) -> None:
    requests = requests_of(5, 9)
    for each in requests:
        each |= {"max_new_tokens": 40, "do_sample": False}
        each.pop("seed", None)
    batching = ContinuousBatching(target, knowing(target, requests), 2)
    for each in requests:
        batching.submit(each)
    batching.step()
    batching.cancel(0)
    batching.cancel(4)
    found = {}
    while batching.busy:
        found.update({done.index: done for done in batching.step()})
    assert found[0].cancelled and found[4].cancelled and found[4].output is None
    begun = new_tokens(found[0].output, requests[0])
    assert 0 < len(begun) < 40 and begun == new_tokens(alone(target, requests[0]), requests[0])[: len(begun)]
    for index in (1, 2, 3):
        assert new_tokens(found[index].output, requests[index]) == new_tokens(
            alone(target, requests[index]), requests[index]
        )


def test_a_request_waits_until_it_fits_in_the_cache(target: Any) -> None:
    requests = [{"input_ids": torch.full((1, 10), 7 + index), "max_new_tokens": 10} for index in range(4)]
    requests.append({"input_ids": torch.full((1, 60), 9), "max_new_tokens": 10})
    batching = ContinuousBatching(target, CachebackDrafter(), max_batch_size=4, max_cache_tokens=40)
    for each in requests:
        batching.submit(each)
    found, most = {}, 0
    while batching.busy:
        found.update({done.index: done for done in batching.step()})
        most = max(most, batching.running)
    assert most == 2
    assert isinstance(found[4].error, ValueError) and "max_cache_tokens=40" in str(found[4].error)
    assert all(found[index].error is None for index in range(4))


def test_an_attached_drafter_is_used(target: Any, drafter: Any) -> None:
    with pytest.raises(ValueError, match="needs a drafter"):
        generate_many(target, [[7, 8, 9]])
    attach(target, drafter)
    try:
        [done] = generate_many(target, [[7, 8, 9]], max_new_tokens=12)
    finally:
        detach(target)
    options = {"input_ids": torch.tensor([[7, 8, 9]]), "max_new_tokens": 12}
    assert new_tokens(done.output, options) == new_tokens(alone(target, options), options)
    assert done.statistics is not None and done.statistics.new_tokens == 12


def test_a_forward_over_several_texts_counts_once_in_sums(monkeypatch: Any) -> None:
    """And in each text's own statistics too, which have the time that it took."""
    target, forwards = make_target(), list[int]()

    def change(cache: Any, kwargs: Any) -> Any:
        forwards.append(len(kwargs["input_ids"]))
        return kwargs, lambda: None

    changed_forward(monkeypatch, target, change)
    requests = [{"input_ids": torch.full((1, 40), 7 + index), "max_new_tokens": 9 + 5 * index} for index in range(4)]
    drafter = knowing(target, requests)
    with attach(target, drafter) as attachment:
        list(generate_many(target, requests))  # tries what the target reads
        attachment.reset()
        forwards.clear()
        began = time.perf_counter()
        running = generate_many(target, requests, prefix_cache_tokens=0)
        texts = [done.statistics for done in running]
        seconds = time.perf_counter() - began
    total = attachment.statistics
    assert total.target_forwards == len(forwards) and total.row_forwards == sum(forwards) > len(forwards)
    assert total.new_tokens == sum(each["max_new_tokens"] for each in requests) and total.calls == 4
    assert total.tau == total.new_tokens / sum(forwards) == running.statistics.tau > 1
    assert all(each.target_forwards == each.row_forwards == 1 + each.rounds for each in texts)
    assert 0 < total.total_seconds <= seconds < sum(each.total_seconds for each in texts)
    assert attachment.last is texts[-1]


def test_what_is_decoded_without_drafts_is_counted_by_reason() -> None:
    fields = {"num_heads": 8, "head_dim": 8, "state_size": 8, "num_hidden_layers": 2, "n_groups": 2, "chunk_size": 8}
    target = model_of("mamba2", **fields, initializer_range=0.3)
    with attach(target, CachebackDrafter()) as attachment:
        running = generate_many(target, [[7, 8, 9]] * 2, max_new_tokens=5)
        assert [done.statistics for done in running] == [None, None]
    assert list(attachment.statistics.stepped_aside.values()) == [2] and not attachment.statistics.calls
    assert sum(running.alone.values()) == 2


def test_nothing_is_left_of_requests_that_are_done(target: Any) -> None:
    requests = ({"input_ids": torch.randint(6, VOCAB, (1, 3 + index % 5)), "max_new_tokens": 3} for index in range(60))
    batching = ContinuousBatching(target, CachebackDrafter(), max_batch_size=4)
    slots = []
    for each in requests:
        batching.submit(each)
        batching.step()
        slots.append(batching.cache_tokens)
    while batching.busy:
        batching.step()
    assert max(slots) <= 4 * 24 and batching.cache_tokens == 0


@pytest.mark.parametrize("end", ["done", "close", "dropped", "error"])
def test_hooks_stay_between_rounds_and_leave_with_the_last_text(end: str, monkeypatch: Any) -> None:
    target = make_target()

    def hooks() -> list[int]:
        return [id(hook) for module in target.modules() for hook in module._forward_hooks.values()]

    assert not hooks()
    batching = ContinuousBatching(target, make_drafter(target), 4)
    for first in range(6, 9):
        batching.submit({"input_ids": torch.tensor([[first, 30, 9]]), "max_new_tokens": 40, "min_new_tokens": 40}, 0)
    batching.step()
    between = hooks()
    batching.step()
    assert between and hooks() == between  # not installed again
    if end == "error":
        changed_forward(monkeypatch, target, lambda *_: 1 / 0)
        batching.step()
    elif end == "close":
        batching.close()
    elif end == "dropped":
        del batching
        gc.collect()
    else:
        while batching.busy:
            batching.step()
    assert not hooks()


@pytest.mark.slow
def test_nothing_grows_over_many_requests(target: Any) -> None:
    """Neither objects nor tensors, with a drafter that holds states of its own and prompts that begin alike."""
    batching, rng = ContinuousBatching(target, make_drafter(target), 4, 16, prefix_cache_tokens=200), random.Random(0)

    def held_after(count: int) -> tuple[int, int]:
        """Objects, and numbers in tensors, after so many requests, while a batch still runs."""
        for _ in range(count):
            ids = [*range(10, 10 + rng.choice([0, 12])), *(rng.randrange(6, VOCAB) for _ in range(rng.randrange(1, 9)))]
            draws = {"do_sample": True} if rng.random() < 0.3 else {}
            batching.submit({"input_ids": torch.tensor([ids]), "max_new_tokens": rng.randrange(1, 8), **draws}, 0)
            while len(batching._waiting) > 8:
                batching.step()
        while batching._waiting:
            batching.step()
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return len(gc.get_objects()), sum(each.numel() for each in tensors)

    held_after(100)
    before, after = held_after(100), held_after(400)
    assert after[0] < before[0] + 1500 and after[1] < 1.2 * before[1]
    assert batching._prefixes.size <= 200 and batching.reused_tokens > 0 and not batching._gone


class Counts(LogitsProcessor):
    """Forbids another token at each call, whatever the text."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls % 3, VOCAB, 3), -torch.inf)


def test_texts_with_a_processor_in_common_are_those_of_calls_in_order(target: Any) -> None:
    requests = [{"input_ids": torch.full((1, 5), 7 + index), "max_new_tokens": 8} for index in range(4)]
    processor = Counts()
    plain = [target.generate(**each, logits_processor=[processor]) for each in requests]
    found = generate_many(target, requests, CachebackDrafter(), logits_processor=[Counts()])
    for done in found:
        assert done.output.tolist() == plain[done.index].tolist()


def test_a_round_that_fails_ends_its_texts_alone(target: Any, monkeypatch: Any) -> None:
    requests = [{"input_ids": torch.full((1, 5), 7 + index), "max_new_tokens": 20} for index in range(5)]
    drafter = knowing(target, requests)
    batching = ContinuousBatching(target, drafter, 2)
    for each in requests:
        batching.submit(each)
    batching.step()
    closed = list[bool]()
    batching._running.drafting._call.stack.callback(lambda: closed.append(True))

    def fails(*_: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("of this round")

    monkeypatch.setattr(KnowingSession, "draft", fails)
    found = {}
    while batching.busy:
        found.update({done.index: done for done in batching.step()})
    assert [str(found[index].error) for index in (0, 1)] == ["of this round"] * 2 and closed == [True]
    for index in (2, 3, 4):
        assert new_tokens(found[index].output, requests[index]) == new_tokens(
            alone(target, requests[index]), requests[index]
        )


def test_a_batch_that_does_not_begin_closes_what_it_opened(target: Any) -> None:
    opened, closed = list[Call](), list[Call]()

    class Opens(WrappedDrafter):
        def session(self, call: Call) -> Session:
            opened.append(call)
            call.stack.callback(closed.append, call)
            if len(opened) == 1:
                raise RuntimeError("no session")
            return KnowingSession(self._texts, True)

    requests = [{"input_ids": torch.full((1, 5), 7 + index), "max_new_tokens": 6} for index in range(2)]
    drafter = Opens(make_drafter(target))
    drafter._texts = knowing(target, requests).texts
    batching = ContinuousBatching(target, drafter, 1)
    for each in requests:
        batching.submit(each)
    [failed] = batching.step()
    assert str(failed.error) == "no session" and closed == opened and len(opened) == 1
    while batching.busy:
        done = batching.step()
    assert done[0].output.tolist() == alone(target, requests[1]).tolist() and closed == opened and len(opened) == 2


def test_an_iterator_that_is_left_early_frees_the_batch(target: Any) -> None:
    requests = [{"input_ids": torch.full((1, 5), 7 + index), "max_new_tokens": 4 + index} for index in range(4)]
    running = generate_many(target, requests, CachebackDrafter(), max_batch_size=2)
    batching = running._batching
    next(running)
    assert batching.cache_tokens > 0
    running.close()
    assert batching.cache_tokens == 0 and list(running) == []


def test_an_event_loop_runs_between_rounds(target: Any) -> None:
    requests = [{"input_ids": torch.full((1, 5), 7 + index), "max_new_tokens": 4 + index} for index in range(4)]
    turns = []

    async def turn() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    async def decoded(most: int) -> list[Any]:
        other, found = asyncio.create_task(turn()), []
        running = generate_many(target, requests, CachebackDrafter(), max_batch_size=2)
        async for done in running:
            found.append(done)
            if len(found) == most:
                break
        other.cancel()
        return found

    for done in asyncio.run(decoded(4)):
        assert done.output.tolist() == alone(target, requests[done.index]).tolist()
    assert len(turns) > 4 and len(asyncio.run(decoded(1))) == 1
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(decoded(5), 0.001))


def test_an_error_at_the_end_of_a_text_is_its_own(target: Any, monkeypatch: Any) -> None:
    class FailsAtTheEnd(Listens):
        def end(self) -> None:
            raise RuntimeError("at the end")

    def fails(*_: Any) -> Any:
        raise RuntimeError("as an output")

    monkeypatch.setattr("hf_hsdraft.batching.text.as_output", fails)
    requests = [{"input_ids": torch.full((1, 5), 7 + index), "max_new_tokens": 6} for index in range(3)]
    given = [{**requests[0], "streamer": FailsAtTheEnd()}, {**requests[1], "return_dict_in_generate": True}]
    found = decoded_at_random(ContinuousBatching(target, CachebackDrafter(), 3), [*given, requests[2]], 1)
    assert [str(found[index].error) for index in (0, 1)] == ["at the end", "as an output"]
    assert found[2].output.tolist() == target.generate(**requests[2]).tolist()


def test_further_inputs_are_decoded_alone_before_they_are_read() -> None:
    target = model_of("gpt2", n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    ids = torch.randint(6, VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    request = {"input_ids": ids, "token_type_ids": ids.flip(1) % 7, "max_new_tokens": 8}
    batching = ContinuousBatching(target, CachebackDrafter(), chunk_size=4)
    batching.submit(request)
    [done] = batching.step()
    assert done.output.tolist() == target.generate(**request).tolist() and list(batching.alone) == [
        "it has further inputs"
    ]


def test_fuller_batches_draft_less_and_nothing_where_nodes_cost_too_much(target: Any) -> None:
    requests = [{"input_ids": torch.full((1, 5), 7 + index), "max_new_tokens": 12} for index in range(8)]

    def nodes_of_the_first_round(rows: int, cost: float) -> int:
        drafter = make_drafter(target)
        drafter.generation_config.node_cost = drafter.generation_config.depth_cost = cost
        found = generate_many(target, requests[:rows], drafter, max_batch_size=8)
        return max(done.statistics.drafted_nodes[0] for done in found)

    assert nodes_of_the_first_round(1, 0.0) > nodes_of_the_first_round(8, 0.0) > 0
    assert nodes_of_the_first_round(8, 1.0) == 0


def changed_forward(monkeypatch: Any, target: Any, change: Any) -> None:
    """A planted fault: `change` gets the cache and the inputs of each forward, and returns what is done afterwards."""
    forward = type(target.model).forward

    @harmless
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = given_cache(kwargs)
        kwargs, after = change(cache, kwargs)
        output = forward(self, *args, **kwargs)
        after()
        return output

    monkeypatch.setattr(type(target.model), "forward", changed)


@pytest.mark.parametrize("kind", ["hidden_state", "n-grams"])
@pytest.mark.parametrize("common", [0, 20])
def test_short_prompts_are_read_in_one_forward(kind: str, common: int, monkeypatch: Any) -> None:
    """Together from their beginning, or from where what they have in common ends."""
    target, shapes = make_target(), list[tuple[int, ...]]()

    def change(cache: Any, kwargs: Any) -> Any:
        shapes.append(tuple(kwargs["input_ids"].shape))
        return kwargs, lambda: None

    changed_forward(monkeypatch, target, change)
    begin = torch.arange(10, 10 + common)[None]
    requests = [{"input_ids": torch.cat([begin, torch.full((1, 1), 40)], dim=1), "max_new_tokens": 20}]
    for index, length in enumerate([7, 5, 6, 7, 60]):
        rest = torch.randint(6, VOCAB, (1, length), generator=torch.Generator().manual_seed(index))
        rest[0, 0] = 41 + index
        requests.append({"input_ids": torch.cat([begin, rest], dim=1), "max_new_tokens": 9})
    requests[3] |= {"do_sample": True, "seed": 5}
    drafter = make_drafter(target) if kind == "hidden_state" else CachebackDrafter()
    batching = ContinuousBatching(target, drafter, 6)
    batching.submit(requests[0])
    found = {each.index: each for each in batching.step()}
    shapes.clear()
    for each in requests[1:]:
        arguments = dict(each)
        batching.submit(arguments, arguments.pop("seed", 0))
    found |= {each.index: each for each in batching.step()}
    assert shapes[0] == (4, 7) and (1, 60) in shapes
    while batching.busy:
        found |= {each.index: each for each in batching.step()}
    assert not batching.alone and [found[index].reused_tokens for index in range(1, 6)] == [common] * 5
    for index, options in enumerate(requests):
        assert found[index].error is None
        assert new_tokens(found[index].output, options) == new_tokens(alone(target, options), options)


def test_a_prompt_that_cannot_be_read_fails_alone(target: Any) -> None:
    """It would be read in one forward with the others."""
    requests = [{"input_ids": torch.tensor([[5, 6, 7, 8 + index]]), "max_new_tokens": 5} for index in range(4)]
    requests[2]["input_ids"][0, 0] = VOCAB
    for done in generate_many(target, requests, CachebackDrafter()):
        if done.index == 2:
            assert isinstance(done.error, IndexError)
        else:
            assert done.error is None and done.output.tolist() == alone(target, requests[done.index]).tolist()


def test_least_lengths_are_the_library_s(target: Any) -> None:
    target = make_target(eos_token_id=[4, 9])
    ids = torch.randint(6, VOCAB, (1, 6), generator=torch.Generator().manual_seed(1))
    more = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 30}
    requests = [{"input_ids": ids, **more, "min_new_tokens": least} for least in (1, 8, 25)]
    requests += [{"input_ids": ids, **more, "min_length": 20, "do_sample": True, "seed": 3, "temperature": 2.0}]
    for done in generate_many(target, requests, CachebackDrafter()):
        plain = alone(target, requests[done.index])
        assert done.output.sequences.tolist() == plain.sequences.tolist()
        for own, other in zip(done.output.scores, plain.scores, strict=True):
            assert torch.equal(own.isinf(), other.isinf()) and torch.allclose(own, other, atol=1e-4)


def test_a_cache_with_windows_is_decoded_alone_before_its_prompt_is_read(monkeypatch: Any) -> None:
    fields = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = model_of("gemma2", **fields, head_dim=8, initializer_range=0.3, sliding_window=8)
    monkeypatch.setattr("hf_hsdraft.batching.text.Reading.go_on", lambda *_: 1 / 0)
    batching = ContinuousBatching(target, CachebackDrafter())
    batching.submit({"input_ids": torch.full((1, 12), 7), "max_new_tokens": 5})
    [done] = batching.step()
    assert done.error is None and list(batching.alone) == ["its cache has no rows that can be told apart"]


def test_where_the_cache_loses_tokens_texts_go_on_without_drafts(monkeypatch: Any) -> None:
    target, most = make_target(), 120

    def change(cache: Any, kwargs: Any) -> Any:
        def drop() -> None:
            for layer in () if cache is None else cache.layers:
                layer.keys, layer.values = layer.keys[:, :, -most:], layer.values[:, :, -most:]

        return kwargs, drop

    requests = [{"input_ids": torch.full((1, 8 + index), 7 + index), "max_new_tokens": 130} for index in range(4)]
    requests[1] |= {"do_sample": True, "seed": 4}
    requests[3]["max_new_tokens"] = 6
    changed_forward(monkeypatch, target, change)
    drafter = knowing(target, requests)
    batching = ContinuousBatching(target, drafter, 3)
    found = decoded_at_random(batching, requests, 2)
    for index, options in enumerate(requests):
        assert found[index].error is None
        assert new_tokens(found[index].output, options) == new_tokens(alone(target, options), options)
    assert "loses tokens" in found[0].statistics.reason and not found[3].statistics.reason
    assert sum(found[0].statistics.accepted_lengths) > 0  # before


def test_a_batch_drafts_again_once_a_text_whose_length_is_misread_has_left(monkeypatch: Any) -> None:
    target = make_target()

    def change(cache: Any, kwargs: Any) -> Any:
        positions = kwargs.get("position_ids")
        if cache is not None and cache.get_seq_length() >= 44 and positions is not None and positions.shape[-1] > 1:
            kwargs["position_ids"] = torch.zeros_like(positions)
        return kwargs, lambda: None

    changed_forward(monkeypatch, target, change)
    target.config.keep_last = 44  # a length from which it may read otherwise
    lengths = [(30, 40), *[(5, 30)] * 5]
    requests = [
        {"input_ids": torch.full((1, prompt), 7 + index), "max_new_tokens": new}
        for index, (prompt, new) in enumerate(lengths)
    ]
    batching = ContinuousBatching(target, knowing(target, requests), 2)
    for each in requests:
        batching.submit(each)
    found, batches = {}, set()
    while batching.busy:
        found |= {each.index: each for each in batching.step()}
        batches.add(id(batching._running))
    for index, options in enumerate(requests):
        assert new_tokens(found[index].output, options) == new_tokens(alone(target, options), options)
    assert "nothing is drafted beyond" in found[0].statistics.reason
    last = found[5].statistics
    assert len(batches - {id(None)}) == 1 and sum(last.accepted_lengths) > 5 and not last.reason


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
STEPPING_ASIDE = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "num_hidden_layers": 2, "n_groups": 2, "chunk_size": 8},
    "phi3": {
        **{**LLAMA, "max_position_embeddings": 512, "original_max_position_embeddings": 48},
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 48},
    },
}


@pytest.mark.parametrize("model_type", STEPPING_ASIDE)
def test_targets_that_cannot_be_drafted_for_are_decoded_plainly(model_type):
    target = model_of(model_type, **{"initializer_range": 0.3, **STEPPING_ASIDE[model_type]})
    texts = [[*range(6, 36), last] for last in (7, 9)]
    with attach(target, CachebackDrafter()):
        for done in generate_many(target, texts, max_new_tokens=30):
            assert done.error is None
            assert torch.equal(done.output, target.generate(torch.tensor([texts[done.index]]), max_new_tokens=30))
