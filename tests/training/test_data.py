"""Training data: prompts of every source, answers by the target, rows that are neither lost nor doubled."""

from __future__ import annotations

import copy
import errno
import math
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, make_drafter, write_prompts
from datasets import Dataset, load_dataset
from training_helpers import chat_of, planned, run

from hf_hsdraft import EagleConfig, EagleDrafter
from hf_hsdraft.methods.estimate.estimates import typical_size
from hf_hsdraft.training import files
from hf_hsdraft.training.data.conversations import (
    Conversation,
    Prompt,
    TokenizedConversation,
    prompts_from_dataset,
    read_jsonl,
    read_prompts,
    tokenize_conversation,
)
from hf_hsdraft.training.data.generating import (
    DrawnToken,
    TapRecorder,
    answer_prompts,
    prompts_that_fit,
    row_of,
    temperature_of,
    user_header,
)
from hf_hsdraft.training.data.inventing import invent_prompts, kind_of_openings
from hf_hsdraft.training.data.plan import TrainingPlan
from hf_hsdraft.training.data.vocabulary import (
    choose_draft_vocabulary,
    paying_size,
)
from hf_hsdraft.training.families.trainable import family_of
from hf_hsdraft.training.files import RowFolder
from hf_hsdraft.training.loop.start import prepared


def test_rows_survive_a_kill_without_loss_or_doubles(tmp_path):
    """Whatever is left of a part that was not finished is ignored; the next part never overwrites a finished one."""
    store = RowFolder(tmp_path, "Some rows.", {"seed": 1})
    store.append([{"key": "a", "value": 1}, {"key": "b", "value": 2}])
    (tmp_path / "data" / ".part-000-00001.parquet.77.partial").write_bytes(b"PAR1 half")
    again = RowFolder(tmp_path, "Some rows.", {"seed": 1})
    assert again.keys() == {"a", "b"}
    again.append([{"key": "b", "value": 3}, {"key": "c", "value": 4}])
    again.append([{"key": "e", "value": 7}])
    (tmp_path / "data" / "part-000-00000.parquet").rename(tmp_path / "kept")
    again.append([{"key": "f", "value": 8}])  # never in place of another part
    (tmp_path / "kept").rename(tmp_path / "data" / "part-000-00000.parquet")
    RowFolder(tmp_path, writer=1).append([{"key": "c", "value": 5}, {"key": "d", "value": 6}])
    assert [(row["key"], row["value"]) for row in again.rows()] == [
        ("a", 1), ("b", 2), ("c", 4), ("e", 7), ("f", 8), ("d", 6)
    ]  # fmt: skip
    loaded = load_dataset(str(tmp_path), cache_dir=str(tmp_path / "cache"))["train"]
    assert set(loaded["key"]) == set("abcdef")  # an ordinary data set to others; the recipe is not taken for data
    with pytest.raises(ValueError, match="seed: 1 -> 2"):
        RowFolder(tmp_path, "Some rows.", {"seed": 2})


def test_folders_of_one_name_are_not_confused(tmp_path):
    """By the cache of `datasets`, which would give one run's rows for another's."""
    keys = {}
    for name in "ab":
        folder = tmp_path / name / "data"
        RowFolder(folder, "Some rows.", {"seed": 1}).append([{"key": name}])
        keys[name] = load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))["train"]["key"][:]
    assert keys == {"a": ["a"], "b": ["b"]}
    RowFolder(tmp_path / "a" / "data").append([{"key": "c"}])
    grown = load_dataset(str(tmp_path / "a" / "data"), cache_dir=str(tmp_path / "cache"))["train"]["key"][:]
    assert grown == ["a", "c"]


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(path):
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"the disk is full .* run the same command again") as error:
        files.write_complete(tmp_path / "x.bin", full)
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def answer(target, tokenizer, prompts, folder, **kwargs) -> list[dict]:
    store = RowFolder(folder, recipe={})
    done = store.keys()
    pending = [prompt for prompt in prompts if prompt.key not in done]
    for batch in answer_prompts(target, tokenizer, pending, **kwargs):
        store.append([row_of(each) for each in batch])
    return sorted(store.rows(), key=lambda row: row["key"])


