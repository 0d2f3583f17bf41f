"""Answers by a server: a real `transformers serve` with a tiny target, and a stub for everything that goes wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import transformers
from conftest import make_target, write_prompts
from packaging.version import Version
from training_helpers import end_briefly

from hf_hsdraft.core.progress import Reporter
from hf_hsdraft.methods import answers_by_server as server_module
from hf_hsdraft.methods.answers_by_server import Answered, answer_by_server
from hf_hsdraft.training.data import gather
from hf_hsdraft.training.data.conversations import Prompt
from hf_hsdraft.training.data.gather import Answering
from hf_hsdraft.training.data.plan import TrainingPlan
from hf_hsdraft.training.loop.run import train

pytest.importorskip("openai")

SECRET = "a-secret-key"
Reply = tuple[int, dict]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HSDRAFT_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def make_prompts(count: int, turns: int = 1) -> list[Prompt]:
    return [
        Prompt(f"p:{index}", tuple(f"w{index} w{turn} w{2 * index + turn}" for turn in range(turns)))
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def served(chatty, tokenizer, tmp_path_factory) -> Iterator[tuple[str, str]]:
    """Address and model name of a `transformers serve` process that runs `chatty`."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("target")
    (home / "hub").mkdir()
    chatty.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HOME": str(home)}
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_healthy(process, url, lambda: (home / "log").read_text())
        yield url, str(folder)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def wait_until_healthy(process: subprocess.Popen, url: str, log: Callable[[], str], seconds: float = 90) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with direct.open(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"`transformers serve` did not start:\n{log()}")


def greedily(target, tokenizer, messages: list[dict], max_new_tokens: int) -> tuple[str, int]:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids["input_ids"]
    answer = target.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True).strip(), len(answer)


def test_greedy_answers_are_the_targets_own(served, chatty, tokenizer):
    """Turn by turn, whatever else is under way."""
    url, model = served
    prompts = make_prompts(3) + make_prompts(6, turns=3)[3:]
    finished = list(answer_by_server(url, prompts, model=model, temperatures=(0.0,), max_new_tokens=8, concurrency=3))
    assert sorted(answered.prompt.key for answered in finished) == [prompt.key for prompt in prompts]
    for answered in finished:
        messages, tokens = answered.messages, 0
        assert [message["role"] for message in messages] == ["user", "assistant"] * len(answered.prompt.turns)
        assert tuple(message["content"] for message in messages[::2]) == answered.prompt.turns
        for index in range(1, len(messages), 2):
            text, length = greedily(chatty, tokenizer, messages[:index], 8)
            assert messages[index]["content"] == text
            tokens += length
        assert answered.new_tokens == tokens and answered.temperature == 0


