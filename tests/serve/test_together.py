"""Requests that a server decodes together."""

import importlib.util
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from serve_helpers import WINDOW, serving

from hf_hsdraft import attach
from hf_hsdraft.batching.scheduler import ContinuousBatching
from hf_hsdraft.serve.together import Together

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WORDS = [f"w{index} w{index + 7} w{3 * index % 50}" for index in range(12)]


@pytest.fixture(scope="module")
def served(tokenizer):
    target = make_target(max_position_embeddings=WINDOW)
    with serving(target, tokenizer, make_drafter(target)) as found:
        yield found


def metrics(served) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (re.split(r" (?=\S+$)", line) for line in lines if line[0] != "#")}


def test_requests_at_once_get_what_each_gets_alone(served):
    """Greedy and sampled ones, with lengths and stop strings of their own, streamed or not; in shared forwards."""
    before = served.drafting()

    def ask(index: int) -> tuple[str, str]:
        count = 40 + 20 * (index % 3)
        if index % 2:
            return served.streamed(WORDS[index], max_tokens=count)[0], served.plain(WORDS[index], max_new_tokens=count)[
                0
            ]
        answer = served.ask(WORDS[index], max_tokens=count).choices[0].message.content
        return answer, served.plain(WORDS[index], max_new_tokens=count)[0]

    with ThreadPoolExecutor(12) as pool:
        for found, plain in pool.map(ask, range(12)):
            assert found.strip() == plain.strip()
    after = served.drafting(before["calls"] + 12)
    assert after["calls"] - before["calls"] == 12 and after["lossless"]


def test_a_seed_gives_the_same_answer_beside_others(served):
    def ask(index: int) -> str:
        fields = {"temperature": 1.0, "seed": 5, "top_p": 1.0} if index == 3 else {}
        return served.ask(WORDS[index], max_tokens=50, **fields).choices[0].message.content

    alone = ask(3)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6)))[3] == alone


def test_metrics_count_requests_and_tokens(served):
    text = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11"
    first = served.ask(f"{text} w12", max_tokens=5).usage.prompt_tokens
    served.drafting(1)
    before = metrics(served)
    served.ask(f"{text} w13", max_tokens=20)
    served.drafting(1)
    after = metrics(served)
    done = 'hsdraft_requests_total{outcome="done"}'
    assert after[done] - before.get(done, 0) == 1
    assert after["hsdraft_tokens_total"] - before["hsdraft_tokens_total"] == 20
    assert after["hsdraft_first_token_seconds_count"] - before["hsdraft_first_token_seconds_count"] == 1
    reused = after["hsdraft_reused_prompt_tokens"] - before["hsdraft_reused_prompt_tokens"]
    assert 11 <= reused < first
    assert after["hsdraft_waiting"] == after["hsdraft_running"] == 0 and after["hsdraft_tau"] >= 1


class Left(Exception):
    """A client has left."""


@pytest.fixture
def by_hand():
    """A batch of two texts, of which none is decoded before the returned list of work is called."""
    target, work = make_target(), []
    attachment = attach(target, make_drafter(target))

    def make() -> ContinuousBatching:
        return ContinuousBatching(target, attachment.drafter, 2, chunk_size=4, attachment=attachment)

    yield Together(make, work.append), work
    attachment.detach()


def call_of(length: int, token: int = 7) -> dict:
    return {"input_ids": torch.full((1, length), token), "max_new_tokens": 6}


def test_a_call_ends_while_its_prompt_is_read_or_waits(by_hand):
    together, work = by_hand
    rounds = []

    def leaves() -> None:
        rounds.append(0)
        if len(rounds) > 3:
            raise Left

    long, waiting = together.submit(call_of(200), 0, leaves), together.submit(call_of(9, 8), 0, leaves)
    other, dropped = together.submit(call_of(5, 9), 0, int), together.submit(call_of(5, 10), 0, int)
    dropped.cancel()
    work[0]()
    assert isinstance(long.exception(1), Left) and isinstance(waiting.exception(1), Left) and len(rounds) < 8
    assert other.result(1).shape == (1, 11) and not together.batching.busy
    assert together.batching.tally.statistics.new_tokens


def test_every_call_has_an_answer_or_an_error_where_decoding_fails(by_hand, monkeypatch):
    (together, work), closed = by_hand, list[bool]()
    first = [together.submit(call_of(5, 7 + index), 0, int) for index in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(ContinuousBatching, "step", lambda self: 1 / 0)
        patched.setattr(together, "_make", lambda: 1 / 0)
        patched.setattr(failed := together.batching, "close", lambda: closed.append(True))
        with pytest.raises(ZeroDivisionError):
            work[0]()
    assert closed == [True] and together.batching is failed
    assert all(isinstance(future.exception(1), ZeroDivisionError) for future in first)
    later = together.submit(call_of(5), 0, int)
    work[-1]()
    assert later.result(1).shape == (1, 11)


def test_the_benchmark_s_clients_get_texts_of_their_lengths(served, tokenizer, monkeypatch):
    spec = importlib.util.spec_from_file_location("serving_benchmark", BENCHMARKS / "serving.py")
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)  # of which its dataclass asks
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec.loader.exec_module(benchmark)
    counts, before = [5, 9, 1], metrics(served)["hsdraft_tokens_total"]
    arguments = [{"input_ids": tokenizer(text, return_tensors="pt")["input_ids"]} for text in WORDS]
    arguments = [{**each, "max_new_tokens": count} for each, count in zip(arguments, counts, strict=False)]
    load, url = benchmark.Load(arguments, clients=2, rate=None, seed=0), f"http://127.0.0.1:{served.port}"
    benchmark._served(None, None, load, 2, url, tokenizer)
    assert load.over and load.first.keys() == load.sent.keys() == load.done.keys() == {0, 1, 2}
    assert all(load.sent[number] < load.first[number] < load.done[number] for number in range(3))
    assert metrics(served)["hsdraft_tokens_total"] - before == sum(counts)
    wrong = [{**arguments[0], "max_new_tokens": 0}]
    with pytest.raises(RuntimeError, match="max_tokens"):
        benchmark._served(None, None, benchmark.Load(wrong, 2, None, 0), 2, url, tokenizer)
