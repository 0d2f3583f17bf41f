"""Times how requests of several clients are decoded: together with drafts, one after another, or in plain ways.

    python benchmarks/serving.py --prompts spec_bench_dev.jsonl --clients 8 --requests 32 --dtype bfloat16
    python benchmarks/serving.py --prompts spec_bench_dev.jsonl --rate 1.5 --requests 64 --picture serving.svg
    python benchmarks/serving.py --prompts spec_bench_dev.jsonl --vllm-python vllm/bin/python --ways together,vllm
    python benchmarks/serving.py --prompts spec_bench_dev.jsonl --ways "" --server http://localhost:8001 \\
        --server http://localhost:8002 --repeats 3
    python benchmarks/serving.py --dtype bfloat16 --beside 100,500,2000
    python benchmarks/serving.py --memory 10000

Each client sends its next request when it has its answer; with `--rate`, requests come at random times instead, as many
a second (a Poisson load). `--picture` draws how many answers and first tokens were there by when.
All ways decode the same requests greedily to the same lengths, one way after another, `--repeats` times in changing
order; figures are medians. Each but vllm first decodes `--batch` of them, which is not timed: costs are measured and
layers compiled then. A way that fails is a line with its error.

- together: `hf_hsdraft.generate_many`, with the drafter
- one by one: `generate()` with the drafter, first come, first served
- plain batches: `generate()` of the requests that wait, up to `--batch` at once, padded; each lasts as long as its
  longest text
- transformers: its continuous batching, `init_continuous_batching`, without drafts
- vllm: its engine on the same device without drafts, by `--vllm-python` or where it is installed
- an address of `--server`: a running `hsdraft serve`, or another server with OpenAI's completions that takes
  `min_tokens`, as vLLM's; its answers are streamed

tokens/s counts new tokens from the first request to the last answer; the first token is counted from when its request
was sent. tau: tokens emitted per target forward and row, bonus token included.

`--beside` times rounds of `--batch` texts of 100 tokens instead, one of which has so many: what a long text costs the
others.

`--memory` decodes so many short requests of a small random target with a drafter instead, and prints what the process
holds after each tenth.
"""

from __future__ import annotations

import functools
import gc
import json
import queue
import random
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runner import LineWorker, counts, keep, loaded_target, names, options, print_table, prompt_texts

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
    parser.add_argument("--ways", type=names, default=list(WAYS), help="default: all of them")
    parser.add_argument("--server", action="append", default=[], help="address of a running server; repeat for several")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each way; default: 1")
    parser.add_argument("--picture", help="SVG or PNG file to draw")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter of vLLM's environment")
    parser.add_argument("--beside", type=counts, help="lengths of one text beside others of 100 tokens")
    parser.add_argument("--memory", type=int, help="short requests of a small target, of which memory is printed")
    given = parser.parse_args(arguments)
    if given.memory:
        print_table(("requests", "resident, MiB", "objects", "numbers in tensors"), _held(given.memory))
        return 0
    if unknown := [way for way in given.ways if way not in WAYS]:
        parser.error(f"--ways {', '.join(unknown)}: expected some of {', '.join(WAYS)}")
    if given.picture and not given.picture.endswith((".svg", ".png")):
        parser.error(f"--picture {given.picture}: expected a name that ends with .svg or .png")
    given.limit = given.requests
    from hf_hsdraft import AutoDrafter

    target, tokenizer = loaded_target(given)
    name = given.drafter[0] if given.drafter else None
    drafter = AutoDrafter.from_pretrained(name, dtype=target.dtype) if name else AutoDrafter.for_target(target)
    if given.beside:
        heads = "tokens of one text", "milliseconds of a round, median", "relative to the first"
        print_table(heads, _beside(target, tokenizer, drafter, given.beside, given.batch))
        return 0
    requests = _requests(given, target, tokenizer)
    if given.ways:
        _warm_up(target, drafter, requests[0])
    found, loads, failed = _measured(given, target, drafter, tokenizer, requests)
    keep(given.json, {"ways": found, "failed": failed})
    if given.picture and loads:
        _draw(loads, given.picture)
    base = found.get("one", next(iter(found.values()), {})).get("tokens_per_second")
    lines = [
        [way, (fast := each["tokens_per_second"]), fast / base, *each["first"], each["tau"]]
        for way, each in found.items()
    ]
    print_table(COLUMNS, [*lines, *([way, why, *[None] * 4] for way, why in failed.items())])
    return 0


