"""`hsdraft chat`: a conversation that keeps its cache says what one without a cache says."""

from __future__ import annotations

import io

import pytest
import torch
from conftest import make_drafter, make_target
from rich.console import Console
from transformers import MistralConfig, MistralForCausalLM
from transformers.generation.streamers import BaseStreamer
from typer.testing import CliRunner

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.serve.conversation import HELP, Conversation, TerminalChat

NEW = 12
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "suppress_tokens": [0, 1, 4]}  # special ones, not in the text
QUESTIONS = ["w1 w2 w3", "w4 w5", "w6 w2 w9", "w3"]
GREEN = "\x1b[32m"
LAST_TWO = (
    "{% for m in messages[-2:] %}{{ m['role'] + ' ' + m['content'] + ' end ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
SHOUTING = (
    "{% for m in messages %}{{ m['role'] + ' ' }}{{ 'w7 ' if loop.index == 2 else m['content'] + ' ' }}{{ 'end ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def make_windowed():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=97, num_key_value_heads=2, sliding_window=8, initializer_range=0.3, **sizes)
    config.eos_token_id = None
    return MistralForCausalLM(config).eval()


def anew(conversation: Conversation, question: str) -> str:
    """The answer without drafter and cache, to the prompt that the conversation makes of the question."""
    messages = [*conversation.messages, {"role": "user", "content": question}]
    ids = torch.tensor([conversation._prompt(messages)])
    new = conversation.target.generate(ids, **GREEDY)[0, ids.shape[1] :]
    return conversation.tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.parametrize("template", [None, LAST_TWO, SHOUTING])
@pytest.mark.parametrize("make", [make_target, make_windowed])
def test_a_kept_cache_changes_no_answer(make, template, tokenizer, monkeypatch):
    """Also where the template writes earlier turns anew, and where drafting is switched off for a turn."""
    if template is not None:
        monkeypatch.setattr(tokenizer, "chat_template", template)
    target = make()
    drafter = make_drafter(target)
    conversation = Conversation(target, tokenizer, drafter, **GREEDY)
    kept = []
    for turn, question in enumerate(QUESTIONS):
        conversation.drafter = None if turn == 2 else drafter
        expected, before = anew(conversation, question), len(conversation._text)
        answer = conversation.ask(question)
        assert answer.text == expected and answer.tokens == NEW and answer.cut
        assert (answer.statistics is None) == (turn == 2)
        kept.append((answer.kept, before - 1))
    assert kept[0][0] == 0
    if template is None:  # all but the last token, which no forward has read
        assert all(held == read for held, read in kept[1:])
    if template == LAST_TWO:
        assert all(held < read for held, read in kept[1:])
    if template == SHOUTING and make is make_target:  # what stands before the second message
        assert kept[1][0] == len(tokenizer.encode(f"user {QUESTIONS[0]} end assistant "))


def test_a_drafter_goes_on_from_what_it_had_read(tokenizer):
    """The second turn drafts as a call that reads the whole conversation does."""
    target = make_target()
    conversation = Conversation(target, tokenizer, make_drafter(target), **GREEDY)
    conversation.ask(QUESTIONS[0])
    messages = [*conversation.messages, {"role": "user", "content": QUESTIONS[1]}]
    ids = torch.tensor([conversation._prompt(messages)])
    call = {**GREEDY, "assistant_model": conversation.drafter, "return_dict_in_generate": True}
    whole = target.generate(ids, **call).statistics
    kept = conversation.ask(QUESTIONS[1]).statistics
    assert (kept.accepted_lengths, kept.drafted_nodes) == (whole.accepted_lengths, whole.drafted_nodes)


def test_an_interrupted_message_is_forgotten(tokenizer):
    target = make_target()
    conversation = Conversation(target, tokenizer, make_drafter(target), system="w8", **GREEDY)
    conversation.ask(QUESTIONS[0])

    class Interrupts(BaseStreamer):
        puts = 0

        def put(self, value):
            self.puts += 1
            if self.puts == 4:
                raise KeyboardInterrupt

        def end(self):
            pass

    before = list(conversation.messages)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask(QUESTIONS[1], Interrupts())
    assert conversation.messages == before and before[0]["content"] == "w8"
    expected = anew(conversation, QUESTIONS[2])
    assert conversation.ask(QUESTIONS[2]).text == expected


def test_a_conversation_beyond_the_window_is_told(tokenizer):
    conversation = Conversation(make_target(), tokenizer, None, **GREEDY)  # of 256 positions
    with pytest.raises(ValueError, match=r"the prompt has 30\d tokens and the model's context window is 256"):
        conversation.ask("w1 " * 300)
    answer = conversation.ask("w1 " * 247)
    assert answer.tokens == 256 - 247 - 3 and answer.cut
    tokenizer_without = type(tokenizer)(tokenizer_object=tokenizer._tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        Conversation(make_target(), tokenizer_without, None)


def chat(conversation: Conversation, lines: list[str], monkeypatch) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    printed = io.StringIO()
    TerminalChat(conversation, Console(file=printed, force_terminal=True, width=200)).run(echo=True)
    return printed.getvalue()


def test_drafted_tokens_are_coloured(tokenizer, monkeypatch):
    """As many as were accepted, also in the first call for a target, which tries it first."""
    target = make_target()
    options = {**GREEDY, "max_new_tokens": 40}
    known = Conversation(target, tokenizer, None, **options)
    known.ask(QUESTIONS[0])
    drafter = CachebackDrafter([known._text])  # of texts like those to come: it is right
    conversation = Conversation(target, tokenizer, drafter, **options)
    accepted, ask = [], conversation.ask

    def recorded(*args):
        accepted.append(ask(*args))
        return accepted[-1]

    conversation.ask = recorded
    printed = chat(conversation, [QUESTIONS[0], "/plain", QUESTIONS[1]], monkeypatch)
    first, second = (part.split("tokens/s")[0] for part in printed.split("> ")[1::2][:2])
    assert first.count(GREEN) == sum(accepted[0].statistics.accepted_lengths) > 0
    assert second.count(GREEN) == 0 and "plain, " in second
    assert accepted[0].text.split()[-1] in first


def test_commands(tokenizer, monkeypatch):
    target = make_target()
    conversation = Conversation(target, tokenizer, make_drafter(target), **GREEDY)
    lines = ["", QUESTIONS[0], "/nope", "/help", "w1 " * 300, QUESTIONS[1], "/clear", QUESTIONS[0], "/exit", "never"]
    printed = chat(conversation, lines, monkeypatch)
    assert printed.count(HELP.splitlines()[0]) == 3 and "no such command: /nope" in printed
    assert "context window is 256" in printed and "never" not in printed
    assert printed.count("tau ") == 3 and printed.count("from the cache") == 1
    assert printed.count(f"tokens/s, {NEW} tokens, cut at the limit of new tokens") == 2
    assert len(conversation.messages) == 2


def test_the_command_chats_with_lines_from_a_pipe(tmp_path, tokenizer):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    arguments = ["chat", "--target", str(tmp_path / "target"), "--max-new-tokens", str(NEW)]
    drafted = ["--drafter", str(tmp_path / "drafter")]
    for extra, figure in ((drafted, "tau "), (["--plain"], "plain, ")):
        lines = "".join(f"{question}\n" for question in QUESTIONS[:2])
        result = CliRunner().invoke(app, [*arguments, *extra], input=lines, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        conversation = Conversation(target, tokenizer, None, **GREEDY)
        for question in QUESTIONS[:2]:
            assert conversation.ask(question).text in result.output
        assert result.output.count(figure) == 2
    result = CliRunner().invoke(app, [*arguments, "--plain", *drafted])
    assert result.exit_code == 2 and "--drafter" in result.output