def test_a_run_learns_from_what_the_server_answered(served, chatty, tokenizer, tmp_path, monkeypatch):
    """With the target at hand only for its hidden states; run again, nothing is asked twice."""
    url, model = served

    def answer_here(target, tokenizer, prompts, **_):
        assert not prompts, "the target was asked to answer here"
        return iter(())

    monkeypatch.setattr(gather, "answer_prompts", answer_here)
    end_briefly(monkeypatch)
    prompts = [str(write_prompts(tmp_path / "prompts.jsonl", 6))]
    plan = TrainingPlan(
        out=str(tmp_path / "out"), prompts=prompts, answers_from=url, server_model=model, temperatures=(0.0, 1.0),
        max_new_tokens=8, eval_conversations=2, eval_prompts=0,
        drafter={"num_draft_steps": 2, "tree_size": 4, "injector_rank": 4, "draft_vocab_size": 20},
    )  # fmt: skip
    arguments = {"max_steps": 1, "eval_steps": 1, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    lines: list[str] = []
    train(chatty, tokenizer, plan, arguments, report=lines.append)
    assert any("answering: 6/6 prompts" in line for line in lines)
    monkeypatch.setattr(server_module, "_as_they_finish", lambda *_: pytest.fail("asked again"))
    train(chatty, tokenizer, plan, arguments | {"max_steps": 2}, report=lines.append)


def test_sampled_answers_are_sampled_and_reproducible(served):
    """`transformers serve` is greedy at any temperature when asked like other servers."""
    url, model = served

    def texts(temperature: float) -> dict[str, str]:
        options = {"model": model, "temperatures": (temperature,), "max_new_tokens": 8, "concurrency": 1}
        return {
            each.prompt.key: each.messages[1]["content"] for each in answer_by_server(url, make_prompts(4), **options)
        }

    greedy, sampled = texts(0.0), texts(1.0)
    assert sampled == texts(1.0)
    assert all(greedy[key] != sampled[key] for key in greedy)


def test_transformers_serve_wants_its_model_named(served):
    """Before 5.24 it did not list the one model that it serves."""
    url, model = served
    if Version(transformers.__version__) < Version("5.24"):
        with pytest.raises(ValueError, match=r"models: none; expected one.*`model`"):
            answer_by_server(url, make_prompts(1), max_retries=0)
    else:
        [[named], [alone]] = ([*answer_by_server(url, make_prompts(1), model=each)] for each in (model, None))
        assert named.messages == alone.messages
    with pytest.raises(ValueError, match="pinned to"):
        answer_by_server(url, make_prompts(1), model="other", max_retries=0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send(200, {"data": [{"id": name} for name in self.server.names]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        known = self.path == "/v1/chat/completions"
        self.send(*self.server.reply(body) if known else (404, {"error": {"message": "Not Found"}}))

    def send(self, status: int, payload: dict) -> None:
        data = json.dumps(payload).encode()
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", len(data)), ("retry-after-ms", 1)):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


class Stub(ThreadingHTTPServer):
    """Answers as it is told; `bodies` holds what it was asked."""

    daemon_threads = True

    def __init__(self, reply: Callable[[dict], Reply], names: tuple[str, ...]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.names, self.bodies = reply, names, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def asked(self) -> list[dict]:
        """What was asked for the prompts, without the requests that try the server."""
        return [body for body in self.bodies if not is_trial(body)]


def is_trial(body: dict) -> bool:
    return body["max_tokens"] == 1 or body["messages"][0]["content"] in server_module.PROBES


@contextmanager
def stub(reply: Callable[[dict], Reply], names: tuple[str, ...] = ("tiny",)) -> Iterator[Stub]:
    with Stub(reply, names) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def says(text: str) -> Reply:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "length", "message": message}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


def fails(status: int, message: str) -> Reply:
    return status, {"error": {"message": message}}


def echoes(body: dict) -> Reply:
    return says(f"about {body['messages'][-1]['content']}")


def as_target(target, tokenizer, otherwise: Callable[[dict], Reply]) -> Callable[[dict], Reply]:
    """Replies as the target to what tries the server, and otherwise to the prompts."""

    def reply(body: dict) -> Reply:
        if is_trial(body):
            return says(greedily(target, tokenizer, body["messages"], body["max_tokens"])[0])
        return otherwise(body)

    return reply


def answered_by(server: Stub, target, tokenizer, folder, asked: list[Prompt], lines: list[str], **fields):
    """The chats of a run that asks a server."""
    fields = {"prompts": ["x"], "temperatures": (0.0,), "max_new_tokens": 9, **fields}
    plan = TrainingPlan(out=str(folder), answers_from=server.url, **fields)
    answering = Answering(target, tokenizer, plan, 0, "target", Reporter.of(lines.append), grows=False)
    return [chat for group in answering.groups(asked) for chat in group]


def test_a_server_with_another_model_is_refused_before_any_work(chatty, tokenizer, tmp_path, monkeypatch):
    """Before it is asked for answers, and before the target invents prompts."""
    monkeypatch.setattr(gather, "invent_prompts", lambda *_, **__: pytest.fail("prompts were invented"))
    with stub(as_target(make_target(seed=7, eos_token_id=4), tokenizer, echoes)) as server:
        for given, fields in ((make_prompts(3), {}), ([], {"prompts": (), "openings": ["w1"], "num_prompts": 3})):
            with pytest.raises(ValueError, match=r"does not answer as the target does.*Serve the target itself"):
                answered_by(server, chatty, tokenizer, tmp_path, given, [], **fields)
        assert server.asked() == []


def test_one_answer_may_differ_by_rounding(chatty, tokenizer, tmp_path):
    def reply(body: dict) -> Reply:
        return says("other") if body["messages"][0]["content"] == server_module.PROBES[0] else own(body)

    own = as_target(chatty, tokenizer, echoes)
    with stub(reply) as server:
        assert len(answered_by(server, chatty, tokenizer, tmp_path, make_prompts(3), [])) == 3


def test_a_server_is_not_asked_what_is_too_long(chatty, tokenizer, tmp_path):
    prompts = [*make_prompts(2), Prompt("long", (" ".join(["w1"] * 60),))]
    lines: list[str] = []
    with stub(as_target(chatty, tokenizer, echoes)) as server:
        chats = answered_by(server, chatty, tokenizer, tmp_path, prompts, lines, max_length=40)
        assert len(chats) == len(server.asked()) == 2
    assert any("1 prompts left out" in line and "tokens, more than 31" in line for line in lines)


def test_a_run_goes_on_after_the_server_has_died(chatty, tokenizer, tmp_path):
    """What it answered is kept, and only the rest is asked again."""
    left = iter(range(5))

    def dying(body: dict) -> Reply:
        return fails(401, "dead") if next(left, None) is None else echoes(body)  # no status that is tried again

    prompts = make_prompts(9)
    with stub(as_target(chatty, tokenizer, dying)) as server:
        with pytest.raises(ValueError, match="refuses the API key"):
            answered_by(server, chatty, tokenizer, tmp_path, prompts, [], answer_batch_size=1)
        first = [body["messages"][0]["content"] for body in server.asked()][:5]
    with stub(as_target(chatty, tokenizer, echoes)) as server:
        chats = answered_by(server, chatty, tokenizer, tmp_path, prompts, [], answer_batch_size=1)
        second = [body["messages"][0]["content"] for body in server.asked()]
    assert sorted(first + second) == sorted(prompt.turns[0] for prompt in prompts) and len(second) == 4
    asked = [prompt.turns[0] for prompt in prompts]
    assert sorted(chat.key for chat in chats) == sorted(
        (("user", text), ("assistant", f"about {text}")) for text in asked
    )


def test_an_error_ends_the_process_although_requests_are_under_way():
    answered = threading.Event()

    def reply(body: dict) -> Reply:
        text = body["messages"][-1]["content"]
        if text == "slow":
            answered.wait(120)
        return fails(401, "wrong") if text == "wrong" else echoes(body)

    code = """
import sys, time
from hf_hsdraft.training.data.conversations import Prompt
from hf_hsdraft.methods.answers_by_server import answer_by_server
slow, wrong = Prompt("a", ("slow",)), Prompt("b", ("w1", "wrong"))
list(answer_by_server(sys.argv[1], [slow, wrong], concurrency=2))
"""
    with stub(reply) as server:
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            answered.set()
    assert done.returncode == 1 and "refuses the API key" in done.stderr


def test_a_plan_says_how_many_prompts_are_asked_at_once(chatty, tokenizer, tmp_path):
    together = threading.Barrier(3, timeout=20)
    under_way, most, lock = set(), [], threading.Lock()

    def reply(body):
        with lock:
            under_way.add(threading.get_ident())
            most.append(len(under_way))
        together.wait()  # fails if fewer come together
        with lock:
            under_way.discard(threading.get_ident())
        return echoes(body)

    with stub(as_target(chatty, tokenizer, reply)) as server:
        chats = answered_by(server, chatty, tokenizer, tmp_path, make_prompts(6), [], answer_batch_size=3)
    assert len(chats) == 6 and max(most) == 3


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_failing_requests_are_tried_again(suffix):
    failures = iter([500, 503])
    with stub(lambda body: fails(status, "busy") if (status := next(failures, None)) else echoes(body)) as server:
        finished = list(answer_by_server(server.url + suffix, make_prompts(1), temperatures=(0.0,)))
    expected = [{"role": "user", "content": "w0 w0 w0"}, {"role": "assistant", "content": "about w0 w0 w0"}]
    assert finished == [Answered(make_prompts(1)[0], 0.0, expected, 2)]


def test_prompts_without_an_answer_are_reported_and_left_out():
    def reply(body: dict) -> Reply:
        refusals = {"long": fails(400, "too many tokens"), "silent": says(" \n")}
        return refusals.get(body["messages"][-1]["content"]) or echoes(body)

    prompts = [Prompt("a", ("w1", "long")), Prompt("b", ("silent",)), Prompt("c", ("w2",)), Prompt("c", ("w2",))]
    skipped = {}
    with stub(reply) as server:
        finished = list(
            answer_by_server(server.url, prompts, on_skip=lambda prompt, why: skipped.update({prompt.key: why}))
        )
    assert [answered.prompt.key for answered in finished] == ["c"]
    assert skipped == {"a": "400: too many tokens", "b": "the answer is empty"}


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (401, ValueError, "refuses the API key.*HSDRAFT_API_KEY"),
        (404, ValueError, "no model 'tiny'.*/v1/models"),
        (400, ValueError, "refuses to answer `Hello` as 'tiny'"),
        (500, ConnectionError, "see the server's log"),
    ],
)
def test_errors_come_before_work_and_keep_the_key(monkeypatch, status, kind, expected):
    monkeypatch.setenv("HSDRAFT_API_KEY", f"{SECRET}\n")
    with (
        stub(lambda _: fails(status, f"wrong:\n {SECRET}")) as server,
        pytest.raises(kind, match=expected) as error,
    ):
        answer_by_server(server.url, make_prompts(3), max_retries=0)
    assert SECRET not in str(error.value) and "\n" not in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_keys_that_no_header_can_hold(monkeypatch):
    for key in ("a\nsecret", "sécret"):
        monkeypatch.setenv("HSDRAFT_API_KEY", key)
        with pytest.raises(ValueError, match="printable ASCII") as error:
            answer_by_server("http://127.0.0.1:9", make_prompts(1))
        assert "cret" not in str(error.value)


def test_a_server_of_something_else():
    with stub(lambda _: (200, {"hello": "world"}), ()) as server:
        for model in (None, "tiny"):
            with pytest.raises(ValueError, match=r"models: none|no choices"):
                answer_by_server(server.url, make_prompts(1), model=model)


def test_a_server_out_of_reach():
    with pytest.raises(ConnectionError, match=r"no answer from http://127\.0\.0\.1:\d+/v1 .*vllm serve"):
        answer_by_server(f"127.0.0.1:{free_port()}", make_prompts(1), max_retries=0)


def test_the_model_is_named_where_there_are_several():
    with stub(echoes, ("tiny", "large")) as server:
        with pytest.raises(ValueError, match=r"models: tiny, large; expected one"):
            answer_by_server(server.url, make_prompts(1))
        finished = list(answer_by_server(server.url, make_prompts(1), model="large"))
        assert len(finished) == 1
        assert {body["model"] for body in server.bodies} == {"large"}


@pytest.mark.parametrize("unknown", [(), ("top_k",), ("top_k", "generation_config")])
def test_samples_are_of_the_whole_distribution(unknown):
    """In the words that the server knows; `transformers serve` refuses those of vLLM and SGLang."""
    fields = [{"top_k": -1}, {"generation_config": '{"do_sample": true, "top_k": 0}'}, {}][len(unknown)]
    with stub(lambda body: fails(422, "unexpected") if set(unknown) & set(body) else echoes(body)) as server:
        list(answer_by_server(server.url, make_prompts(20), max_new_tokens=7))
    common = {"model": "tiny", "top_p": 1.0, "max_tokens": 7}
    for body in server.asked():
        sampled = {**fields, "seed": body["seed"]} if body["temperature"] > 0 else {}
        assert body == {"messages": body["messages"], "temperature": body["temperature"], **common, **sampled}
    assert {body["temperature"] for body in server.asked()} == {0.0, 0.7, 1.0}


def test_temperature_and_seed_follow_from_the_prompt():
    """Not from the order, nor from what an earlier run had answered."""
    prompts = make_prompts(20)
    drawn = []
    for part, seed in ((prompts, 0), (prompts[:4:-1], 0), (prompts, 1)):
        with stub(echoes) as server:
            finished = list(answer_by_server(server.url, part, seed=seed))
        seeds = {body["messages"][0]["content"]: body.get("seed") for body in server.asked()}
        drawn.append({each.prompt.key: (each.temperature, seeds[each.prompt.turns[0]]) for each in finished})
    assert drawn[1] == {prompt.key: drawn[0][prompt.key] for prompt in prompts[5:]}
    assert drawn[2] != drawn[0]


def test_no_more_is_asked_once_the_caller_stops():
    """And only a few conversations are begun before."""

    def reply(body: dict) -> Reply:
        time.sleep(0.01)
        return echoes(body)

    with stub(reply) as server:
        answers = answer_by_server(server.url, make_prompts(100, turns=10), concurrency=2)
        next(answers)
        time.sleep(0.4)
        assert len({body["messages"][0]["content"] for body in server.asked()}) <= 5
        answers.close()
        asked = len(server.asked())
        time.sleep(0.4)
        assert len(server.asked()) <= asked + 2  # those on their way


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"temperatures": ()}, {"temperatures": (0.0, -1.0)}])
def test_arguments_out_of_range(wrong):
    with pytest.raises(ValueError, match="expected concurrency >= 1 and temperatures >= 0"):
        answer_by_server("http://127.0.0.1:9", make_prompts(1), **wrong)


def test_a_missing_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[train\]'"):
        answer_by_server("http://127.0.0.1:9", make_prompts(1))
