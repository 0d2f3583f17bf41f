"""Drafts from past texts: the index, the bound, the file, and texts that stay the target's own."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import threading
import time

import numpy as np
import pytest
import torch
from conftest import VOCAB, as_plain, each_with_its_seed, make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from session_helpers import forget
from transformers import GenerationConfig
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, CachebackDrafter, erase_history, list_history
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.kept import kept_with
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.drafters.base.saved_drafter import stored_options
from hf_hsdraft.methods.history import history as histories
from hf_hsdraft.methods.history.history import SUFFIX, History, history_of, read_all
from hf_hsdraft.methods.history.past_texts import (
    BLOCK,
    HISTORY_LENGTHS,
    HISTORY_MATCHES,
    HISTORY_MOST,
    HISTORY_RIGHT,
    LONGEST_MATCH,
    Continuation,
    HistoryDraft,
    HistorySession,
    TokenIndex,
    Trust,
)

FREE = {"node_cost": 0.0, "depth_cost": 0.0}


def array(tokens) -> np.ndarray:
    return np.array(list(tokens), dtype=np.int32)


def occurrences(text, tail, depth):
    """By brute force: place, tokens that match, and continuation of each match of three tokens or more."""
    found = {}
    for end in range(len(text)):
        length = 0
        while length < min(len(tail), LONGEST_MATCH, end + 1) and text[end - length] == tail[-1 - length] >= 0:
            length += 1
        following = list(itertools.takewhile(lambda token: token >= 0, text[end + 1 : end + 1 + depth]))
        if length >= min(HISTORY_LENGTHS) and following:
            found[end] = length, following
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([-1, 0, 1, 2, 2, 1]), min_size=1, max_size=150),
    st.lists(st.integers(0, 2), min_size=3, max_size=60),
    st.integers(1, 9),
    st.booleans(),
)
def test_the_index_finds_the_longest_and_newest_matches(text, tail, depth, in_parts):
    """All of them where there are few; otherwise those of the longest n-grams, the newest first."""
    text = [*text, *tail, 1, 2, -1] if len(text) % 2 else text  # where the tail occurs
    index = TokenIndex(len(text) + 1)
    index.tokens[index.begin : index.begin + len(text)] = text
    parts = [0, len(text) // 3, len(text) // 2, len(text)] if in_parts else [0, len(text)]
    for begin, end in itertools.pairwise(parts):
        index.enter(index.begin + begin, index.begin + end)
    found = {each.place - index.begin: (each.length, each.tokens) for each in index.find(tail, depth)}
    expected = occurrences(text, tail, depth)
    assert all(expected[place] == each for place, each in found.items())
    assert len(found) == min(len(expected), HISTORY_MATCHES)
    for length in HISTORY_LENGTHS:
        with_length = sorted((place for place in expected if expected[place][0] >= length), reverse=True)
        if len(with_length) < HISTORY_MATCHES:  # none of the longer ones gives way to shorter ones
            assert set(with_length) <= set(found)
        else:
            assert all(expected[place][0] >= length for place in found)


def test_a_draft_holds_the_most_probable_paths_and_its_probabilities_are_counted():
    found = [Continuation(9, 20, [1, 2, 3]), Continuation(8, 20, [1, 2, 4]), Continuation(7, 5, [5, 6])]
    trust = Trust()
    tree = HistoryDraft(0, found, trust).tree(16, 8)
    assert tree.fault() == "" and tree.tokens[:3] == (0, 1, 2)
    paths = {tuple(tree.tokens[each] for each in tree.path(node)): tree.scores[node] for node in range(1, len(tree))}
    assert set(paths) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,), (5, 6)}
    agreed = 1 - (1 - HISTORY_RIGHT[5]) / 2  # 16 to 23 tokens match
    alone = HISTORY_RIGHT[1]  # 4 and 5
    assert paths[1,] == pytest.approx(math.log(agreed))
    assert paths[5,] == pytest.approx(math.log((1 - agreed) * alone))
    assert paths[1, 2, 3] == paths[1, 2, 4] == pytest.approx(paths[1, 2] + math.log(HISTORY_RIGHT[5] / 2))
    assert HistoryDraft(0, found, trust).tree(16, 8, width=1).tokens == (0, 1, 2, 3)
    assert (
        len(HistoryDraft(0, found, trust).tree(2, 8)) == 3 and max(HistoryDraft(0, found, trust).tree(9, 1).depths) == 1
    )
    for _ in range(200):  # the long matches are always wrong, and the short one right
        HistoryDraft(0, found, trust).learn([5, 9])
    tree = HistoryDraft(0, found, trust).tree(16, 8)
    assert tree.tokens[1] == 5 and math.exp(tree.scores[1]) > 0.8
    assert all(count <= HISTORY_MOST + 1 for places in trust._counts for _, count in places)


def test_probabilities_approach_the_rate_at_which_continuations_are_right():
    rate, trust, numbers = 0.3, Trust(), random.Random(0)
    for _ in range(2000):
        HistoryDraft(0, [Continuation(9, 6, [1, 2])], trust).learn([1 if numbers.random() < rate else 3])
    assert math.exp(HistoryDraft(0, [Continuation(9, 6, [1])], trust).tree(4, 4).scores[1]) == pytest.approx(
        rate, abs=0.08
    )


def text_of(seed: int, length: int, vocab_size: int = 1000) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def test_the_least_recently_used_texts_leave_first():
    history = History(1000, most_tokens=5000)
    texts = [text_of(seed, 400) for seed in range(40)]
    for number, text in enumerate(texts):
        history.enter([(text[:100], text[100:])])
        assert history.find(texts[0][200:250], 4)[0].tokens == texts[0][250:254]  # used again and again
        assert history.held[1] <= 5000 and history.find(text[200:250], 4), number
    kept = [bool(history.find(text[200:250], 4)) for text in texts]
    assert kept[0] and kept[-1] and not any(kept[1:25]) and sum(kept) >= 0.6 * 5000 / 401
    history.enter([(text_of(99, 9000), [1, 2, 3])])  # longer than all there may be
    assert history.held[1] <= 5000 and history.find([*text_of(99, 9000)[-9:], 1], 2)[0].tokens == [2, 3]


def test_what_texts_begin_with_is_kept_once():
    history, prompt = History(1000), text_of(0, 320)
    answers = [text_of(seed, 100) for seed in range(1, 4)]
    for answer in answers:
        history.enter([(prompt, answer)])
    assert history.held[1] <= 320 + 3 * (100 + LONGEST_MATCH + 2 * BLOCK)
    for answer in answers:  # and matches reach back into the prompt
        tail = [*prompt[-40:], *answer[:8]]
        assert history.find(tail, 4)[0].length == LONGEST_MATCH and history.find(tail, 4)[0].tokens == answer[8:12]
    held = history.held
    history.enter([(prompt, answers[0]), (prompt, answers[2])])
    assert history.held == held, "all of it is known"
    history.enter([([*prompt, *answers[0], *text_of(9, 40)], text_of(10, 50))])  # the next turn of a chat
    assert history.held[1] <= held[1] + 90 + LONGEST_MATCH + 2 * BLOCK


def test_a_text_whose_beginning_has_left_is_entered_again():
    history, document = History(1000, most_tokens=1000), text_of(0, 400)
    answers = [text_of(seed, 60) for seed in range(1, 3)]
    for answer in answers:  # the second record lacks the document's beginning
        history.enter([(document, answer)])
    tail = [*document[-40:], *answers[1][:8]]
    for seed in range(10, 14):
        history.find(tail, 4)
        history.enter([(text_of(seed, 100), text_of(seed + 10, 50))])
    assert history.find(tail, 4) and not history.find(document[50:100], 4)
    history.enter([(document, answers[1])])
    assert history.find(document[50:100], 4)[0].tokens == document[100:104]


def test_texts_of_folders_used_long_ago_are_read_again(target, tmp_path):
    drafter, text = CachebackDrafter(), [token % VOCAB for token in text_of(0, 60)]
    folders = [str(tmp_path / name) for name in "abcdef"]
    history_of(drafter, target, folders[0]).enter([(text, [1, 2, 3])])
    for folder in folders[1:]:
        history_of(drafter, target, folder)
    assert list(kept_with(drafter, "histories", dict)[target]) == folders[-4:]
    assert history_of(drafter, target, folders[0]).find(text, 2)[0].tokens == [1, 2]


def test_short_texts_are_kept_once():
    history = History(1000)
    for _ in range(2):
        for seed in range(3):
            history.enter([([1, 2, 3], text_of(seed, 20))])
    assert history.held[:2] == (3, 3 * 23)


def test_ids_that_are_no_tokens_are_in_no_draft(target):
    history = History(VOCAB)
    history.enter([([1, 2, 3, VOCAB + 5, 4, 5, 6, 7], [8, 9])])
    assert history.find([1, 2, 3], 4) == [] and history.find([4, 5, 6], 4)[0].tokens == [7, 8, 9]
    session = HistorySession(Call(target, 1, DraftOptions.of(make_drafter(target))), history)
    session.observe([Accepted(0, [6], None, None, None, earlier=[VOCAB + 5, 4, 5])])
    assert session.draft([Ask(0, 6, 4, 8)])[0].tokens == (6, 7, 8, 9)
    session.observe([Accepted.of_tokens(0, [VOCAB + 7])])
    assert len(session.draft([Ask(0, VOCAB + 7, 4, 8)])[0]) == 1


def test_threads_share_a_history():
    """Texts come in while others look; nothing wrong is found, and nothing is lost."""
    history, stop, wrong = History(1000, most_tokens=60_000), threading.Event(), []
    texts = {seed: text_of(seed, 200) for seed in range(120)}
    following = {tuple(text[at - 3 : at]): text[at] for text in texts.values() for at in range(3, 200)}

    def look(seed):
        while not stop.is_set():
            text = texts[seed]
            for each in history.find(text[50:90], 5):
                if each.tokens[0] != following[tuple(text[87:90])]:
                    wrong.append(each)

    lookers = [threading.Thread(target=look, args=(seed,)) for seed in (0, 60)]
    writers = [
        threading.Thread(target=lambda part=part: [history.enter([([], texts[seed])]) for seed in range(part, 120, 3)])
        for part in range(3)
    ]
    for thread in (*lookers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in lookers:
        thread.join()
    assert not wrong and history.held[0] == 120
    assert all(history.find(text[50:90], 5)[0].tokens == text[90:95] for text in texts.values())


def file_in(folder):
    return folder / f"target{SUFFIX}"


def tokens_of(records) -> list[list[int]]:
    return [record.tokens.tolist() for record in records]


def test_files_of_an_earlier_version_and_damaged_ones_are_replaced(target, tmp_path):
    drafter, (name, key) = CachebackDrafter(), histories.identity_of(target)
    path = tmp_path / f"{name}-{key.hex()[:16]}{SUFFIX}"
    for content in (b"hsdraft-history1" + bytes(200), b"something else"):
        path.write_bytes(content)
        forget("histories")
        history = history_of(drafter, target, str(tmp_path))
        history.enter([([1, 2, 3], [4, 5])])
        assert tokens_of(read_all(path)) == [[1, 2, 3, 4, 5]]
        del history


def test_a_file_that_was_erased_or_removed_is_read_from_its_beginning(tmp_path):
    reader, writer = (History(1000, file_in(tmp_path)) for _ in range(2))
    writer.enter([([1, 2, 3], [4, 5])])
    reader.refresh()
    writer.erase()
    assert array([2, 3, 4]).tobytes() not in file_in(tmp_path).read_bytes()
    reader.refresh()
    assert reader.held[0] == 0
    writer.enter([([1, 2, 3], [6, 7])])
    reader.refresh()
    assert reader.find([1, 2, 3], 2)[0].tokens == [6, 7]
    file_in(tmp_path).unlink()
    reader.enter([([1, 2, 3], [8, 9])])
    writer.refresh()
    for each in (reader, writer):
        assert [found.tokens for found in each.find([1, 2, 3], 2)] == [[8, 9]]


def test_targets_differ_by_name_sizes_and_tokenizer(tmp_path, tokenizer):
    target = make_target()
    name, key = histories.identity_of(target)
    assert histories.identity_of(make_target(seed=4)) == (name, key), "weights do not count"
    assert histories.identity_of(make_target(hidden_size=64))[1] != key
    for place in ("one", "other"):
        tokenizer.save_pretrained(tmp_path / place / "same")
    backend = json.loads((tmp_path / "other" / "same" / "tokenizer.json").read_text())
    backend["model"]["vocab"]["w90"], backend["model"]["vocab"]["w91"] = 94, 93
    (tmp_path / "other" / "same" / "tokenizer.json").write_text(json.dumps(backend))
    keys = []
    for place in ("one", "other"):
        target.name_or_path = str(tmp_path / place / "same")
        keys.append(histories.identity_of(target))
    assert keys[0][0] == keys[1][0] == "same" and keys[0][1] != keys[1][1]


def write_forever(folder, seed):
    """Enters texts of a known form, until it is killed: a number, and what follows from it."""
    history, numbers = History(10**6, file_in(folder), most_tokens=40_000), random.Random(seed)
    while True:
        number = numbers.randrange(10**6 - 5000)
        history.enter([([number], list(range(number + 1, number + numbers.randrange(5, 3000))))])


@pytest.mark.slow
@pytest.mark.process
def test_writers_that_are_killed_leave_complete_texts_only(tmp_path):
    """Two at a time, killed at random; meanwhile and afterwards all that is read is as it was written."""
    context, numbers = multiprocessing.get_context("fork"), random.Random(1)
    reader, seen, most = History(10**6, file_in(tmp_path), most_tokens=40_000), 0, 0

    def check():
        nonlocal seen
        reader.refresh()
        for text in tokens_of(reader._texts.records()):
            assert text == list(range(text[0], text[0] + len(text)))
        seen = max(seen, reader.held[0])

    for round_number in range(12):
        writers = [context.Process(target=write_forever, args=(tmp_path, 2 * round_number + i)) for i in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            time.sleep(numbers.uniform(0.02, 0.25))
            check()
            os.kill(writer.pid, signal.SIGKILL)
        for writer in writers:
            writer.join()
        check()
        most = max(most, (tmp_path / f"target{SUFFIX}").stat().st_size)
        reader.enter([([round_number], [round_number + 1, round_number + 2])])  # no lock is left behind
    assert seen > 10 and most <= 4 * 40_000 + 24 * 5000
    assert sum(len(record.tokens) for record in read_all(tmp_path / f"target{SUFFIX}")) <= 40_000


def test_two_histories_in_one_folder_see_each_others_texts_and_erasing(tmp_path):
    one, other = (History(1000, file_in(tmp_path), most_tokens=3000) for _ in range(2))
    texts = [text_of(seed, 300) for seed in range(30)]
    for number, text in enumerate(texts):
        writer, reader = (one, other) if number % 3 else (other, one)
        writer.enter([(text[:50], text[50:])])
        reader.refresh()
        assert reader.find(text[100:140], 3)[0].tokens == text[140:143]
    assert one.held[1] <= 3000 and 3 <= len(read_all(tmp_path / f"target{SUFFIX}")) <= 10
    one.erase()
    assert other.find(texts[-1][100:140], 3), "until its next call"
    other.enter([([1, 2], [3, 4, 5])])
    one.refresh()
    assert one.held[:2] == other.held[:2] == (1, 5) and not other.find(texts[-1][100:140], 3)


def with_history(target, where, **options):
    drafter = make_drafter(target)
    vars(drafter.generation_config).update(history=str(where), **options)
    return drafter


PADDED = torch.tensor([[0, 0, 5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8, 9, 8]])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("options", [{}, {"beam_width": 1}, {"tree_sizing": "fixed"}, {"ngram_length": 0}])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_texts_stay_the_targets_own_whatever_the_history_holds(target, where, options, do_sample, tmp_path):
    drafter = with_history(target, tmp_path / "texts" if where == "folder" else where, **options)
    mask, call = (PADDED > 0).long(), {"max_new_tokens": 20, "do_sample": do_sample}
    found = history_of(drafter, target, drafter.generation_config.history)
    wrong = target.generate(PADDED[1:], max_new_tokens=20, do_sample=False)[0].tolist()
    found.enter([(wrong[:14], [3, 4, 5, 6] * 5), (wrong[:10], wrong[10:15] + [2] * 9)])  # right at first, or never
    for seed, rows in ((0, slice(1, 2)), (1, slice(1, 2)), (1, slice(1, 2)), (0, slice(0, 2)), (0, slice(0, 2))):
        if not do_sample or rows.stop - rows.start == 1:
            as_plain(target, drafter, PADDED[rows], seed=seed, attention_mask=mask[rows], **call)
            continue
        torch.manual_seed(0)
        drafted = target.generate(PADDED, attention_mask=mask, **call, assistant_model=drafter)
        assert drafted.tolist() == each_with_its_seed(target, PADDED, mask, seed=0, **call).tolist()
    kept = [text for text in tokens_of(found._texts.records()) if 0 in text[:2]]
    assert not kept, "padding is not kept"


@pytest.mark.parametrize("where", ["memory", "folder"])
@pytest.mark.parametrize("drafts", ["hidden states", "n-grams"])
def test_a_second_call_drafts_almost_all_of_its_text(target, prompt, where, drafts, tmp_path):
    place = str(tmp_path / "texts") if where == "folder" else where
    drafter = with_history(target, place) if drafts == "hidden states" else CachebackDrafter(**FREE)
    drafter.generation_config.history = place
    for sampled in ({"do_sample": False}, {"do_sample": True, "seed": 5}):
        first, second = (as_plain(target, drafter, prompt, max_new_tokens=60, **sampled).statistics.tau for _ in "12")
        assert second > 5 and second > 2.5 * first
    other = with_history(target, place)  # shares a folder, and no memory
    tau = as_plain(target, other, prompt, max_new_tokens=60).statistics.tau
    assert (tau > 5) == (where == "folder")


def test_samples_of_a_batch_draft_from_each_other(target):
    """Rows of equal prompts at a low temperature; the second differs from the first only in being later."""
    session = HistorySession(_call_of_two(target), History(VOCAB))
    text = text_of(3, 60, VOCAB)
    session.observe([Accepted(row, [7], None, None, None, earlier=[4, 5, 6]) for row in range(2)])
    for begin in range(0, 40, 4):
        session.observe([Accepted.of_tokens(0, text[begin : begin + 4])])
    session.observe([Accepted.of_tokens(1, text[:3])])
    first, second = session.draft([Ask(0, text[39], 8, 8), Ask(1, text[2], 8, 8)])
    assert second.tokens == tuple(text[2:11]) and text[10] not in first.tokens
    session.keep([1])
    session.observe([Accepted.of_tokens(1, text[3:5])])
    assert session.draft([Ask(1, text[4], 8, 8)])[0].tokens == tuple(text[4:13])


def _call_of_two(target):
    class Texts:
        foresight = None

        def room(self, row):
            return 50

    return Call(target, 2, DraftOptions.of(make_drafter(target)), Texts())


def test_a_call_that_fails_leaves_the_history_whole(target, prompt, tmp_path):
    class Fails:
        def put(self, tokens):
            self.count = getattr(self, "count", 0) + 1
            if self.count > 3:
                raise KeyboardInterrupt

        def end(self):
            pass

    drafter = with_history(target, tmp_path / "texts")
    as_plain(target, drafter, prompt, max_new_tokens=30)
    held, [path] = list_history(tmp_path / "texts"), list((tmp_path / "texts").glob(f"*{SUFFIX}"))
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        target.generate(prompt + 1, max_new_tokens=30, do_sample=False, assistant_model=drafter, streamer=Fails())
    assert path.read_bytes() == before and list_history(tmp_path / "texts") == held


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_only_the_owner_can_read_a_folder(target, prompt, tmp_path):
    before = os.umask(0)
    try:
        as_plain(target, with_history(target, tmp_path / "texts"), prompt, max_new_tokens=5)
    finally:
        os.umask(before)
    places = [tmp_path / "texts", *(tmp_path / "texts").iterdir()]
    assert len(places) == 2 and all(path.stat().st_mode & 0o077 == 0 for path in places)


def test_what_is_held_can_be_listed_and_erased(target, prompt, tmp_path, tokenizer):
    folder, in_memory = tmp_path / "texts", with_history(target, "memory")
    in_folder = with_history(target, folder)
    for drafter in (in_memory, in_folder):
        as_plain(target, drafter, prompt, max_new_tokens=9)
    [held], [stored] = list_history(in_memory), list_history(folder)
    assert list_history(in_folder) == [stored]
    assert held.texts == stored.texts == 1 and held.tokens == stored.tokens == 20 and held.path is None
    assert stored.target == "llama" and stored.path.stat().st_size == stored.bytes
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run = CliRunner().invoke(app, ["history", "list", str(folder), "--texts", str(tmp_path / "tokenizer")])
    assert run.exit_code == 0 and "llama" in run.output and f"{stored.bytes / 1000:.1f} KB" in run.output
    assert tokenizer.decode(prompt[0])[:40] in run.output
    with pytest.raises(ValueError, match="no history of 'another'"):
        erase_history(folder, "another")
    assert list_history(folder)
    assert "1 texts erased" in CliRunner().invoke(app, ["history", "erase", str(folder)]).output
    assert list_history(folder) == [] and array(prompt[0, :4].tolist()).tobytes() not in stored.path.read_bytes()
    assert history_of(in_folder, target, str(folder)).held[0] == 0, "also in this process"
    assert erase_history(in_memory) == 1 and list_history(in_memory)[0].texts == 0
    with pytest.raises(NotADirectoryError, match="is no folder"):
        list_history(tmp_path / "nowhere")
    in_folder.save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match="holds no past texts: expected the folder that the option `history` names"):
        list_history(tmp_path / "drafter")


@pytest.mark.parametrize("content", [b"hsdraft-history1", "another program's"])
def test_files_that_are_no_histories_are_named_and_left(tmp_path, caplog, content):
    history, other = History(100, tmp_path / f"mine-0{SUFFIX}"), tmp_path / f"other-0{SUFFIX}"
    history.enter([([1, 2], [3])])
    if isinstance(content, bytes):
        other.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(other)) as base, base:
            base.execute("CREATE TABLE texts (number INTEGER PRIMARY KEY)")
    before = other.read_bytes()
    with caplog.at_level(logging.WARNING):
        [held] = list_history(tmp_path)
    assert held.texts == 1 and str(other) in caplog.text and "earlier version" in caplog.text
    assert other.read_bytes() == before
    with pytest.raises(OSError, match="unable to open"):
        read_all(tmp_path / f"missing-0{SUFFIX}")
    assert sorted(tmp_path.iterdir()) == [tmp_path / f"mine-0{SUFFIX}", other]
    assert erase_history(tmp_path) == 1
    assert other.exists() == isinstance(content, str), "another program's database stays"


def test_a_file_damaged_in_its_middle_is_replaced(target, prompt, tmp_path, caplog):
    drafter = with_history(target, tmp_path)
    history = history_of(drafter, target, str(tmp_path))
    history.enter([([seed], text_of(seed, 400, VOCAB)) for seed in range(30)])
    [path] = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    middle = slice(len(content) // 2, len(content) // 2 + 3000)
    content[middle] = bytes(each ^ 0xFF for each in content[middle])
    path.write_bytes(content)
    another = copy.copy(drafter)
    histories._of_files.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # in this process, which knew the file, and as in a new one
            as_plain(target, another, prompt, max_new_tokens=9)
            another = with_history(target, tmp_path)
    assert "is replaced" in caplog.text and len(read_all(path)) == 1


def test_calls_draft_from_what_is_known_while_another_process_writes(target, prompt, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(histories, "_PATIENCE", {True: 0.1, False: 0.1})
    drafter = with_history(target, tmp_path)
    as_plain(target, drafter, prompt, max_new_tokens=9)
    [path] = tmp_path.iterdir()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as base:
        for held in ("IMMEDIATE", "EXCLUSIVE"):
            base.execute(f"BEGIN {held}")
            output = as_plain(target, drafter, prompt, max_new_tokens=9)
            base.execute("ROLLBACK")
    assert output.statistics.tau > 2 and len(read_all(path)) == 1


def test_a_text_whose_writing_fails_is_written_later(tmp_path, monkeypatch):
    history, path = History(100, tmp_path / f"m-0{SUFFIX}"), tmp_path / f"m-0{SUFFIX}"
    history.enter([([1, 2, 3], [4, 5])])

    @contextlib.contextmanager
    def full(*given):
        with opened(*given) as base:
            yield base
            raise OSError("no space")

    opened = histories._opened
    with monkeypatch.context() as patched:
        patched.setattr(histories, "_opened", full)
        with pytest.raises(OSError, match="no space"):
            history.enter([([7, 8, 9], [10, 11])])
    history.enter([([7, 8, 9], [10, 11])])
    assert tokens_of(read_all(path)) == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]


def test_a_call_can_leave_the_history_out(target, prompt):
    drafter = CachebackDrafter(history="memory")
    target.generate(
        prompt, assistant_model=drafter, max_new_tokens=8, generation_config=GenerationConfig(history="off")
    )
    assert not list_history(drafter)


def test_erasing_removes_damaged_files(tmp_path):
    for name in (f"model-0{SUFFIX}", ".history-left", ".history.lock"):  # also what earlier versions have left
        (tmp_path / name).write_bytes(b"something else")
    assert erase_history(tmp_path) == 0 and not list(tmp_path.iterdir())


def test_texts_of_a_drafter_with_adapters_can_be_listed_and_erased(target, prompt):
    peft = pytest.importorskip("peft")
    drafter = make_drafter(target)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), drafter, "one")
    drafter.generation_config.history = "memory"
    target.generate(prompt, assistant_model=drafter, max_new_tokens=8)
    assert [each.texts for each in list_history(drafter)] == [1] and erase_history(drafter) == 1


def test_nobody_turns_it_on_for_others(target, prompt, tmp_path, caplog, monkeypatch):
    drafter = with_history(target, tmp_path / "of_users" / "texts")
    drafter.save_pretrained(tmp_path / "saved")
    drafter_of_ngrams = CachebackDrafter()
    drafter_of_ngrams.generation_config.history = str(tmp_path / "of_users" / "texts")
    drafter_of_ngrams.save_pretrained(tmp_path / "ngrams")
    for place in ("saved", "ngrams"):
        files = [path for path in (tmp_path / place).rglob("*") if path.is_file()]
        assert not [path for path in files if b"of_users" in path.read_bytes()]
        assert AutoDrafter.from_pretrained(tmp_path / place).generation_config.history == "off"
    path = tmp_path / "saved" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "history": "memory"}))
    assert "history" not in stored_options(path) and "It is not used" in caplog.text
    assert AutoDrafter.from_pretrained(tmp_path / "saved").generation_config.history == "off"
    monkeypatch.setattr(target, "generation_config", copy.deepcopy(target.generation_config))
    target.generation_config.history = "memory"
    plain = make_drafter(target)
    target.generate(prompt, max_new_tokens=5, do_sample=False, assistant_model=plain)
    assert list_history(plain) == []


@pytest.mark.parametrize("value", ["", 3, True, None, ["memory"]])
def test_wrong_values_are_errors(target, prompt, value):
    drafter = make_drafter(target)
    drafter.generation_config.history = value
    if value is None:
        assert DraftOptions.of(drafter).history == "off"
        return
    with pytest.raises(ValueError, match=r'history=.* expected "off", "memory", or a folder'):
        target.generate(prompt, max_new_tokens=5, assistant_model=drafter)


def test_a_folder_that_cannot_be_written_is_an_error_before_any_work(target, prompt, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    forwards = []
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: forwards.append(1))
    with pytest.raises(OSError, match=r"cannot be used .* name a folder that can be written"):
        target.generate(prompt, max_new_tokens=5, assistant_model=with_history(target, tmp_path / "file" / "texts"))
    assert not forwards


def test_a_text_that_cannot_be_written_is_returned_all_the_same(target, prompt, tmp_path, monkeypatch, caplog):
    drafter = with_history(target, tmp_path / "texts")

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(History, "_write", full)
    as_plain(target, drafter, prompt, max_new_tokens=9)
    assert "no space left" in caplog.text and not list_history(tmp_path / "texts")


def test_drawn_nodes_are_drafted_without(target, prompt):
    drafter = with_history(target, "memory", tree_builder="gumbel", verification="rejection")
    assert DraftOptions.of(drafter).history == "off"
    target.generate(prompt, max_new_tokens=9, do_sample=True, assistant_model=drafter)
    assert list_history(drafter) == []