def test_a_bad_line_is_an_error_before_a_target_is_loaded_and_before_prompts_are_counted(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["w1"]}\n{"turns": "w2"}\n')
    plan = TrainingPlan(out=str(tmp_path / "out"), prompts=[str(path)])
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: expected `turns`"):
        prepared(plan, {}, "cpu")
    with pytest.raises(ValueError, match="1 conversations and prompts are too few"):
        prepared(replace(plan, skip_bad_lines=True), {}, "cpu")


def test_answers_without_a_padding_token(chatty, tokenizer, tmp_path):
    """Llama's and Mistral's tokenizers have none; batches are padded with the end of the turn then."""
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    prompts = read_prompts(write_prompts(tmp_path / "prompts.jsonl", 5))
    kwargs = {"temperatures": (0.0,), "max_new_tokens": 8, "batch_size": 5}
    rows = [answer(chatty, each, prompts, tmp_path / name, **kwargs) for name, each in (("a", bare), ("b", tokenizer))]
    assert [row["messages"] for row in rows[0]] == [row["messages"] for row in rows[1]]
    assert bare.pad_token is None


def test_greedy_answers_are_the_targets_own(chatty, tokenizer, tmp_path):
    """Batched and padded, each answer is what the target says to that prompt alone."""
    prompts = [Prompt.of([" ".join(f"w{n}" for n in range(index + 1))]) for index in range(5)]
    for row in answer(chatty, tokenizer, prompts, tmp_path, temperatures=(0.0,), max_new_tokens=10, batch_size=5):
        ids = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        alone = chatty.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
        assert row["messages"][1]["content"] == tokenizer.decode(alone, skip_special_tokens=True).strip()
        assert row["new_tokens"] == len(alone)


def test_drawn_tokens_have_the_probabilities_of_the_softmax():
    torch.manual_seed(0)
    logits, draws, temperature = torch.randn(1, 12), 40_000, 0.7
    logits[:, [0, 5, 11]] = float("-inf")
    scores = DrawnToken(temperature)(torch.zeros(draws, 1, dtype=torch.int64), logits.expand(draws, -1))
    assert (scores.isfinite().sum(dim=-1) == 1).all()
    counts = torch.bincount(scores.argmax(dim=-1), minlength=12)
    expected = draws * torch.softmax(logits[0] / temperature, dim=-1)
    assert not counts[expected == 0].any()
    found, wanted = counts[expected > 0], expected[expected > 0]
    assert ((found - wanted) ** 2 / wanted).sum() < 26.1  # chi-square of 8 degrees of freedom: one in a thousand


def test_chats_go_on_with_turns_the_target_invents(chatty, tokenizer, tmp_path):
    prompts = [Prompt.of([f"w{index} w1"]) for index in range(6)]
    rows = answer(chatty, tokenizer, prompts, tmp_path, max_new_tokens=6, invented_turns=2)
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and len(roles) <= 6
        assert row["temperature"] == temperature_of(Prompt.of([row["messages"][0]["content"]]), (0.0, 0.0, 0.7, 1.0), 0)
    assert any(len(row["messages"]) > 2 for row in rows)


def test_long_prompts_are_left_out_and_said_so(tokenizer):
    prompts = [Prompt.of(["w1"]), Prompt.of([" ".join(["w2"] * 50)])]
    skipped = []
    fitting = prompts_that_fit(tokenizer, prompts, 20, on_skip=lambda p, why: skipped.append((p, why)))
    assert fitting == prompts[:1]
    assert skipped[0][0] == prompts[1] and "53 tokens, more than 20" in skipped[0][1]


def test_invented_prompts_are_distinct_and_restartable(chatty, tokenizer, tmp_path):
    kind = replace(kind_of_openings(["", "w7 "]), temperature=1.5, continued=30)
    kwargs = {"kinds": [kind], "batch_size": 8}

    def invented(count, folder):
        return [prompt for batch in invent_prompts(chatty, tokenizer, count, folder, **kwargs) for prompt in batch]

    whole = invented(12, RowFolder(tmp_path / "whole"))
    assert len({prompt.key for prompt in whole}) == 12
    assert any(prompt.turns[0].startswith("w7") for prompt in whole)
    cut = RowFolder(tmp_path / "cut")
    first, resumed = invented(5, cut), invented(12, cut)
    assert (len(first), len(resumed)) == (5, 7)  # what is stored is not made again
    assert len({prompt.key for prompt in first + resumed}) == 12 == len(cut.keys())


