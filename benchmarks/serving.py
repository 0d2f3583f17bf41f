"""Times how requests of several clients are decoded: together with drafts, one after another, or in plain ways.

    python benchmarks/serving.py --prompts spec_bench_dev.jsonl --clients 8 --requests 32 --dtype bfloat16
    python benchmarks/serving.py --prompts spec_bench_dev.jsonl --rate 1.5 --requests 64 --picture serving.svg

Each client sends its next request when it has its answer; with `--rate`, requests come at random times instead, as many
a second (a Poisson load). `--picture` draws how many answers and first tokens were there by when.
All ways decode the same requests greedily to the same lengths, in one process, one way after another.

- together: `hf_hsdraft.generate_many`, with the drafter
- one by one: `generate()` with the drafter, first come, first served
- plain batches: `generate()` of the requests that wait, up to `--batch` at once, padded; each lasts as long as its
  longest text
- transformers: its continuous batching, `init_continuous_batching`, without drafts
- vllm: its engine on the same device without drafts, where it is installed

tokens/s counts new tokens from the first request to the last answer; the first token is counted from when its request
was sent. tau: tokens emitted per target forward and row, bonus token included.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from runner import keep, loaded_target, options, print_table, prompt_texts

COLUMNS = ("way", "tokens/s", "relative to one by one", "first token, s: median", "90th percentile", "tau")


@dataclass
class Load:
    """Requests of clients, by number: when each was sent, had its first token, and its answer."""

    arguments: Sequence[dict[str, Any]]
    clients: int
    rate: float | None
    seed: int
    sent: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, at = random.Random(self.seed), 0.0
        self._times = []
        for _ in self.arguments:
            at += rng.expovariate(self.rate) if self.rate else 0.0
            self._times.append(at)
        self.begin()

    def begin(self) -> None:
        self._begin = time.perf_counter()

    @property
    def over(self) -> bool:
        return len(self.done) == len(self.arguments)

    def due(self) -> list[int]:
        """Numbers of the requests that are sent now."""
        now, found = time.perf_counter(), []
        while (number := len(self.sent)) < len(self.arguments):
            busy = (
                number - len(self.done) >= self.clients
                if self.rate is None
                else now - self._begin < self._times[number]
            )
            if busy:
                break
            self.sent[number] = now
            found.append(number)
        return found

    def streamer(self, number: int) -> Any:
        return _First(lambda: self.first.setdefault(number, time.perf_counter()))

    def ended(self, number: int) -> None:
        self.done[number] = time.perf_counter()

    def row(self, tokens: int) -> tuple[float, float, float]:
        """tokens/s, and the median and the 90th percentile of the time to the first token."""
        waits = [self.first[number] - sent for number, sent in self.sent.items()]
        seconds = max(self.done.values()) - min(self.sent.values())
        return tokens / seconds, statistics.median(waits), statistics.quantiles(waits, n=10)[-1]


class _First:
    """A streamer that notes the first new token; the prompt comes before it."""

    def __init__(self, note: Callable[[], Any]) -> None:
        self._note, self._puts = note, 0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self._note()

    def end(self) -> None:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(
        __doc__, target=None, drafter=None, prompts=None, max_new_tokens=96, dtype="float32", seed=0, json=None
    )
    parser.add_argument("--clients", type=int, default=8, help="default: 8")
    parser.add_argument("--requests", type=int, default=32, help="default: 32")
    parser.add_argument("--batch", type=int, default=8, help="texts decoded together; default: 8")
    parser.add_argument("--rate", type=float, help="requests a second, at random times; default: clients that wait")
    parser.add_argument("--longest", type=int, default=400, help="tokens of a prompt; default: 400")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: all of them")
    parser.add_argument("--picture", help="SVG or PNG file to draw")
    given = parser.parse_args(arguments)
    if given.picture and not given.picture.endswith((".svg", ".png")):
        parser.error(f"--picture {given.picture}: expected a name that ends with .svg or .png")
    given.limit = given.requests
    from hf_hsdraft import AutoDrafter

    target, tokenizer = loaded_target(given)
    name = given.drafter[0] if given.drafter else None
    drafter = AutoDrafter.from_pretrained(name, dtype=target.dtype) if name else AutoDrafter.for_target(target)
    requests = _requests(given, target, tokenizer)
    _warm_up(target, drafter, requests[0])
    found, tokens = dict[str, Any](), sum(each["max_new_tokens"] for each in requests)
    loads = dict[str, Load]()
    for way in given.ways.split(","):
        if way == "vllm" and find_spec("vllm") is None:
            print("vllm: not installed", file=sys.stderr)
            continue
        load = loads[way] = Load(requests, given.clients, given.rate, given.seed)
        tau = WAYS[way](target, drafter, load, given.batch)
        found[way] = {"tokens_per_second": load.row(tokens)[0], "first": load.row(tokens)[1:], "tau": tau}
        print(f"{way}: {found[way]}", file=sys.stderr, flush=True)
    keep(given.json, {"ways": found})
    if given.picture:
        _draw(loads, given.picture)
    base = found.get("one", next(iter(found.values())))["tokens_per_second"]
    print_table(
        COLUMNS,
        (
            [way, each["tokens_per_second"], each["tokens_per_second"] / base, *each["first"], each["tau"]]
            for way, each in found.items()
        ),
    )
    return 0


def _draw(loads: Mapping[str, Load], path: str) -> None:
    """Draws for each way how many requests were sent, had a first token and were answered, by time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for title, name, axis in zip(("first token", "answer"), ("first", "done"), axes, strict=True):
        for way, load in loads.items():
            begin = min(load.sent.values())
            times = sorted(each - begin for each in getattr(load, name).values())
            axis.step([0.0, *times], range(len(times) + 1), where="post", label=way)
        axis.set(title=f"requests with {title}", xlabel="seconds")
    axes[0].legend()
    figure.savefig(path)


