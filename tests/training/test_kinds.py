"""Prompts that the target invents: the catalogue of kinds, their shares, documents that fit, and restarts."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest

from hf_hsdraft.training.data import inventing
from hf_hsdraft.training.data.generating import Reply, TargetWriter
from hf_hsdraft.training.data.inventing import (
    KINDS,
    WORDS,
    Kind,
    chosen_kinds,
    invent_prompts,
    kind_of_openings,
    quotas,
    shortage,
    sketch,
)
from hf_hsdraft.training.files import RowFolder

BY_NAME = {kind.name: kind for kind in KINDS}


def test_the_table_names_only_what_exists():
    assert len(BY_NAME) == len(KINDS)
    texts = [text for kind in KINDS for text in (*kind.templates, *kind.documents, *kind.follow_ups)]
    texts += [word for words in WORDS.values() for word in words]
    assert {slot for text in texts for slot in re.findall(r"\{(\w+)\}", text)} <= WORDS.keys() | {"document"}
    for kind in KINDS:
        assert all(("{document}" in template) == bool(kind.documents) for template in kind.templates), kind.name
        assert not any("{document}" in text for text in (*kind.documents, *kind.follow_ups))
        assert len(set(kind.templates)) == len(kind.templates)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "free"], ids=lambda kind: kind.name)
def test_prompts_of_a_kind_differ(kind):
    drawn = [sketch(kind, random.Random(index)) for index in range(300)]
    assert drawn == [sketch(kind, random.Random(index)) for index in range(300)]
    assert all(not set(re.findall(r"\{(\w+)\}", each.text)) - {"document"} for each in drawn)
    # What differs is the text or, where a template has no words of its own, what the document is about.
    complete = [(each.text, each.asks, each.follow_ups) for each in drawn if not each.goes_on]
    assert len(set(complete)) > 0.9 * len(complete) > 0
    assert all(len(each.asks) == min(kind.parts, len(kind.documents)) == len(set(each.asks)) for each in drawn)


def test_the_same_word_twice_is_the_same_draw():
    kind = Kind("twice", ("{language} and {language}: {document}",), documents=("Write in {language}.",))
    for index in range(20):
        drawn = sketch(kind, random.Random(index))
        language = drawn.text.split()[0]
        assert drawn.text == f"{language} and {language}: {{document}}" and drawn.asks == (f"Write in {language}.",)


@pytest.mark.parametrize("count", [0, 1, 7, 100, 2000])
def test_shares_are_kept(count):
    kinds = chosen_kinds({"code": 1, "summary": 2, "free": 0.5})
    found = quotas(kinds, count)
    assert sum(found.values()) == count
    for kind in kinds:
        assert abs(found[kind.name] - count * kind.share / 3.5) < 1


def test_kinds_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"kinds='poetry' is unknown: expected one of free, question, "):
        chosen_kinds({"poetry": 1.0})
    with pytest.raises(ValueError, match="share 0 of kind 'code' is invalid"):
        chosen_kinds({"code": 0.0})


# The tiny target seldom ends a text, so here it has room and is told so.
SMALL = [
    replace(kind, document_tokens=30, continued=40, temperature=1.5, document_temperature=1.5)
    for kind in KINDS
    if kind.name in ("free", "summary", "document-question", "mathematics", "conversation", "long-context")
]


def invented(target, tokenizer, count, folder, kinds=SMALL, **kwargs):
    store = RowFolder(folder)
    known = list(store.rows())
    found = list(invent_prompts(target, tokenizer, count, store, kinds, max_prompt_tokens=90, **kwargs))
    made = [(row["kind"], tuple(row["turns"])) for row in store.rows()]
    assert made[len(known) :] == [(prompt.category, prompt.turns) for batch in found for prompt in batch]
    return made


def test_prompts_are_invented_by_shares_and_the_same_after_a_restart(chatty, tokenizer, tmp_path, monkeypatch):
    whole = invented(chatty, tokenizer, 12, tmp_path / "whole", batch_size=4)
    assert Counter(kind for kind, _ in whole) == {kind.name: 2 for kind in SMALL}
    assert len({turns for _, turns in whole}) == 12
    calls = []
    original = inventing._Writer.prompts

    def dies(writer, size):
        calls.append(size)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(writer, size)

    with monkeypatch.context() as patch:
        patch.setattr(inventing._Writer, "prompts", dies)
        with pytest.raises(KeyboardInterrupt):
            invented(chatty, tokenizer, 12, tmp_path / "cut", batch_size=4)
    assert 0 < len(RowFolder(tmp_path / "cut").keys()) < 12
    assert invented(chatty, tokenizer, 12, tmp_path / "cut", batch_size=4) == whole
    monkeypatch.setattr(inventing._Writer, "prompts", lambda *_: pytest.fail("prompts were invented again"))
    assert invented(chatty, tokenizer, 12, tmp_path / "cut") == whole


def test_batches_are_of_one_kind(chatty, tokenizer, tmp_path):
    kinds = [replace(kind, share=2.0 if kind.name == "free" else 1.0) for kind in SMALL if kind.name != "long-context"]
    found = invented(chatty, tokenizer, 18, tmp_path, kinds, batch_size=4)
    sizes = [len(list(rows)) for _, rows in groupby(RowFolder(tmp_path).rows(), key=lambda row: row["batch"])]
    assert len(found) == sum(sizes) == 18 and max(sizes) <= 4
    assert len({row["kind"] for row in RowFolder(tmp_path).rows()}) == len(kinds)
    assert Counter(kind for kind, _ in found).most_common(1)[0][0] == "free"


def test_documents_stand_in_prompts_and_fit(chatty, tokenizer, tmp_path):
    for kind, turns in invented(chatty, tokenizer, 12, tmp_path, batch_size=8):
        message = [{"role": "user", "content": turns[0]}]
        assert len(tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]) <= 90
        assert not re.search(r"\{\w+\}", "".join(turns)) and "…" not in "".join(turns)
        if kind in ("summary", "document-question", "long-context"):
            assert len(re.findall(r"\bw\d+\b", turns[0])) > 8  # the target's words
        assert (len(turns) > 1) == (kind == "conversation")


def test_the_document_is_what_the_target_writes_when_asked(chatty, tokenizer, tmp_path, monkeypatch):
    asked = []

    def reply(writer, histories, temperature, tokens):
        asked.extend(history[0]["content"] for history in histories)
        asked_now = [history[0]["content"] for history in histories]
        return [Reply(f"An answer that has some length to: {text} And then", tokens) for text in asked_now]

    monkeypatch.setattr(TargetWriter, "reply", reply)
    kind = Kind(
        "both", ("Before. {document}", "{document} After."), documents=("Tell of {thing}.", "Say {thing}."), parts=2
    )
    for _, (text,) in invented(chatty, tokenizer, 6, tmp_path, [kind], batch_size=4):
        parts = re.findall(r"An answer that has some length to: ((?:Tell of|Say) [^.]+\.)", text)
        assert len(parts) == 2 and set(parts) <= set(asked)
        assert "And then" not in text  # a sentence that does not end is cut


def test_a_kind_that_the_target_cannot_write_is_replaced_by_the_others(chatty, tokenizer, tmp_path):
    never = replace(BY_NAME["summary"], name="never", document_tokens=1)  # no document is that short
    given_up: list[str] = []
    found = invented(
        chatty, tokenizer, 8, tmp_path / "a", [never, BY_NAME["mathematics"]], batch_size=2, on_given_up=given_up.append
    )
    assert given_up == ["never"] and {kind for kind, _ in found} == {"mathematics"} and len(found) == 8
    assert invented(chatty, tokenizer, 3, tmp_path / "b", [never], batch_size=2) == []
    assert not shortage(3, 3) and "invented only 0 of 3 prompts" in shortage(0, 3)


def test_openings_go_on_with_one_space(chatty, tokenizer, tmp_path):
    kind = replace(kind_of_openings(["w7 w8 "]), temperature=1.5, continued=40)
    for name, (text,) in invented(chatty, tokenizer, 4, tmp_path, [kind]):
        assert name == "invented" and re.match(r"w7 w8 \S", text)
