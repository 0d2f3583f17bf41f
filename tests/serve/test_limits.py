"""What a client may send: limits, hosts, keys and wrong fields. `/health` is answered throughout."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from transformers import StoppingCriteria

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from serve_helpers import NAME, WINDOW, Served, kill, serving  # noqa: E402

from hf_hsdraft.serve.answers import CutStream  # noqa: E402
from hf_hsdraft.serve.guards import RequestLimits, allowed_hosts  # noqa: E402

CHAT, JSON = "/v1/chat/completions", {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "w1 w2"}]


@pytest.fixture(scope="module")
def served(tokenizer) -> Iterator[Served]:
    target = make_target(max_position_embeddings=WINDOW)
    with serving(target, tokenizer, make_drafter(target)) as served:
        yield served


def sent(port: int, path: str, body: bytes | None = b"{}", method: str = "POST", headers=JSON) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def posted(served: Served, path: str, **fields) -> tuple[int, dict]:
    status, answer = sent(served.port, path, json.dumps(fields).encode())
    return status, json.loads(answer)


@contextmanager
def healthy(served: Served, longest: float = 3.0) -> Iterator[None]:
    """`/health` is answered at any time, within `longest` seconds."""
    took, ended = [], threading.Event()

    def ask() -> None:
        while not ended.wait(0.05):
            began = time.monotonic()
            assert sent(served.port, "/health", None, "GET", {})[0] == 200
            took.append(time.monotonic() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        ended.set()
        asking.join()
    assert took and max(took) < longest


WRONG = [
    ("chat", {"stop": False}, "stop"),
    ("chat", {"stop": []}, "stop"),
    ("chat", {"stop": ""}, "stop.0"),
    ("chat", {"stop": ["w1", 2]}, "stop.1"),
    ("chat", {"stop": ["w"] * 5}, "stop"),
    ("chat", {"stop": "w" * 20_000}, "stop"),
    ("chat", {"tools": False}, "tools"),
    ("chat", {"tools": [{"type": "code"}]}, "tools.0.type"),
    ("chat", {"chat_template_kwargs": False}, "chat_template_kwargs"),
    ("chat", {"chat_template_kwargs": {"padding": "max_length", "max_length": 200_000_000}}, "chat_template_kwargs"),
    ("chat", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ("chat", {"messages": "hi"}, "messages"),
    ("chat", {"messages": None}, "messages"),
    ("chat", {"messages": [{"role": "user"}]}, "messages.0"),
    ("chat", {"messages": [{"role": 5, "content": "w1"}]}, "messages.0.role"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"max_tokens": "a lot"}, "max_tokens"),
    ("chat", {"max_tokens": True}, "max_tokens"),
    ("chat", {"max_completion_tokens": -1}, "max_completion_tokens"),
    ("chat", {"temperature": "hot"}, "temperature"),
    ("chat", {"temperature": float("nan")}, "temperature"),
    ("chat", {"top_p": 2}, "top_p"),
    ("chat", {"stream": "yes"}, "stream"),
    ("chat", {"seed": 2**70}, "seed"),
    ("chat", {"model": 5}, "model"),
    ("chat", {"frequency_penalty": -1}, "frequency_penalty"),
    ("chat", {"logit_bias": {"x": 1}}, "logit_bias.x"),
    ("chat", {"logit_bias": {"7": "much"}}, "logit_bias.7"),
    ("chat", {"logit_bias": {"123456": 1}}, "logit_bias"),
    ("chat", {"logit_bias": {str(token): 1 for token in range(1100)}}, "logit_bias"),
    ("chat", {"n": 0}, "n"),
    ("chat", {"generation_config": "{"}, "generation_config"),
    ("chat", {"generation_config": '{"num_beams": 1000}'}, "generation_config"),
    ("chat", {"generation_config": '{"num_return_sequences": 9}'}, "generation_config.num_return_sequences"),
    ("chat", {"generation_config": '{"cache_implementation": "static"}'}, "generation_config.cache_implementation"),
    ("chat", {"generation_config": '{"suppress_tokens": [123456]}'}, "generation_config"),
    ("chat", {"generation_config": '{"max_new_tokens": 0}'}, "generation_config.max_new_tokens"),
    ("text", {"prompt": ""}, "prompt"),
    ("text", {"prompt": " "}, "prompt"),
    ("text", {"prompt": ["w1"]}, "prompt"),
    ("text", {"prompt": None}, "prompt"),
    ("text", {"max_tokens": 0}, "max_tokens"),
    ("responses", {"input": ""}, "input"),
    ("responses", {"input": []}, "input"),
    ("responses", {"input": False}, "input"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
    ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
    ("responses", {"tools": False}, "tools"),
    ("responses", {"instructions": 5}, "instructions"),
]
ROUTES = {
    "chat": (CHAT, {"messages": MESSAGES}),
    "text": ("/v1/completions", {"prompt": "w1"}),
    "responses": ("/v1/responses", {"input": "w1"}),
}


@pytest.mark.parametrize(("route", "fields", "param"), WRONG, ids=lambda each: str(each)[:50])
def test_a_wrong_field_is_named(served, route, fields, param):
    path, least = ROUTES[route]
    for stream in ({}, {"stream": True}):
        status, answer = posted(served, path, **{**least, **stream, **fields})
        error = answer["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert param.split(".")[0] in error["message"] or error["message"]
        assert "Traceback" not in error["message"] and len(error["message"]) < 700


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[" * 100_000, b'{"messages": "\\ud800"}', b"\xff", b"1" * 9000])
def test_a_body_that_is_no_request_is_refused(served, body):
    status, answer = sent(served.port, CHAT, body)
    assert status in (400, 422) and json.loads(answer)["error"]["message"]


def test_an_error_says_where_a_body_stops_being_json(served):
    body = b'{"model": "tiny", "messages": [}'
    status, answer = sent(served.port, CHAT, body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, None)
    assert "not JSON" in error["message"] and f"character {body.index(b'}')}" in error["message"]


def test_a_long_body_is_refused_while_it_is_read(served):
    with healthy(served):
        for size in (3 << 20, 95 << 20):
            status, answer = sent(served.port, CHAT, b" " * size)
            assert status == 413 and json.loads(answer)["error"]["type"] == "invalid_request_error"
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
        with connection:  # of no length, and not read to its end
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 3
            )
            assert b" 413 " in connection.recv(100)


def test_a_long_prompt_is_refused_and_holds_nothing_up(served):
    with healthy(served):
        for length in (345_000, 500_000):
            status, answer = posted(served, CHAT, messages=[{"role": "user", "content": "w1 " * length}])
            assert status == 400 and answer["error"]["param"] == "messages"
        many = [{"role": "user", "content": "w1"}] * 40_000
        assert posted(served, CHAT, messages=many)[0] == 400
        assert posted(served, CHAT, messages=[5] * 500_000)[0] == 400


def test_hosts_keys_and_content_types(tokenizer):
    target = make_target(max_position_embeddings=WINDOW)
    hosts = allowed_hosts("192.0.2.1", ["*.example.org"])
    with serving(target, tokenizer, None, NAME, hosts=hosts, api_key="schlüssel") as served:
        key = {"Authorization": "Bearer schlüssel".encode()}
        body = json.dumps({"messages": MESSAGES, "max_tokens": 2}).encode()
        for host, status in (
            ("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("192.0.2.1", 200), ("a.example.org", 200),
            ("attacker.example", 400), ("localhost.attacker.example", 400), ("", 400), ("192.0.2.2", 400),
        ):  # fmt: skip
            assert sent(served.port, "/drafting", None, "GET", {"Host": host, **key})[0] == status, host
            found, answer = sent(served.port, CHAT, body, "POST", {"Host": host, **key, **JSON})
            assert found == status and ("error" in json.loads(answer)) == (status == 400), host
        for authorization in ("", "Bearer", "Bearer wrong", "Basic schlüssel", "Bearer schl"):
            headers = {**JSON, "Authorization": authorization.encode()}
            assert sent(served.port, CHAT, body, "POST", headers)[0] == 401
            assert sent(served.port, "/drafting", None, "GET", headers)[0] == 401
        assert sent(served.port, "/health", None, "GET", {})[0] == 200
        for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
            for path in (CHAT, "/v1/completions", "/v1/responses", "/load_model", "/reset"):
                assert sent(served.port, path, body, "POST", {**kind, **key})[0] == 415
        with_charset = {**key, "Content-Type": "application/json; charset=utf-8"}
        assert sent(served.port, CHAT, body, "POST", with_charset)[0] == 200


class Holds(StoppingCriteria):
    """Ends a text once it holds a stop string behind the five tokens of the prompt."""

    def __init__(self, tokenizer, stops: list[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops

    def __call__(self, input_ids, scores, **kwargs):
        texts = [self.tokenizer.decode(ids) for ids in input_ids[:, 5:].tolist()]
        return torch.tensor([any(stop in text for stop in self.stops) for text in texts])


@pytest.mark.parametrize("beams", [1, 2])
def test_an_answer_ends_before_its_first_stop_string(served, beams):
    """Streamed or not, by any route; decoding ends with the token that completes it."""
    options = {"num_beams": beams, "max_new_tokens": 40, "do_sample": False}
    fields = {"generation_config": json.dumps(options)} if beams > 1 else {}
    words = served.plain("w1 w2", **options)[0].split()
    for stop in ([words[5]], [words[9], words[4]], [f"{words[2]} {words[3]}"], [words[3][1:]], ["no such text"]):
        text, _, new = served.plain("w1 w2", **options, stopping_criteria=[Holds(served.tokenizer, stop)])
        places = [text.find(each) for each in stop if each in text]
        expected = text[: min(places, default=len(text))]
        asked = {"max_tokens": 40, "stop": stop, "extra_body": fields}
        whole = served.ask("w1 w2", **asked)
        said, reason, usage = served.streamed("w1 w2", **asked)
        assert whole.choices[0].message.content == said == expected
        assert usage.completion_tokens == whole.usage.completion_tokens == new
        assert reason == whole.choices[0].finish_reason == ("stop" if places else "length")
        if beams == 1:
            assert places or stop == ["no such text"]


def test_what_may_become_a_stop_string_is_held_back():
    class Pieces:
        def step(self, tokenizer, token):
            return token

    def shown(pieces: list[str], stops: list[str]) -> tuple[list[str], str]:
        stream = CutStream(Pieces(), stops)
        return [piece for piece in (stream.step(None, each) for each in pieces) if piece], stream.held

    assert shown(["a R", "iv", "al", " b"], ["River"]) == (["a ", "Rival", " b"], "")
    assert shown(["a R", "iv", "er b", "c"], ["River"]) == (["a "], "")
    assert shown(["aRi"], ["River"]) == (["a"], "Ri")
    assert shown(["aab"], ["ab"]) == (["a"], "") and shown(["ab"], []) == (["ab"], "")
    assert shown(["xaa", "ab"], ["aab"]) == (["x", "a"], "")


@pytest.mark.parametrize("fields", [{"num_beams": 4}, {"use_cache": True}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_ends_when_its_client_leaves(served, fields, stream):
    config = json.dumps({**fields, "max_new_tokens": WINDOW - 50, "do_sample": False})
    connection = served.send_raw("w1", generation_config=config, stream=stream)
    time.sleep(0.3)
    kill(connection)
    began = time.monotonic()
    assert served.ask("w2", max_tokens=2).usage.completion_tokens == 2
    assert time.monotonic() - began < 5


def test_a_generation_config_keeps_to_the_window(served):
    question = "w1 " * (WINDOW - 20)
    for options in ({"max_new_tokens": 10**6}, {"max_length": 10**6}, {"num_beams": 2, "max_new_tokens": 10**6}):
        config = json.dumps({**options, "do_sample": False, "pad_token_id": 0, "temperature": None})
        usage = served.ask(question, extra_body={"generation_config": config}).usage
        assert usage.total_tokens == WINDOW


def test_templates_of_clients_only_where_they_are_allowed(tokenizer):
    target = make_target(max_position_embeddings=WINDOW)

    def asked(served, template) -> tuple[int, dict]:
        kwargs = {"chat_template": template, "more": "w9"}
        return posted(served, CHAT, messages=MESSAGES, max_tokens=1, chat_template_kwargs=kwargs)

    with serving(target, tokenizer, None, NAME, client_templates=True) as served:
        status, answer = asked(served, "{{ messages[0]['content'] + ' ' + more }} w3")
        assert status == 200 and answer["usage"]["prompt_tokens"] == 4
    limits = RequestLimits(prompt_seconds=8.0)  # of which a process needs two to start
    with serving(target, tokenizer, None, NAME, limits, client_templates=True) as served, healthy(served):
        loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        for template in (loop, "{{ 'x' * 10**10 }}", "{{ 2**(10**9) }}", "{{ nothing.at.all }}", "{% if %}", 5):
            status, answer = asked(served, template)
            assert status in (400, 503) and answer["error"]["param"] == "chat_template_kwargs"


def test_more_requests_than_the_limit_are_refused(tokenizer):
    target = make_target(max_position_embeddings=WINDOW)
    with serving(target, tokenizer, None, NAME, RequestLimits(max_requests=2)) as served:
        status, answer = posted(served, CHAT, messages=MESSAGES, n=3)
        assert status == 400 and answer["error"]["param"] == "n"
        waiting = [served.send_raw("w1", stream=True, max_tokens=WINDOW - 50) for _ in range(2)]
        time.sleep(0.3)
        assert posted(served, CHAT, messages=MESSAGES)[0] == 503
        for connection in waiting:
            kill(connection)
        deadline = time.monotonic() + 10
        while posted(served, CHAT, messages=MESSAGES, max_tokens=2)[0] == 503 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert posted(served, CHAT, messages=MESSAGES, max_tokens=2)[0] == 200


_PROCESS = """
import sys, time, torch
from conftest import TEMPLATE, WORDS, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from hf_hsdraft import harmless
from hf_hsdraft.cli._shared import bound_socket
from hf_hsdraft.serve.server import Server, build_app
words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["<pad>", *WORDS])}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", chat_template=TEMPLATE)
target = make_target()
target.register_forward_pre_hook(harmless(lambda *_: time.sleep(float(sys.argv[1]))))
listener = bound_socket("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
Server(build_app(target, tokenizer, "tiny", None), "error").run(sockets=[listener])
"""


@pytest.mark.process
@pytest.mark.parametrize("forward_seconds", [0.05, 60.0])
def test_sigterm_ends_the_process_whatever_runs(forward_seconds):
    folder = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
    command = [sys.executable, "-c", _PROCESS, str(forward_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            port = int(process.stdout.readline())
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    assert sent(port, "/health", None, "GET", {})[0] == 200
                    break
                except OSError:
                    time.sleep(0.1)
            body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 200})
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
                assert b" 200 " in connection.recv(50)
                time.sleep(0.3)
                began = time.monotonic()
                process.send_signal(signal.SIGTERM)
                process.wait(10)
                assert time.monotonic() - began < 5
        finally:
            process.kill()
