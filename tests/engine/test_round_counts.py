"""What a compiled round does besides its compiled functions, counted on a CPU that stands for a device."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from oracles.device_reads import DeviceCounts
from oracles.forced_drafter import ForcedDrafter, let_count
from test_static_cache import Graphs, decode
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from hf_hsdraft.engine import loop
from hf_hsdraft.gpu import fixed_shapes
from hf_hsdraft.verify import verdict

TREE_SIZE = 24


class Operators(TorchDispatchMode):
    """Counts operators outside compiled functions."""

    def __init__(self, counts: DeviceCounts) -> None:
        super().__init__()
        self.counts, self.seen = counts, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.counts.inside:
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Counter[str]]]]:
    """Yields the counts of each round. Compiled functions run as they are: reads within count, operators do not."""
    counts, rounds = DeviceCounts(), []
    operators = Operators(counts)

    def compile_(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts.launches[function.__qualname__] += 1
            counts.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                counts.inside = False

        return run

    ended = loop.Keeper.ended

    def note(keeper: loop.Keeper, done: loop.Round) -> None:
        ended(keeper, done)
        rounds.append({"reads": counts.reads, "launches": counts.launches, "operators": operators.seen})
        counts.reads, counts.launches, operators.seen = Counter(), Counter(), Counter()

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(fixed_shapes, "_compiled", [])
    monkeypatch.setattr(loop.Keeper, "ended", note)
    with operators, counts:
        yield rounds


def test_the_counter_sees_reads():
    counts = DeviceCounts()
    with counts:
        device = torch.zeros(3, device="cpu")
        host = torch.tensor([1, 2])
        int(host.sum()), host.tolist(), host.to("cpu", non_blocking=True)
        assert not counts.reads
        read = device.cpu()
        int(read[0]), read.tolist()
        assert counts.reads == {"cpu": 1}
        bool(device[0] + host[0] > 0), device.tolist(), device[device > 0], host.to(device.device)
    assert counts.reads == {"cpu": 1, "__bool__": 1, "tolist": 1, "index": 1, "copy that waits": 1}


def compiled_call() -> dict[str, Any]:
    config = CompileConfig()
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config, "max_cache_len": 100}


def check(rounds: list[dict[str, Counter[str]]]) -> None:
    """The first round reads a draft that follows none, and has the trials of the target."""
    assert len(rounds) > 10 and all(each["reads"] == {"cpu": 1} for each in rounds[1:])
    assert all(set(each["launches"]) <= {"Module._wrapped_call_impl", "draft", "move_slots"} for each in rounds)
    assert all(set(each["launches"].values()) == {1} for each in rounds[1:])
    assert max(each["operators"].total() for each in rounds[1:]) <= 90


@pytest.mark.parametrize("sizing", ["fixed", "cost"])
def test_a_round_reads_once(prompt, monkeypatch, sizing):
    """Where a draft follows a draft: choices, accepted path and the next draft come in one transfer."""
    target = make_target()
    drafter = make_drafter(target, tree_size=TREE_SIZE)
    drafter.generation_config.tree_sizing = sizing
    plain = decode(target, prompt, new_tokens=30)
    with counted(monkeypatch) as rounds:
        output = decode(target, prompt, drafter, 30, **compiled_call())
    assert output.sequences.equal(plain)
    check(rounds)


def test_a_round_reads_once_whatever_is_accepted(prompt, monkeypatch):
    target = let_count(make_target(hidden_size=128, num_hidden_layers=2))
    forced = ForcedDrafter(make_drafter(target, tree_size=TREE_SIZE), [0, 3, 1, 4])
    with counted(monkeypatch) as rounds:
        statistics = decode(target, prompt, forced, 40, **compiled_call()).statistics
    assert statistics.accepted_lengths[:-1] == ([0, 3, 1, 4] * 5)[: statistics.rounds - 1]
    check(rounds[:-1])  # the last one ends within a path


@pytest.mark.parametrize("settings", [{"do_sample": True, "temperature": 1.5}, {"repetition_penalty": 1.3}])
def test_what_needs_the_host_reads_as_often_as_nodes_are_judged(prompt, monkeypatch, settings):
    target = make_target(num_hidden_layers=2)
    drafter = make_drafter(target, tree_size=TREE_SIZE)
    plain = decode(target, prompt, new_tokens=12, **settings)
    with counted(monkeypatch) as rounds:
        output = decode(target, prompt, drafter, 12, **compiled_call(), **settings)
    assert output.sequences.equal(plain)
    assert all(each["reads"].total() > 1 for each in rounds)


@pytest.mark.slow
def test_all_of_a_call_is_few_graphs_without_a_break(prompt):
    """The forward over trees, plain decoding's step, the move of what is accepted, and the draft."""
    target = make_target(num_hidden_layers=2)
    drafter = make_drafter(target, tree_size=TREE_SIZE)
    torch._dynamo.reset()
    counters.clear()
    graphs = Graphs()
    config = graphs.config()
    config.fullgraph = True
    plain = decode(target, prompt, new_tokens=30)
    for _ in range(2):
        call = {"cache_implementation": "static", "compile_config": config, "max_cache_len": 100}
        assert decode(target, prompt, drafter, 30, **call).sequences.equal(plain)
    assert not counters["graph_break"]
    assert 3 <= len(graphs.shapes) <= 4
    torch._dynamo.reset()


def test_an_eager_round_reads_the_draft_and_the_choices(prompt, monkeypatch):
    target = let_count(make_target(hidden_size=128))
    forced = ForcedDrafter(make_drafter(target, tree_size=TREE_SIZE), [3])
    monkeypatch.setattr(verdict, "_reads_are_free", lambda values: False)
    with counted(monkeypatch) as rounds:
        statistics = decode(target, prompt, forced, 40).statistics
    assert statistics.accepted_lengths[2:-1] == [3] * (statistics.rounds - 3)
    assert max(each["reads"].total() for each in rounds[2:-1]) <= 2
