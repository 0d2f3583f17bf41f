"""Predicts the time of a round from operators and bytes, measures it, and prints what is left to gain.

    python benchmarks/round_cost.py                                  # SmolLM2-135M-Instruct, then the shape of 8B
    python benchmarks/round_cost.py --targets gemma-3-270m.gguf      # Hub names, folders, .gguf files
    python benchmarks/round_cost.py --tiny                           # whether it runs, in seconds

The model: time = a x operators + bytes / bandwidth + operations / rate. Small probes measure the three constants of the
machine:

- a: time of a dispatched operator, with the Python around it, from forwards of a very small Llama with fewer and more
  layers.
- bandwidth: bytes of weights a second, in products with one row whose weights exceed the caches.
- rate: operations a second, from the same products with 25 rows. Both are measured for weights as they are stored
  (plain steps) and for packed ones (rounds).

The other quantities are counted in running calls. Operators: those that the profiler sees dispatched by Python or by
compiled code, but not by other operators. Bytes: of each operand that is older than the round, such as weights, keys
and values, once for each operator that reads it. Operations: two for each number of such an operand and each row.
Layers are not compiled here, because operators and bytes inside a program cannot be counted.

The limit is bytes / bandwidth; "left" is the share of the measured time above it. The 8B shape is measured with two
small numbers of layers and extrapolated.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from runner import counts, dtype_of, keep, names, options, print_table

if TYPE_CHECKING:
    import torch

SHAPE, PARTS = "8b", ("draft", "verify", "rest")
_STEP, _END, _SKIPPED = "step", "", 3  # the first rounds pack weights and try the target
_LAYERS, _TOKENS = (2, 3), 30


@dataclass(frozen=True)
class Machine:
    """Numbers of the machine: seconds of an operator, bytes and operations a second."""

    operator: float
    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Cost:
    """What a step of plain decoding or a part of a round takes, in seconds, and why."""

    operators: float
    read_bytes: float
    operations: float
    seconds: float

    def predicted(self, machine: Machine) -> float:
        """Seconds by the law."""
        products = self.read_bytes / machine.bandwidth + self.operations / machine.rate
        return machine.operator * self.operators + products

    def with_layers(self, other: Cost, layers: tuple[int, int], all_layers: int) -> Cost:
        """Cost with all layers, from this one and that of more layers."""
        steps = (all_layers - layers[0]) / (layers[1] - layers[0])
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Cost(*(few + steps * (more - few) for few, more in pairs))


@dataclass(frozen=True)
class Probes:
    """Small calls whose quickest times tell a machine's numbers. The weights `[size, size]` exceed the caches."""

    dtype: torch.dtype
    packed: bool
    size: int = 1536
    weights: int = 96
    times: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Measures all, and keeps what is quicker than before: other programs only slow it down."""
        import torch
        import torch.nn.functional as F

        from hf_hsdraft.cpu.packed_weights import PackedWeight

        for name, (step, _) in self.forwards.items():
            self._time(name, step, 40)
        large = [torch.randn(self.size, self.size, dtype=self.dtype) for _ in range(self.weights)]
        small = [torch.randn(16, 16, dtype=self.dtype)] * self.weights
        for kind, (size, some) in itertools.product((False, True), ((self.size, large), (16, small))):
            products = [
                PackedWeight(each) if kind and self.packed else functools.partial(F.linear, weight=each)
                for each in some
            ]
            for rows in (1, 25):
                x = torch.randn(rows, size, dtype=self.dtype)
                self._time(f"{kind}, {size}, {rows}", lambda x=x, all_of=products: [each(x) for each in all_of], 6)

    @functools.cached_property
    def forwards(self) -> dict[str, tuple[Callable[[], Any], int]]:
        """Forwards of very small Llamas, and how many operators each dispatches."""
        import torch
        from gpu_bench.counts import dispatched, traced
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
        found = {}
        for name, layers in (("few", 2), ("many", 12)):
            config = LlamaConfig(**sizes, num_hidden_layers=layers)
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
            step = functools.partial(model, torch.ones(1, 1, dtype=torch.long), use_cache=False)
            found[name] = step, len(dispatched(traced(step, model.device)))
        return found

    def _time(self, name: str, call: Callable[[], Any], times: int) -> None:
        import torch

        with torch.inference_mode():
            for _ in range(times):
                begin = time.perf_counter()
                call()
                spent = time.perf_counter() - begin
                self.times[name] = min(self.times.get(name, spent), spent)

    def machine(self, packed: bool) -> Machine:
        """The machine's numbers, for weights as they are stored or for packed ones."""
        operators = self.forwards["many"][1] - self.forwards["few"][1]
        one, many = (
            self.times[f"{packed}, {self.size}, {rows}"] - self.times[f"{packed}, 16, {rows}"] for rows in (1, 25)
        )
        numbers = self.weights * self.size**2
        return Machine(
            operator=(self.times["many"] - self.times["few"]) / operators,
            bandwidth=numbers * self.dtype.itemsize / one,
            rate=2 * numbers * 24 / max(many - one, 0.02 * one),  # less is noise
        )


