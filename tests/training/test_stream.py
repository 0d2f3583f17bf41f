"""A drafter that learns while the target still answers."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from conftest import write_prompts
from test_pipeline import keys_of, plan, run
from training_helpers import interrupted, kill_at_step_three

from hf_hsdraft.core.progress import Reporter
from hf_hsdraft.training.data import gather
from hf_hsdraft.training.data.conversations import Conversation, Prompt
from hf_hsdraft.training.data.gather import ChatStream, StreamPlace
from hf_hsdraft.training.files import RowFolder
from hf_hsdraft.training.loop import run as run_module
from hf_hsdraft.training.loop.start import fingerprint


def test_each_conversation_is_learned_about_as_often_as_asked_for():
    groups = [list(range(10 * n, 10 * n + 10)) for n in range(1, 20)]
    learned = list(itertools.islice(ChatStream(range(10), groups, passes=3, seed=0), 600))
    for at in range(0, 600, 30):  # a group's conversations come when the group does
        group = set(range(at // 3, at // 3 + 10))
        assert group <= set(learned[at : at + 30])
    assert max(learned[:300]) < 100  # nothing is learned before it is answered
    counts = Counter(learned)
    assert len(counts) == 200 and sum(counts.values()) / len(counts) == 3


def test_a_stream_that_ends_is_learned_again():
    learned = list(itertools.islice(ChatStream([1, 2], [[3]], passes=1, seed=0), 12))
    assert set(learned[:2]) == {1, 2} and learned[2] == 3
    assert all(set(learned[at : at + 3]) == {1, 2, 3} for at in (3, 6, 9))


@pytest.mark.parametrize("drawn", [0, 450, 660, 10_000])
def test_a_resumed_stream_learns_what_was_answered_after_its_checkpoint(drawn):
    groups = [list(range(at, at + 20)) for at in range(200, 300, 20)]
    begun = list(itertools.islice(ChatStream(range(200), groups, passes=3, seed=0), drawn))
    place = StreamPlace.after(min(drawn, 780), 3, {})
    resumed = ChatStream(range(260), [[1000]], passes=3, seed=0, begin=place.begin)
    before = list(itertools.takewhile(lambda chat: chat < 1000, resumed))
    assert set(range(260)) <= {*begun, *before}
    assert len(before) <= 3 * (260 - min(drawn, 780) // 3 + 65)  # most is not learned as new again


@pytest.mark.parametrize("passes", [1, 2])
def test_a_stream_that_is_killed_again_and_again_learns_all(passes):
    """With groups larger than what is shuffled together, and answers that come between a checkpoint and a kill."""
    learned, place, samples, answered = set(), StreamPlace(), 0, 50
    for number, steps in enumerate([130, 170, 250, 400, 90, 500]):
        groups = [range(answered, answered + 300)]
        stream = ChatStream(range(answered), groups, passes, seed=number, begin=place.begin)
        learned |= set(itertools.islice(stream, steps))  # up to the checkpoint
        samples, answered = samples + steps, answered + 300
        place = StreamPlace.after(samples, passes, place.state()["attributes"])
    assert set(range(place.begin)) <= learned and place.begin > 0
    rest = ChatStream(range(answered), [[10_000]], passes, seed=0, begin=place.begin)
    assert set(range(answered)) <= learned | set(itertools.takewhile(lambda chat: chat < 10_000, rest))


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(run_module, "BEFORE_LEARNING", 6)


@pytest.mark.parametrize("cached", [False, True], ids=["taps in every step", "taps on disk"])
def test_a_killed_stream_answers_nothing_twice(chatty, tokenizer, tmp_path, monkeypatch, small_groups, cached):
    steps = kill_at_step_three(monkeypatch)
    prompts = [str(write_prompts(tmp_path / "prompts.jsonl", 30))]
    streamed = plan(tmp_path, prompts=prompts, stream=True, passes=1, cache_taps=cached, answer_batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        run(chatty, tokenizer, streamed)
    begun = keys_of(tmp_path / "out" / "data")
    assert 6 <= len(begun) < 20  # it learned before all was answered
    held_out = []
    evaluated = run_module.DrafterTrainer.evaluate

    def noting(self, *args, **kwargs):
        held_out.append([tuple(self.eval_dataset[n].input_ids.tolist()) for n in range(len(self.eval_dataset))])
        return evaluated(self, *args, **kwargs)

    monkeypatch.setattr(run_module.DrafterTrainer, "evaluate", noting)
    drafter = run(chatty, tokenizer, streamed)
    assert steps[-1] == 3 and drafter.generation_config.tree_size == 6
    keys = keys_of(tmp_path / "out" / "data")
    assert len(set(keys)) == len(keys) and keys[: len(begun)] == begun
    assert held_out and all(each == held_out[0] for each in held_out)
    recipe = json.loads((tmp_path / "out" / "training_recipe.json").read_text())["training"]
    assert f"{len(keys)} conversations" in recipe["data"]


def test_a_stream_invents_what_it_needs(chatty, tokenizer, tmp_path, small_groups):
    few = {"num_prompts": 40, "kinds": {"mathematics": 1.0}, "max_length": 100}
    invented = plan(tmp_path, prompts=(), **few, stream=True, answer_batch_size=2)
    run(chatty, tokenizer, invented, max_steps=2)
    assert len(keys_of(tmp_path / "out" / "prompts")) < 40


@pytest.mark.parametrize("answered", [False, True], ids=["prompts", "conversations"])
def test_taps_are_kept_where_the_target_computes_them_anyway(chatty, tokenizer, tmp_path, small_groups, answered):
    given = write_prompts(tmp_path / "given.jsonl", 30)
    if answered:
        chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3 w4"}]
        given.write_text((json.dumps({"messages": chat}) + "\n") * 30)
    run(chatty, tokenizer, plan(tmp_path, prompts=[str(given)], stream=True, answer_batch_size=2), max_steps=2)
    assert (tmp_path / "out" / "features").exists() is not answered


@pytest.mark.parametrize("greedy_only", [False, True])
def test_documents_written_for_prompts_are_learned_too(chatty, tokenizer, tmp_path, small_groups, greedy_only):
    few = {"num_prompts": 16, "kinds": {"summary": 1.0}, "max_length": 100, "greedy_only": greedy_only}
    invented = plan(tmp_path, prompts=(), **few, stream=True, answer_batch_size=2)
    run(chatty, tokenizer, invented, max_steps=20)
    rows = list(RowFolder(tmp_path / "out" / "data").rows())
    written = [row for row in rows if row["category"] == "document"]
    prompts = "".join(turns[0] for turns in (row["turns"] for row in RowFolder(tmp_path / "out" / "prompts").rows()))
    assert bool(written) != greedy_only
    for row in written:
        ask, answer = row["messages"]
        assert row["temperature"] > 0 and ask["role"] == "user" and answer["role"] == "assistant"
    assert greedy_only or sum(row["messages"][1]["content"][:30] in prompts for row in written) >= len(written) // 3
    recipe = json.loads((tmp_path / "out" / "training_recipe.json").read_text())["training"]
    learned = int(recipe["data"].partition(" conversations")[0])
    assert len(rows) - len(written) < learned <= len(rows) if written else learned == len(rows)


def test_a_resumed_stream_with_documents_holds_out_the_same(chatty, tokenizer, tmp_path, monkeypatch, small_groups):
    kill_at_step_three(monkeypatch)
    few = {"num_prompts": 40, "kinds": {"summary": 1.0}, "max_length": 100, "passes": 1}
    invented = plan(tmp_path, prompts=(), **few, stream=True, answer_batch_size=4)
    held_out = []
    learned = run_module._Run.learn_from

    def noting(self, conversations, *args, **kwargs):
        held_out.append([chat.messages for chat in conversations[: run_module.BEFORE_LEARNING]])
        return learned(self, conversations, *args, **kwargs)

    monkeypatch.setattr(run_module._Run, "learn_from", noting)
    with pytest.raises(KeyboardInterrupt):
        run(chatty, tokenizer, invented)
    run(chatty, tokenizer, invented, max_steps=4)
    assert held_out[0] == held_out[1] and len(held_out[0]) == run_module.BEFORE_LEARNING


def test_documents_are_kept_before_their_prompts_are_answered(chatty, tokenizer, tmp_path, monkeypatch, small_groups):
    few = {"num_prompts": 16, "kinds": {"summary": 1.0}, "max_length": 100}
    invented = plan(tmp_path, prompts=(), **few, stream=True, answer_batch_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(gather, "answer_prompts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(chatty, tokenizer, invented)
    written = list(RowFolder(tmp_path / "out" / "data").rows())
    assert written and all(row["category"] == "document" for row in written)
    first = next(answering(chatty, tokenizer, invented).groups(()))
    assert first == [Conversation.of(row["messages"]) for row in written]


def answering(target, tokenizer, plan):
    return gather.Answering(target, tokenizer, plan, 42, fingerprint(target), Reporter(lambda _: None))


def test_a_stream_of_given_prompts_looks_at_a_part_before_it_answers(chatty, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "_PART", 4)
    looked, original = [], gather.prompts_that_fit

    def looking(tokenizer, prompts, *arguments):
        looked.append(len(prompts))
        return original(tokenizer, prompts, *arguments)

    monkeypatch.setattr(gather, "prompts_that_fit", looking)
    prompts = [Prompt.of([f"w{number} w2"]) for number in range(10)]
    groups = answering(chatty, tokenizer, plan(tmp_path)).groups(prompts)
    assert next(groups) == [] and next(groups) and looked == [4]
    assert len([chat for group in groups for chat in group]) == 6 and looked == [4, 4, 2]


def test_a_stream_reads_its_rows_once(chatty, tokenizer, tmp_path, monkeypatch):
    read, rows, keys = [], RowFolder.rows, RowFolder.keys
    monkeypatch.setattr(RowFolder, "rows", lambda self: read.append(self) or rows(self))
    monkeypatch.setattr(RowFolder, "keys", lambda self: read.append(self) or keys(self))
    invented = plan(
        tmp_path, prompts=(), num_prompts=40, kinds={"mathematics": 1.0}, max_length=100, answer_batch_size=2
    )
    groups, counts = answering(chatty, tokenizer, invented).groups(()), []
    for _ in itertools.islice(groups, 6):
        counts.append(len(read))
    assert len(set(counts[1:])) == 1


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"passes": 0}, {}, "passes=0 is invalid: expected 1 or more"),
        ({"passes": 2, "stream": False}, {}, "--passes is for streams"),
        ({}, {"num_train_epochs": 2, "max_steps": -1}, "a stream has no epochs: give --max-minutes or --max-steps"),
    ],
)
def test_streams_that_cannot_be_learned_are_refused(chatty, tokenizer, tmp_path, fields, arguments, message):
    with pytest.raises(ValueError, match=message):
        run(chatty, tokenizer, plan(tmp_path, **{"stream": True, **fields}), **arguments)
    assert not (tmp_path / "out").exists()