def _measured(
    given: Any, target: Any, drafter: Any, tokenizer: Any, requests: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Load], dict[str, str]]:
    """Medians and the last load of each way, and why others have failed."""
    from hf_hsdraft.bench.calls import turn_order

    ways: dict[str, Callable[..., float | None]] = {name: WAYS[name] for name in given.ways}
    if "vllm" in ways:
        ways["vllm"] = functools.partial(_vllm, python=given.vllm_python, name=given.target)
    ways |= {url: functools.partial(_served, url=url, tokenizer=tokenizer) for url in given.server}
    rows, loads, failed = dict[str, list[tuple[Any, ...]]](), dict[str, Load](), dict[str, str]()
    tokens = sum(each["max_new_tokens"] for each in requests)
    for turn in range(given.repeats):
        for way in turn_order([each for each in ways if each not in failed], turn):
            try:
                if way != "vllm" and not turn:  # its engine would start a second time
                    ways[way](target, drafter, Load(requests[: given.batch], given.batch, None, 0), given.batch)
                load = loads[way] = Load(requests, given.clients, given.rate, given.seed)
                tau = ways[way](target, drafter, load, given.batch)
                rows.setdefault(way, []).append((*load.row(tokens), tau))
                print(f"{way}: {rows[way][-1]}", file=sys.stderr, flush=True)
            except Exception as error:
                failed[way] = f"failed: {error}"
                loads.pop(way, None)
    found = {}
    for way, each in ((way, list(zip(*rows[way], strict=True))) for way in ways if way in rows):
        speed, median, late = map(statistics.median, each[:3])
        tau = None if None in each[3] else statistics.median(each[3])
        found[way] = {"tokens_per_second": speed, "first": [median, late], "tau": tau}
    return found, loads, failed


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
    counted = batching.tally.statistics
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
    longest = max(each["input_ids"].shape[1] + each["max_new_tokens"] for each in load.arguments)
    manager = target.init_continuous_batching(config, _room(longest, batch))
    manager.start()
    try:
        manager.add_request(load.arguments[0]["input_ids"][0].tolist(), max_new_tokens=4)
        while manager.get_result(timeout=0.1) is None:  # its first request takes long
            _check(manager)
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
                _check(manager)
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