def _requests(given: Any, target: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Prompts and lengths of answers from a quarter of `--max-new-tokens` to all; no answer ends before."""
    import torch

    rng, found = random.Random(given.seed), []
    for text in prompt_texts(given):
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = ids["input_ids"][:, -given.longest :].to(target.device)
        count = rng.randint(given.max_new_tokens // 4, given.max_new_tokens)
        call = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), **call})
    return found


def _warm_up(target: Any, drafter: Any, request: dict[str, Any]) -> None:
    """Measures what drafting costs on this machine, which the first calls of a process do."""
    for _ in range(3):
        target.generate(**request, assistant_model=drafter)


def _together(target: Any, drafter: Any, load: Load, batch: int) -> float:
    from hf_hsdraft.batching.scheduler import ContinuousBatching

    batching, numbers = ContinuousBatching(target, drafter, batch), dict[int, int]()
    while not load.over:
        for number in load.due():
            arguments = {**load.arguments[number], "streamer": load.streamer(number)}
            numbers[batching.submit(arguments, 0)] = number
        for done in batching.step():
            if done.error is not None:
                raise done.error
            load.ended(numbers[done.index])
    counted = batching.statistics
    return counted.new_tokens / max(counted.row_forwards, 1)


def _one_by_one(target: Any, drafter: Any, load: Load, batch: int) -> float:
    waiting, emitted, forwards = list[int](), 0, 0
    while not load.over:
        waiting += load.due()
        if waiting:
            number = waiting.pop(0)
            call = {**load.arguments[number], "streamer": load.streamer(number), "return_dict_in_generate": True}
            counted = target.generate(**call, assistant_model=drafter).statistics
            emitted, forwards = emitted + counted.new_tokens, forwards + counted.row_forwards
            load.ended(number)
    return emitted / forwards


def _plain_batches(target: Any, drafter: Any, load: Load, batch: int) -> float:
    import torch
    import torch.nn.functional as F

    waiting = list[int]()
    while not load.over:
        waiting += load.due()
        rows, waiting = waiting[:batch], waiting[batch:]
        if not rows:
            continue
        calls = [load.arguments[number] for number in rows]
        longest = max(each["input_ids"].shape[1] for each in calls)
        spare = [(longest - each["input_ids"].shape[1], 0) for each in calls]
        inputs = {
            name: torch.cat([F.pad(each[name], pad) for each, pad in zip(calls, spare, strict=True)])
            for name in ("input_ids", "attention_mask")
        }
        count = max(each["max_new_tokens"] for each in calls)

        class Noted(_First):
            def __init__(self, rows: Sequence[int]) -> None:
                super().__init__(lambda: [load.first.setdefault(row, time.perf_counter()) for row in rows])

        streamer = Noted(rows) if len(rows) == 1 else None
        criteria = [] if streamer else [_FirstOfRows(load, rows)]
        call = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "stopping_criteria": criteria}
        target.generate(**inputs, **call, streamer=streamer)
        for number in rows:
            load.ended(number)
    return 1.0


class _FirstOfRows:
    """A criterion that notes the first token of all rows; `generate()` takes streamers for single texts only."""

    def __init__(self, load: Load, rows: Sequence[int]) -> None:
        self._load, self._rows = load, rows

    def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
        for row in self._rows:
            self._load.first.setdefault(row, time.perf_counter())
        return ids.new_zeros(len(ids), dtype=bool)


def _transformers(target: Any, drafter: Any, load: Load, batch: int) -> float:
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1024)
    attention = target.config._attn_implementation
    manager = target.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        manager.add_request(load.arguments[0]["input_ids"][0].tolist(), max_new_tokens=4)
        while manager.get_result(timeout=0.1) is None:  # its first request takes long
            pass
        load.begin()
        numbers = dict[str, int]()
        while not load.over:
            for number in load.due():
                call = load.arguments[number]
                name = manager.add_request(
                    call["input_ids"][0].tolist(), max_new_tokens=call["max_new_tokens"], streaming=True
                )
                numbers[name] = number
            result = manager.get_result(timeout=0.01)
            if result is None:
                continue
            number = numbers[result.request_id]
            if result.generated_tokens:
                load.first.setdefault(number, time.perf_counter())
            if result.is_finished():
                load.ended(number)
    finally:
        manager.stop(block=True)
        target.set_attn_implementation(attention)
    return 1.0


def _vllm(target: Any, drafter: Any, load: Load, batch: int) -> float:
    from vllm import EngineArgs, LLMEngine, SamplingParams

    dtype = str(target.dtype).removeprefix("torch.")
    args = EngineArgs(model=target.name_or_path, dtype=dtype, max_num_seqs=batch, max_model_len=2048)
    engine = LLMEngine.from_engine_args(args)

    def add(number: int, name: str) -> None:
        call = load.arguments[number]
        count = call["max_new_tokens"]
        sampling = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": call["input_ids"][0].tolist()}, sampling)

    add(0, "first")
    while engine.has_unfinished_requests():  # its first request takes long
        engine.step()
    load.begin()
    while not load.over:
        for number in load.due():
            add(number, str(number))
        for output in engine.step():
            number = int(output.request_id)
            if output.outputs[0].token_ids:
                load.first.setdefault(number, time.perf_counter())
            if output.finished:
                load.ended(number)
    return 1.0


WAYS = {
    "together": _together,
    "one": _one_by_one,
    "plain": _plain_batches,
    "transformers": _transformers,
    "vllm": _vllm,
}

if __name__ == "__main__":
    sys.exit(main())