def test_a_target_without_a_template_is_told_what_to_do(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="--chat-template"):
        user_header(bare)
    assert user_header(tokenizer, [{"role": "user", "content": "w1"}]) == "user w1 end user "


@pytest.mark.parametrize(
    ("column", "value", "turns"),
    [
        ("prompt", "w1 w2", ("w1 w2",)),
        ("turns", ["w1", "w2"], ("w1", "w2")),
        ("messages", [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}], ("w1",)),
        ("conversations", [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}], ("w1",)),
    ],
)
def test_prompts_come_from_any_data_set(tmp_path, column, value, turns):
    Dataset.from_list([{column: value, "other": 1}]).to_parquet(tmp_path / "rows.parquet")
    assert [prompt.turns for prompt in prompts_from_dataset(str(tmp_path))] == [turns]
    Dataset.from_list([{column: value}]).save_to_disk(tmp_path / "saved")
    assert [prompt.turns for prompt in prompts_from_dataset(str(tmp_path / "saved"))] == [turns]
    with pytest.raises(ValueError, match=rf"no column 'nothing'.*{column}"):
        prompts_from_dataset(str(tmp_path), column="nothing")
    with pytest.raises(ValueError, match="holds no prompts"):
        prompts_from_dataset(str(tmp_path), column="other")


def test_only_the_assistants_tokens_are_learned(tokenizer):
    chat = chat_of((("user", "w1 w2"), ("assistant", "w3 w4"), ("user", "w5"), ("assistant", "w6")))
    tokenized = tokenize_conversation(tokenizer, chat, 100)
    text = tokenizer.convert_ids_to_tokens(tokenized.input_ids.tolist())
    learned = [word for word, mine in zip(text, tokenized.answer_mask.tolist(), strict=True) if mine]
    assert learned == ["w3", "w4", "end", "w6", "end"]


def test_the_draft_vocabulary_is_the_most_frequent_answers(tokenizer):
    chats = [chat_of((("user", "w9 w9 w9 w9"), ("assistant", "w1 w1 w1 w2 w2 w3")))]
    tokenized = [tokenize_conversation(tokenizer, chat, 100) for chat in chats]
    chosen = choose_draft_vocabulary(tokenized, VOCAB, 3, always=[0])
    w1, w2 = tokenizer.convert_tokens_to_ids(["w1", "w2"])
    assert chosen.ids == [0, w1, w2]
    assert chosen.coverage == pytest.approx(5 / 7)  # six words and the end of the turn


@pytest.mark.parametrize("column_cost", [1e-5, 3e-4, 3e-3])
def test_a_draft_vocabulary_of_the_size_that_pays_is_nearly_the_best_for_new_texts(column_cost):
    vocab_size, generator = 2000, torch.Generator().manual_seed(0)
    ranks = torch.arange(1, vocab_size + 1, dtype=torch.float64)
    written = (1 / ranks**1.1)[torch.randperm(vocab_size, generator=generator)]  # ids tell nothing about frequency
    texts = torch.multinomial(written, 40_000, replacement=True, generator=generator).split(200)
    tokenized = [TokenizedConversation(text, torch.ones_like(text, dtype=torch.bool)) for text in texts]

    def worth(size):  # 1.5 as in the rule
        ids = choose_draft_vocabulary(tokenized, vocab_size, size).ids
        return 1.5 * float((written[ids].sum() / written.sum()).log()) - column_cost * size

    size = paying_size(tokenized, vocab_size, column_cost)
    best = max(range(20, vocab_size + 1, 20), key=worth)
    assert worth(size) == pytest.approx(worth(best), abs=0.01)
    assert abs(size - best) < 0.35 * best


def test_the_size_that_typically_pays_is_about_that_of_a_real_target():
    """515,000 answer tokens of SmolLM2-135M-Instruct give 11,250 tokens."""
    assert typical_size(49_152, 576 / 134_515_008) == pytest.approx(11_250, rel=0.1)
    frequency = [rank**-1.2 for rank in range(1, 401)]
    worth = [1.5 * math.log(sum(frequency[:size])) - 1e-3 * size for size in range(1, 401)]
    assert typical_size(400, 1e-3) == 1 + max(range(400), key=worth.__getitem__)


