"""What training chats hold: near-duplicates of prompts that judge, and counts of n-grams, against brute force."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import write_prompts
from typer.testing import CliRunner

from hf_hsdraft.cli.main import app
from hf_hsdraft.methods.coverage import count_covered, count_kinds
from hf_hsdraft.methods.near_duplicates import Overlap, PromptIndex
from hf_hsdraft.training.data.conversations import Conversation, Prompt, read_chats
from hf_hsdraft.training.data.gather import read_sources
from hf_hsdraft.training.data.plan import TrainingPlan
from hf_hsdraft.training.files import RowFolder

LONG = "The lighthouse keeper counts the ships that pass at night, and writes their names into a book."


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice("abcd") for _ in range(words))


def naive_overlap(prompt: str, chat: str) -> float:
    """The definition, word by word."""
    one, other = prompt.split(), chat.split()
    if len(one) < 8:
        return float(one == other)
    every = [other[at : at + 8] for at in range(len(other) - 7)]
    own = {tuple(one[at : at + 8]) for at in range(len(one) - 7)}
    return sum(list(gram) in every for gram in own) / len(own)


def test_the_overlap_is_that_of_its_definition():
    rng = random.Random(0)
    prompts = [text(rng, rng.randint(1, 14)) for _ in range(60)]
    chats = [text(rng, rng.randint(1, 400)) for _ in range(200)] + [
        f"{prompt} {text(rng, 9)}" for prompt in prompts[:9]
    ]
    found = PromptIndex([[prompt] for prompt in prompts]).overlaps([[chat] for chat in chats])
    assert any(0 < each.share < 1 for each in found) and any(each.near for each in found)
    for prompt, each in zip(prompts, found, strict=True):
        shares = [naive_overlap(prompt, chat) for chat in chats]
        assert each.share == pytest.approx(max(shares))
        assert each.chat is None if each.share == 0 else shares[each.chat] == pytest.approx(each.share)


def test_case_and_marks_do_not_hide_a_duplicate_and_small_words_do_not_make_one():
    index = PromptIndex([[LONG, "Why?"], ["Hello!"], ["Make it shorter, and say it again for a child of ten."]])
    assert set(index.shares([LONG.upper().replace(",", " -")])) == {0}
    assert index.shares([f"Summarize this text.\n\n{LONG}"]) == {0: 1.0}
    assert index.shares(["Tell me a story.", LONG]) == {0: 1.0}  # in any turn
    assert not index.shares(["Tell me a story.", "Why?", "Hello"])  # what chats share anyway
    assert index.shares(["hello"]) == {1: 1.0}
    assert index.overlaps([["unlike"]]) == [Overlap()] * 3
    assert not PromptIndex([[""]]).shares([""])


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(asked: str, answer: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], **fields}


def answered(category: str, asked: str, *answers: str) -> Conversation:
    roles = [("user", asked), *(("assistant", answer) for answer in answers)]
    return replace(Conversation.of([{"role": role, "content": text} for role, text in roles]), category=category)


def said(chats: list[Conversation | Prompt]) -> list[tuple[list[str], list[str], str]]:
    return [([*chat.turns], [*chat.answers], chat.category) for chat in chats]


def test_chats_are_read_from_files_and_from_runs(tmp_path):
    rows = [chat("one", "two", source="code"), {"turns": ["three", "four"], "category": "chat"}]
    both = [(["one"], ["two"], "code"), (["three", "four"], [], "chat")]
    assert said(read_chats(write(tmp_path / "chats.jsonl", rows))) == both
    RowFolder(tmp_path / "run" / "data").append([{"key": "a", "category": "code", **chat("one", "two")}])
    assert said(read_chats(tmp_path / "run")) == said(read_chats(tmp_path / "run" / "data")) == both[:1]
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        read_chats(tmp_path / "gone")
    with pytest.raises(ValueError, match="holds no chats"):
        read_chats(tmp_path)


def test_counts_by_kind_are_those_of_a_naive_count():
    chats = [
        answered("one", "a b", "x y x y"),
        answered("one", "c", "x x", "y z"),
        answered("two", "d d d", "z"),
    ]
    one, two, every = count_kinds(chats, str.split)
    assert (one.kind, one.chats, one.asked, one.answered) == ("one", 2, 3, 8)
    assert one.distinct[0] == 3 / 8 and one.distinct[1] == pytest.approx(4 / 5)  # xy yx xy | xx | yz
    assert one.distinct[2] == 1.0
    assert (two.kind, two.answered, two.distinct[0]) == ("two", 1, 1.0)
    assert (every.kind, every.chats, every.asked, every.answered) == ("all", 3, 6, 9)
    others = [Prompt.of(["x y z q"], "new"), answered("old", "never looked at", "x y")]
    new, old, both = count_covered(chats, others, str.split)
    assert (new.kind, new.texts, new.tokens) == ("new", 1, 4)
    assert new.covered == (3 / 4, 2 / 3, 0.0)  # no answer holds "x y z"
    assert old.covered[:2] == (1.0, 1.0) and old.covered[2] != old.covered[2]  # there are no three tokens
    assert both.covered == (5 / 6, 3 / 4, 0.0)


def test_near_duplicates_are_not_learned_from(tokenizer, tmp_path):
    judge = write(tmp_path / "dev.jsonl", [{"turns": [LONG]}, {"turns": ["w1"]}])
    prompts = [{"turns": [f"Translate to German: {LONG}"]}, {"turns": ["w1 w2"]}, {"turns": ["w1"]}]
    given = [chat(LONG, "w3"), chat("w4", LONG)]
    said: list[str] = []
    plan = TrainingPlan("out", prompts=[write(tmp_path / "train.jsonl", prompts + given)], exclude_near=[judge])
    finished, asked = read_sources(plan, tokenizer, 0, None, said.append)
    assert [prompt.turns for prompt in asked] == [("w1 w2",)]
    assert [chat.messages[0]["content"] for chat in finished] == ["w4"]  # an answer may hold what is asked elsewhere
    assert said == [
        "1 of 2 chats left out: near-duplicates of --exclude-near",
        "2 of 3 chats left out: near-duplicates of --exclude-near",
    ]


def test_the_commands_print_tables_with_their_definitions(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "target")
    train = write(tmp_path / "train.jsonl", [chat(LONG, "w1 w2 w3", source="code"), chat("w5", "w1 w9", source="chat")])
    dev = write_prompts(tmp_path / "dev.jsonl", 3)
    arguments = ["data", "coverage", "--train", train, "--against", str(dev), "--target", str(tmp_path / "target")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "distinct-4" in result.output and "covered-3" in result.output
    # w0 w1 w3, w1 w3 w3 and w2 w5 w3: w1, w2 and w3 are known, no pair is.
    totals = [line.split("\u2502")[-4:-1] for line in result.output.splitlines() if "\u2502 all " in line]
    assert [[cell.strip() for cell in cells] for cells in totals] == [
        ["0.800", "1.000", "nan"],
        ["0.778", "0.000", "0.000"],
    ]
    result = CliRunner().invoke(
        app, ["data", "overlap", "--train", train, "--prompts", str(dev)], catch_exceptions=False
    )
    assert result.exit_code == 0 and "0 of 3 prompts have near-duplicates among 2 training chats" in result.output
    write(Path(dev), [{"turns": [f"Say it in French: {LONG}"]}])
    result = CliRunner().invoke(app, ["data", "overlap", "--train", train, "--prompts", str(dev)])
    assert result.exit_code == 1 and "1 of 1 prompts" in result.output and "Near-duplicate: above 0.5" in result.output
    assert "--exclude-near" in result.output