def _room(longest: int, batch: int) -> Any:
    """Room for a batch of texts; by default it takes most of the memory, and minutes to fill it."""
    from transformers import ContinuousBatchingConfig

    page = 32
    blocks = batch * (-(-longest // page) + 1)
    return ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks, max_batch_tokens=512, max_requests_per_batch=batch
    )


def _check(manager: Any) -> None:
    if not manager.is_running():
        raise RuntimeError("its thread has ended; see the log")


def _vllm(target: Any, drafter: Any, load: Load, batch: int, python: str, name: str | None) -> float:
    if python == sys.executable and find_spec("vllm") is None:
        raise RuntimeError("not installed, and no --vllm-python")
    from hf_hsdraft.runtime.target_loading import target_folder

    script, dtype = str(Path(__file__).with_name("vllm_decoding.py")), str(target.dtype).removeprefix("torch.")
    worker = LineWorker([python, script, "--steps", target_folder(name, target.dtype), dtype, str(batch)])
    load.begin()
    while not load.over:
        new = [(number, load.arguments[number]) for number in load.due()]
        order = [[str(number), call["input_ids"][0].tolist(), call["max_new_tokens"]] for number, call in new]
        for number, ended in worker.ask({"new": order}):
            load.first.setdefault(int(number), time.perf_counter())
            if ended:
                load.ended(int(number))
    worker.close()
    return 1.0


def _served(target: Any, drafter: Any, load: Load, batch: int, url: str, tokenizer: Any) -> float | None:
    """Sends requests to a server, each on a thread; what it drafts is not counted."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        [model, *_] = json.load(answer)["data"]
    done = queue.Queue[tuple[int, Exception | None]]()

    def ask(number: int) -> None:
        try:
            call = load.arguments[number]
            count, text = call["max_new_tokens"], tokenizer.decode(call["input_ids"][0])
            least = {"min_tokens": count, "ignore_eos": True}
            if model["owned_by"] == "hf_hsdraft":
                least = {"generation_config": json.dumps({"min_new_tokens": count})}
            body = {"model": model["id"], "prompt": text, "max_tokens": count, "temperature": 0.0, "stream": True}
            data, kind = json.dumps({**body, **least}).encode(), {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, kind)) as lines:
                for line in lines:
                    if b'"text"' in line and b'"text":""' not in line:
                        load.first.setdefault(number, time.perf_counter())
            done.put((number, None))
        except urllib.error.HTTPError as error:
            done.put((number, RuntimeError(f"{error}: {error.read().decode()}")))
        except Exception as error:
            done.put((number, error))

    load.begin()
    while not load.over:
        for number in load.due():
            threading.Thread(target=ask, args=(number,), daemon=True).start()
        try:
            number, error = done.get(timeout=0.01)
        except queue.Empty:
            continue
        if error is not None:
            raise error
        load.ended(number)
    return None


def _beside(target: Any, tokenizer: Any, drafter: Any, lengths: Sequence[int], batch: int) -> Iterator[list[Any]]:
    """Times of rounds of a batch without drafts, by the length of one text."""

    from hf_hsdraft.batching.scheduler import ContinuousBatching

    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 1.0  # nothing is drafted
    first = None
    for turn, length in enumerate((lengths[0], *lengths)):  # once to warm up
        batching = ContinuousBatching(target, drafter, batch, 1 << 20)
        for row in range(batch):
            ids = tokenizer(str(__doc__) * (2 + length // 100), return_tensors="pt")["input_ids"]
            ids = ids[:, row : row + (100 if row else length)]
            batching.submit({"input_ids": ids, "max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}, 0)
        batching.step()
        times = []
        while batching.running == batch:
            begin = time.perf_counter()
            batching.step()
            times.append(1000.0 * (time.perf_counter() - begin))
        batching.close()
        if turn:
            median = statistics.median(times)
            first = median if first is None else first
            yield [length, median, median / first]


def _held(count: int) -> Iterator[list[Any]]:
    """What the process holds while it decodes `count` short requests."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_hsdraft import HSDraftConfig, HSDrafter
    from hf_hsdraft.batching.scheduler import ContinuousBatching

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, eos_token_id=4, **sizes)).eval()
    target.generation_config.pad_token_id = 0
    drafter = HSDrafter(HSDraftConfig.for_target(target, draft_vocab_size=97, injector_rank=8)).eval()
    drafter.generation_config.packed_weights = True  # however small
    rng, batching = random.Random(0), ContinuousBatching(target, drafter, 4, 16, prefix_cache_tokens=200)
    for number in range(1, count + 1):
        ids = [*range(10, 10 + rng.choice([0, 12])), *(rng.randrange(6, 97) for _ in range(rng.randrange(1, 9)))]
        call = {"max_new_tokens": rng.randrange(1, 8), "do_sample": rng.random() < 0.3}
        batching.submit({"input_ids": torch.tensor([ids]), **call}, 0)
        while batching.free < -8:
            batching.step()
        if number % max(count // 10, 1) == 0:
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
            numbers = sum(each.numel() for each in gc.get_objects() if type(each) is torch.Tensor)
            yield [number, resident, len(gc.get_objects()), numbers]


WAYS = {
    "together": _together,
    "one": _one_by_one,
    "plain": _plain_batches,
    "transformers": _transformers,
    "vllm": _vllm,
}

if __name__ == "__main__":
    sys.exit(main())