def test_a_column_costs_as_often_as_a_draft_reads_it(chatty):
    weights = sum(weight.numel() for weight in chatty.parameters())
    eagle = EagleDrafter(EagleConfig.for_target(chatty, num_draft_steps=5, draft_vocab_size=40))
    narrow = {"head": "trained", "hidden_size": 16, "num_attention_heads": 2, "draft_vocab_size": 40}
    for drafter, read in (
        (make_drafter(chatty), 32),
        (make_drafter(chatty, **narrow), 16),
        (eagle, 5 * 32),
        (make_drafter(chatty, num_draft_steps=2), 32),
    ):
        assert family_of(drafter).column_cost(drafter, chatty) == pytest.approx(read / weights)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{oops", "line 2: not valid JSON"),
        ("[1]", "a JSON object"),
        ('{"turns": []}', "non-empty"),
        ("{}", "`turns`"),
        ('{"messages": [{"role": "user"}]}', "`role` and `content`"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', "nothing to learn from"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "`content`, a text"),
        ('{"messages": [{"content": "w1"}]}', "`role` and `content`"),
        ('{"messages": {"role": "assistant"}}', "`role` and `content`"),
        ('{"messages": [{"role": "assistant", "content": "w1"}], "temperature": []}', "`temperature`"),
        ('{"messages": [{"role": "assistant", "content": "w1"}], "chat_template_kwargs": 1}', "`chat_template_kwargs`"),
        ('{"turns": ["\\ud800"]}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path, line, expected):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["w1"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2") as error:
        read_jsonl(path)
    assert expected in str(error.value)


def test_bad_lines_can_be_passed_over(tmp_path):
    path = tmp_path / "mixed.jsonl"
    lines = [
        '{"turns": ["w1"]}',
        "{oops",
        '{"turns": ["w2"]}',
        '{"messages": []}',
        '{"turns": "w1"}',
        '{"prompt": "w1"}',
    ]
    path.write_text("\n".join(lines) + "\n")
    bad: list[str] = []
    chats, prompts = read_jsonl(path, on_bad_line=bad.append)
    assert [prompt.turns for prompt in prompts] == [("w1",), ("w2",)] and not chats
    assert [f"line {number}:" in line for number, line in zip((2, 4, 5, 6), bad, strict=True)] == [True] * 4
    assert "found keys ['prompt']" in bad[-1]


def test_bad_lines_are_said_before_work_is_done(chatty, tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["w1"]}\n{oops\n' + '{"turns": ["w1"]}\n' * 60)
    with pytest.raises(ValueError, match="line 2: not valid JSON"):
        run(chatty, tokenizer, planned(tmp_path, "hidden-state", prompts=[str(path)]))
    assert not (tmp_path / "out").exists()


def test_a_disk_too_small_for_the_taps_is_refused(chatty, tokenizer, tmp_path, monkeypatch):
    from collections import namedtuple

    from hf_hsdraft.training.data import features

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: usage(10, 5, 100))
    chat = tokenize_conversation(tokenizer, chat_of((("user", "w1"), ("assistant", "w2"))), 100)
    with pytest.raises(OSError, match="--no-cache-taps"):
        features.FeatureCache(chatty, [1, 2], tmp_path).dataset([chat])
    assert not list(tmp_path.iterdir())


def test_cached_features_are_those_of_each_chat_alone_and_keep_their_order(chatty, tokenizer, tmp_path, monkeypatch):
    """Chats of similar lengths are read together, several forwards a shard; in float32, so that little is rounded."""
    from hf_hsdraft.training.data import features

    forwards: list[list[int]] = []
    read = features.read_features

    def spied(target, taps, conversations, device):
        forwards.append([len(chat.input_ids) for chat in conversations])
        return read(target, taps, conversations, dtype=torch.float32)

    monkeypatch.setattr(features, "read_features", spied)
    monkeypatch.setattr(features, "_READ_AT_ONCE_ON_CPU", 40)
    chats = [
        tokenize_conversation(tokenizer, chat_of((("user", f"w{length}"), ("assistant", "w2 " * length))), 100)
        for length in (9, 1, 60, 4, 2, 11, 3)
    ]
    dataset = features.FeatureCache(chatty, [1, 2], tmp_path).dataset(chats)
    assert len(dataset) == len(chats) and sorted(map(len, forwards)) == [1, 2, 4]
    assert all(len(lengths) * max(lengths) <= 40 or len(lengths) == 1 for lengths in forwards)
    for chat, cached in zip(chats, dataset, strict=True):
        alone = read(chatty, [1, 2], [chat], dtype=torch.float32)[0]
        assert torch.equal(cached.input_ids, chat.input_ids) and torch.equal(cached.answer_mask, chat.answer_mask)
        torch.testing.assert_close(cached.taps, alone.taps, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cached.final, alone.final, atol=1e-4, rtol=1e-4)
    forwards.clear()
    again = features.FeatureCache(chatty, [1, 2], tmp_path).dataset([chats[5], *chats[:2], chats[5]])  # other company
    assert not forwards
    assert [len(each.input_ids) for each in again] == [len(chats[index].input_ids) for index in (5, 0, 1, 5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_target_reads_as_it_answers_is_not_read_again(chatty, tokenizer, tmp_path, monkeypatch, temperature):
    """Recorded features are those of a forward over the whole chat, as far as answers are learned from."""
    from hf_hsdraft.training.data import features

    cache = features.FeatureCache(chatty, [1, 2], tmp_path)
    prompts = [Prompt.of([" ".join(f"w{n}" for n in range(index, 2 * index + 1))]) for index in range(1, 13)]
    sizes = {"max_new_tokens": 12, "batch_size": 12, "temperatures": (temperature,)}
    torch.manual_seed(0)
    [answers] = answer_prompts(chatty, tokenizer, prompts, **sizes, recorder=TapRecorder(cache.layers))
    if temperature:
        assert len({answered.new_tokens for answered in answers}) > 1  # rows end at different steps
    chats = [tokenize_conversation(tokenizer, Conversation.of(each.messages), 100) for each in answers]
    cache.keep((chat, *answered.read) for chat, answered in zip(chats, answers, strict=True))
    lengths = [min(len(chat.input_ids), len(answered.read[0])) for chat, answered in zip(chats, answers, strict=True)]
    # A random target says words that its tokenizer writes otherwise: such chats are read again.
    same = [
        torch.equal(chat.input_ids[:length], answered.read[0][:length])
        for chat, answered, length in zip(chats, answers, lengths, strict=True)
    ]
    assert same.count(True) >= 3
    chats, answers = ([each for each, kept in zip(all_, same, strict=True) if kept] for all_ in (chats, answers))
    alone = [features.read_features(chatty, [1, 2], [chat])[0] for chat in chats]
    monkeypatch.setattr(features, "read_features", None)
    for chat, kept, read in zip(chats, cache.dataset(chats), alone, strict=True):
        goals = kept.answer_mask.nonzero()
        assert len(goals) >= int(chat.answer_mask.sum()) - 1 and not (kept.answer_mask & ~chat.answer_mask).any()
        learned = int(goals.max())  # the last token that is predicted, from the states before it
        assert torch.equal(kept.input_ids, chat.input_ids)
        torch.testing.assert_close(kept.final[:learned].float(), read.final[:learned].float(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(kept.taps[:learned].float(), read.taps[:learned].float(), atol=2e-2, rtol=2e-2)
    wrong = answers[0].read[0].clone()
    wrong[3] += 1
    other = features.FeatureCache(chatty, [1, 2], tmp_path / "other")
    other.keep([(chats[0], wrong, answers[0].read[1])])
    assert not list((tmp_path / "other").iterdir())


def test_recorded_answers_are_the_targets_own(chatty, tokenizer, tmp_path):
    prompts = [Prompt.of([f"w{index} w1"]) for index in range(5)]
    sizes = {"temperatures": (0.0,), "max_new_tokens": 10, "batch_size": 5}
    answers = [
        [each.messages for batch in answer_prompts(chatty, tokenizer, prompts, **sizes, **more) for each in batch]
        for more in ({}, {"recorder": TapRecorder([1])})
    ]
    assert answers[0] == answers[1]


def test_nothing_is_drafted_where_states_are_recorded(chatty, tokenizer):
    """N-grams neither, though a text that repeats itself would have many."""
    ids = torch.tensor([[5, 6, 7] * 8])
    call = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    output = chatty.generate(ids, **call, assistant_model=TapRecorder((1,)))
    assert not any(output.statistics.drafted_nodes) and output.statistics.target_forwards == 12