def watched(target: Any, inputs: Mapping[str, Any], drafter: Any, note: Callable[[str], None], tokens: int) -> None:
    """Decodes; `note` gets each part's name when it begins."""
    from transformers import LogitsProcessorList
    from transformers.generation.streamers import BaseStreamer

    from hf_hsdraft.engine.loop import Observer

    def begin_step(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        note(_STEP)
        return scores

    class Rounds(Observer, BaseStreamer):
        began = staticmethod(functools.partial(note, "draft"))
        drafted = staticmethod(functools.partial(note, "verify"))
        verified = staticmethod(functools.partial(note, "rest"))

        def put(self, value: Any) -> None:
            pass

        def end(self) -> None:
            note(_END)

    kwargs = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None}
    if drafter is None:
        target.generate(**inputs, **kwargs, logits_processor=LogitsProcessorList([begin_step]))
        note(_END)
    else:
        target.generate(**inputs, **kwargs, assistant_model=drafter, streamer=Rounds())


def cost_of(target: Any, inputs: Mapping[str, Any], drafter: Any = None) -> dict[str, Cost]:
    """Measures and counts the parts of a round, or with no drafter a step.

    Times are lower quartiles over rounds, since other programs disturb the slower ones; counts are medians.
    """
    import torch
    from gpu_bench.counts import dispatched, traced

    decode = functools.partial(watched, target, inputs, drafter)
    decode(lambda part: None, 2 * _TOKENS)
    clock: list[tuple[str, float]] = []
    decode(lambda part: clock.append((part, time.perf_counter())), 2 * _TOKENS)
    spans = ((part, after - begin) for (part, begin), (_, after) in itertools.pairwise(clock))
    seconds = _typical(spans, lambda times: sorted(times)[len(times) // 4])

    def mark(part: str) -> None:
        with torch.profiler.record_function(f"part {part}"):
            pass

    events = traced(lambda: decode(mark, _TOKENS), target.device)
    marks = sorted((event["ts"], event["name"][5:]) for event in events if str(event.get("name")).startswith("part "))
    begun = dispatched(event for event in events if not str(event.get("name")).startswith("part "))
    operators = _typical(
        (part, sum(begin <= each < after for each in begun)) for (begin, part), (after, _) in itertools.pairwise(marks)
    )
    reads = _reading_mode()
    with reads:
        decode(reads.begin, _TOKENS)
    read_bytes, operations = (_typical((part, each[i]) for part, each in reads.found) for i in (0, 1))
    return {part: Cost(operators[part], read_bytes[part], operations[part], seconds[part]) for part in seconds}


def _typical(found: Any, of: Callable[[list[float]], float] = median) -> dict[str, float]:
    """Typical numbers by part, without the first and the last rounds, which differ from the others."""
    by_part: dict[str, list[float]] = defaultdict(list)
    for part, number in found:
        by_part[part].append(number)
    return {part: of(numbers[_SKIPPED:-1] or numbers) for part, numbers in by_part.items() if part != _END}


def _reading_mode() -> Any:
    """Returns a mode that counts bytes and operations of operands older than the round, in `found`, part by part."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    gathers = ("embedding", "index", "index_select", "gather")

    def tensors(part: Any) -> list[torch.Tensor]:
        return [each for each in tree_leaves(part) if isinstance(each, torch.Tensor)]

    def place(tensor: torch.Tensor) -> int:
        return id(tensor) if tensor.layout != torch.strided else tensor.untyped_storage().data_ptr()

    class Reads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[tuple[str, tuple[int, int]]] = []
            self._part, self._bytes, self._operations, self._made = _END, 0, 0, set[int]()

        def begin(self, part: str) -> None:
            self.found.append((self._part, (self._bytes, self._operations)))
            self._part, self._bytes, self._operations = part, 0, 0
            if part in (_STEP, PARTS[0]):
                self._made.clear()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            given, made = tensors((args, kwargs)), tensors(result)
            if not func._schema.is_mutable and not func.is_view:
                self._count(str(func.overloadpacket.__name__), given, made)
            self._made |= {place(each) for each in made} - {place(each) for each in given}
            return result

        def _count(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
            for each in given:
                if place(each) in self._made:
                    continue
                if name in gathers:
                    self._bytes += made[0].numel() * made[0].element_size()
                    break
                self._bytes += each.numel() * each.element_size()
                first = given[0]
                if each is not first and each.dim() > 1 and first.shape[-1] in each.shape:
                    self._operations += 2 * each.numel() * (first.numel() // max(first.shape[-1], 1))

    return Reads()


def drafters_of(target: Any, drafter: Any, rows: Sequence[int], packed: bool) -> Iterator[tuple[int, Any]]:
    """Drafters of trees of fixed sizes, whose forwards read so many rows."""
    from gpu_bench.targets import with_nodes

    from hf_hsdraft.drafters.base.protocol import WrappedDrafter

    for count in rows:
        wrapped = WrappedDrafter(drafter)
        with_nodes(wrapped, count - 1, 1)
        wrapped.generation_config.packed_weights = bool(packed)
        wrapped.generation_config.compiled_layers = False
        yield count, wrapped


def costs_of(target: Any, inputs: Any, drafter: Any, given: Any) -> dict[str, Cost]:
    """Costs of a plain step, and of the parts of rounds that read so many rows."""
    found = {"plain step": cost_of(target, inputs)[_STEP]}
    for rows, fixed in drafters_of(target, drafter, given.rows, given.packed):
        found |= {f"{part}, {rows} rows": cost for part, cost in cost_of(target, inputs, fixed).items()}
    return found


def loaded(name: str, given: Any) -> dict[str, Cost]:
    """Costs of a target by its name; an untrained drafter drafts where none is known."""
    from gpu_bench.targets import random_drafter

    from hf_hsdraft.bench.prompts import DEFAULT_PROMPTS
    from hf_hsdraft.drafters.hidden_state.modeling_hsdraft import HSDrafter
    from hf_hsdraft.runtime.prompt_inputs import encode_prompt
    from hf_hsdraft.runtime.target_loading import default_drafter, load_target

    target, tokenizer = load_target(None if name == "smollm2" else name, dtype_of(given))
    folder = default_drafter(None) if name == "smollm2" else None
    drafter = HSDrafter.from_pretrained(folder, dtype=dtype_of(given)) if folder else random_drafter(target)
    return costs_of(target, encode_prompt(tokenizer, DEFAULT_PROMPTS[0].turns[0]), drafter.eval(), given)


def random(given: Any, layers: int) -> dict[str, Cost]:
    """Costs of some layers of the 8B shape."""
    from dataclasses import replace

    import torch
    from gpu_bench.targets import TINY, Shape, random_drafter
    from oracles.forced_drafter import let_count
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = replace(TINY if given.tiny else Shape(), num_hidden_layers=layers)
    config = LlamaConfig(**asdict(shape), eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device("meta"):  # the weights are drawn once, by `let_count`
        target = AutoModelForCausalLM.from_config(config, dtype=dtype_of(given)).eval()
    target = target.to_empty(device="cpu")
    with torch.no_grad():
        for norm in (each for each in target.parameters() if each.dim() == 1):
            norm.fill_(1.0)
    let_count(target)
    ids = torch.randint(1, shape.vocab_size, (1, 64))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return costs_of(target, inputs, random_drafter(target), given)


def rows_of(name: str, costs: Mapping[str, Cost], machines: Mapping[str, Machine]) -> list[dict[str, Any]]:
    """Rows of the table. A round is its parts together."""
    whole: dict[str, Cost] = {}
    for part, cost in costs.items():
        head, _, rows = part.partition(", ")
        key = part if not rows or head == "verify" else None
        if key:
            whole[key] = cost
        if rows:
            before = asdict(whole[f"round, {rows}"]) if f"round, {rows}" in whole else dict.fromkeys(asdict(cost), 0.0)
            whole[f"round, {rows}"] = Cost(**{each: before[each] + value for each, value in asdict(cost).items()})
    found = []
    for part, cost in whole.items():
        machine = machines["stored" if part == "plain step" else "packed"]
        limit = cost.read_bytes / machine.bandwidth
        figures = {"predicted": cost.predicted(machine), "limit": limit, "left": 1 - limit / cost.seconds}
        found.append({"target": name, "part": part, **asdict(cost), **figures})
    return found


def _cells(row: Mapping[str, Any]) -> list[Any]:
    times = [f"{1e3 * row[name]:.1f}" for name in ("predicted", "seconds", "limit")]
    sizes = [f"{row['operators']:,.0f}", f"{row['read_bytes'] / 1e6:,.0f}", f"{row['operations'] / 1e9:.1f}"]
    return [row["target"], row["part"], *sizes, *times, f"{row['left']:.0%}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, dtype="bfloat16", json=None)
    parser.add_argument("--targets", type=names, default=["smollm2", SHAPE], help="default: smollm2,8b")
    parser.add_argument("--rows", type=counts, default=[9, 25], help="rows of the rounds' forwards; default: 9,25")
    parser.add_argument("--packed", type=int, choices=(0, 1), default=1, help="rounds multiply by packed weights")
    parser.add_argument("--tiny", action="store_true", help="small random targets")
    given = parser.parse_args(arguments)
    import torch
    from gpu_bench.targets import TINY, Shape

    from hf_hsdraft.bench.machine import processor

    probes = Probes(dtype_of(given), bool(given.packed), *((64, 8) if given.tiny else ()))
    probes.run()
    found: dict[str, dict[str, Cost]] = {}
    for name in given.targets:
        if name != SHAPE:
            found[name] = loaded(name, given)
            continue
        few, more = (random(given, layers) for layers in _LAYERS)
        layers = (TINY if given.tiny else Shape()).num_hidden_layers
        found[f"{name}, {_LAYERS[0]} layers"] = few
        found[f"{name}, {layers} layers, scaled"] = {
            part: few[part].with_layers(more[part], _LAYERS, layers) for part in few
        }
    probes.run()
    machines = {"stored": probes.machine(False), "packed": probes.machine(True)}
    rows = [row for name, costs in found.items() for row in rows_of(name, costs, machines)]
    place = f"{processor(torch.device('cpu'))}, {torch.get_num_threads()} threads"
    print(place)
    for name, each in machines.items():
        speeds = f"{each.bandwidth / 1e9:.1f} GB/s, {each.rate / 1e9:,.0f} billion operations/s"
        print(f"{name} weights: an operator takes {1e6 * each.operator:.1f} us; {speeds}")
    columns = ("target", "part", "operators", "MB", "GFLOP", "predicted, ms", "measured, ms", "limit, ms", "left")
    print_table(columns, map(_cells, rows))
    numbers = {name: asdict(each) for name, each in machines.items()}
    keep(
        given.json,
        {"machine": place, "torch": torch.__version__, "dtype": given.dtype, "probes": numbers, "rows": rows},
    )


if __name__ == "__main__":
    main()
