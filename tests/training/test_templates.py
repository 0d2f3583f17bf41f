"""Chats with more than texts: messages go to the chat template unchanged, and what it cannot say is an error."""

from __future__ import annotations

import copy
import json

import pytest
from training_helpers import planned, run

from hf_hsdraft.training.data.conversations import Conversation, read_jsonl, tokenize_conversation

RICH = (
    "{% if tools %}{% for t in tools %}w1 {{ t.function.name }} {% endfor %}{% endif %}"
    "{% for d in documents or [] %}w2 {{ d.text }} {% endfor %}"
    "{% for m in messages %}{{ m.role }} {% if m.name %}{{ m.name }} {% endif %}"
    "{% if m.reasoning_content or m.thinking %}{{ m.reasoning_content or m.thinking }} {% endif %}"
    "{% if m.content is string %}{{ m.content }} {% else %}{% for p in m.content or [] %}{{ p.text or p.type }} "
    "{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}w4 {{ c.function.name }} {% endfor %}"
    "{% if loud %}w5 {% endif %}end {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "w40", "arguments": {"w41": 1}}}
ASK = {"role": "user", "content": "w10"}
ANSWER = {"role": "assistant", "content": "w11"}
CALLED = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "w12"}, ANSWER]
TOOLS = [{"type": "function", "function": {"name": "w42", "description": "w", "parameters": {"type": "object"}}}]
PLAIN = "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant {% endif %}"


def templated(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"messages": [ASK, ANSWER]}, "w11 end"),
        ({"messages": [ASK, *CALLED]}, "w4 w40 end w11 end"),
        ({"messages": [ASK, {**ANSWER, "reasoning_content": "w13"}]}, "w13 w11 end"),
        ({"messages": [ASK, {**ANSWER, "thinking": "w13"}]}, "w13 w11 end"),
        ({"messages": [{**ASK, "content": [{"type": "text", "text": "w14"}, {"type": "w15"}]}, ANSWER]}, "w11 end"),
        ({"messages": [{**ASK, "name": "w16"}, ANSWER]}, "w11 end"),
        ({"messages": [ASK, ANSWER], "tools": TOOLS}, "w11 end"),
        ({"messages": [ASK, ANSWER], "documents": [{"title": "w17", "text": "w18"}]}, "w11 end"),
        ({"messages": [ASK, ANSWER], "chat_template_kwargs": {"loud": True}}, "w11 w5 end"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}, ASK, ANSWER]}, "w11 end"),
        ({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": []}, ASK, ANSWER]}, "w11 end"),
    ],
)
def test_a_chat_is_what_the_template_makes_of_it(tokenizer, tmp_path, row, learned):
    rich = templated(tokenizer, RICH)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row))
    [chat], _ = read_jsonl(path)
    found = tokenize_conversation(rich, chat, 1000)
    options = {name: row[name] for name in ("tools", "documents") if name in row} | row.get("chat_template_kwargs", {})
    expected = rich.apply_chat_template(row["messages"], tokenize=False, **options)
    assert found.input_ids.tolist() == rich(expected, add_special_tokens=False)["input_ids"]
    assert rich.convert_ids_to_tokens(found.input_ids[found.answer_mask].tolist()) == learned.split()


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (PLAIN, {"messages": [ASK, {**ANSWER, "tool_calls": [CALL]}]}, r"leaves `tool_calls` of message 2 \(assist"),
        (PLAIN, {"messages": [ASK, {**ANSWER, "reasoning_content": "w1"}]}, "leaves `reasoning_content` of message 2"),
        (PLAIN, {"messages": [{**ASK, "content": [{"type": "text", "text": "w1"}]}, ANSWER]}, "as data"),
        (PLAIN, {"messages": [ASK, ANSWER], "tools": TOOLS}, "leaves `tools` out"),
        (PLAIN.replace("m.content", "('' ~ m.content) if m.content is string else ''"),
         {"messages": [{**ASK, "content": [{"type": "image"}]}, ANSWER]}, "leaves `content` of message 1"),
        (PLAIN.replace("messages", "messages if m.role != 'system'", 1),
         {"messages": [{"role": "system", "content": "w20"}, ASK, ANSWER]}, r"leaves message 1 \(system\) out"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content + ' ' }}"),
         {"messages": [ASK, *CALLED]}, r"cannot render these messages \(\w+Error: "),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN,
         {"messages": [{"role": "system", "content": "w20"}, ASK, ANSWER]}, "no system"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_say_is_a_bad_line(chatty, tokenizer, tmp_path, template, row, message):
    path, plain = tmp_path / "chats.jsonl", templated(tokenizer, template)
    good = [{"messages": [{**ASK, "content": f"w{index}"}, ANSWER]} for index in range(12)]
    path.write_text("\n".join(map(json.dumps, [good[0], row, *good[1:]])))
    plan = planned(tmp_path, "hidden-state", prompts=[str(path)], skip_bad_lines=False)
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        run(chatty, plain, plan)
    assert not (tmp_path / "out").exists()
    chats, _ = read_jsonl(path)
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        tokenize_conversation(plain, chats[1], 100)


def test_bad_lines_of_a_template_are_left_out_when_asked(chatty, tokenizer, tmp_path):
    path, said = tmp_path / "chats.jsonl", list[str]()
    good = [{"messages": [{**ASK, "content": f"w{index}"}, ANSWER]} for index in range(12)]
    bad = {"messages": [ASK, {**ANSWER, "tool_calls": [CALL]}]}
    path.write_text("\n".join(map(json.dumps, [bad, *good])))
    plan = planned(tmp_path, "hidden-state", prompts=[str(path)], skip_bad_lines=True)
    run(chatty, templated(tokenizer, PLAIN), plan, said.append)
    assert any("line 1: " in line and line.startswith("left out") for line in said)


def test_lines_that_are_no_text_are_left_out_when_asked(tmp_path):
    path, bad = tmp_path / "chats.jsonl", list[str]()
    deep = b'{"turns": ["w1"], "more": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    lines = [b'{"turns": ["w1"]}', b'{"turns": ["\xff\xfe"]}', b'{"turns": ["\\udc00"]}', deep, b'{"turns": ["w2"]}\r']
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    _, prompts = read_jsonl(path, on_bad_line=bad.append)
    assert [prompt.turns for prompt in prompts] == [("w1",), ("w2",)]
    for line, number, word in zip(bad, (2, 3, 4), ("UTF-8", "surrogate", "deeply"), strict=True):
        assert f"line {number}: " in line and word in line


def test_conversations_of_earlier_runs_keep_their_order():
    """Keys of plain chats decide which are held out: pairs of role and text, as before."""
    assert Conversation.of([ASK, ANSWER]).key == (("user", "w10"), ("assistant", "w11"))
