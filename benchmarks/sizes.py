"""One table of targets of the sizes that people run on a CPU: plain, packed and drafted, in bfloat16 and GGUF blocks.

    python benchmarks/sizes.py --shapes 1b [--weights bfloat16,Q8_0,Q4_K] [--rates 0.6,0.8]

The targets have the shapes of Llama-3.2-1B and 3B, with an output layer of their own, and random weights by which token
x is followed by x + 1. So a given share of drafted tokens can be made right, while target, untrained drafter and rules
do all their work: chosen acceptance, real time. For blocks all products' weights are quantised, written to a GGUF file
and dequantised again, as transformers loads such a file. "Packed" is plain decoding by copies of the weights, drafted
rounds multiply by them too, by the blocks where the processor has a kernel for them. Layers are not compiled.

The cost model is one of bytes: a step or round reads all products' weights once, at the bandwidth of a sum over memory,
measured beside it; "of bytes" is that share of the measured time. The rest is operators, attention and, in a round, the
draft. Memory is the process's peak in each way's first call; copies come on top of the weights. 3b takes 16 GB. Needs
an idle machine.
"""

from __future__ import annotations

import functools
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from runner import Decoded, decoded, in_turns, keep, names, options, print_table, rates

if TYPE_CHECKING:
    import torch

# hidden size, layers, heads, heads of keys, intermediate size, tokens
SHAPES = {
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "3b": (3072, 28, 24, 8, 8192, 128256),
    "tiny": (256, 2, 4, 2, 512, 512),
}
BYTES = {"bfloat16": 2.0, "Q8_0": 34 / 32, "Q4_K": 144 / 256}  # of a weight
_ROWS, _DEPTH = 16384, 5
_COLUMNS = (
    "target", "weights", "way", "tau", "tokens/s", "over plain", "step, ms", "verify, ms", "draft, ms", "GB read",
    "of bytes", "peak GB",
)  # fmt: skip


def in_q8_0(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks `[rows, bytes]` of a weight in float32, and the weight that they hold."""
    import torch

    parts = weight.unflatten(1, (-1, 32))
    scale = (parts.abs().amax(-1, keepdim=True) / 127).half()
    numbers = (parts / scale.float().clamp(min=1e-9)).round().clamp(-127, 127)
    blocks = torch.cat([scale.view(torch.uint8), numbers.to(torch.int8).view(torch.uint8)], dim=-1)
    return blocks.flatten(1), (scale.float() * numbers).flatten(1)


def in_q4_k(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `in_q8_0`: 8 parts of 32 weights with a scale and a least value, of 6 bits each."""
    import torch

    parts = weight.unflatten(1, (-1, 8, 32))
    least = -parts.amin(-1).clamp(max=0)
    spread = (parts.amax(-1) + least) / 15
    both, sixes = [], []
    for each in (spread, least):
        scale = (each.amax(-1, keepdim=True) / 63).half()
        six = (each / scale.float().clamp(min=1e-9)).round().clamp(0, 63)
        both.append((scale, (scale.float() * six)[..., None]))
        sixes.append(six.to(torch.uint8))
    (scale, steps), (scale_of_least, floor) = both
    numbers = ((parts + floor) / steps.clamp(min=1e-9)).round().clamp(0, 15)
    (low, high), (low_floor, high_floor) = (six.chunk(2, dim=-1) for six in sixes)
    packed = [low | high >> 4 << 6, low_floor | high_floor >> 4 << 6, high & 15 | (high_floor & 15) << 4]
    bits = numbers.to(torch.uint8)
    pairs = (bits[..., ::2, :] | bits[..., 1::2, :] << 4).flatten(2)
    blocks = torch.cat([scale.view(torch.uint8), scale_of_least.view(torch.uint8), *packed, pairs], dim=-1)
    return blocks.flatten(1), (steps * numbers - floor).flatten(1)


QUANTISED = {"Q8_0": in_q8_0, "Q4_K": in_q4_k}


def random_target(shape: str, file: Path | None = None) -> Any:
    """A target that counts, with weights of a file if there is one."""
    import torch
    from oracles.forced_drafter import let_count
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    fields = dict(zip((*sizes, "vocab_size"), SHAPES[shape], strict=True))
    with torch.device("meta"):  # the weights are drawn once, by `let_count`
        config = LlamaConfig(**fields, eos_token_id=None, pad_token_id=0)
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if file is not None and file.is_file():
        target.load_state_dict(torch.load(file, mmap=True), assign=True)
        target.model.rotary_emb.inv_freq = torch.logspace(0.0, -1.0, config.head_dim // 2)
        return target
    target = target.to_empty(device="cpu")
    for norm in (each for each in target.parameters() if each.dim() == 1):
        norm.fill_(1.0)
    return let_count(target)


def target_of(shape: str, kind: str, folder: Path) -> Any:
    """The target with products of a kind; a folder keeps both for later runs."""
    import torch

    from hf_hsdraft.cpu.gguf_blocks import remember_file

    state, blocks = folder / f"{shape}-{kind}.pt", folder / f"{shape}-{kind}.gguf"
    target = random_target(shape, state if state.is_file() else folder / f"{shape}-bfloat16.pt")
    if not state.is_file():
        if kind in QUANTISED:
            quantise(target, kind, blocks)
        torch.save(target.state_dict(), state)
    if kind in QUANTISED:
        remember_file(target, blocks)
    return target


def products(target: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of all products, by name."""
    return {name: each for name, each in target.named_parameters() if each.dim() == 2 and "embed_tokens" not in name}


def quantise(target: Any, kind: str, file: Path) -> None:
    """Rounds the products' weights to those of blocks, which a GGUF file gets."""
    import gguf
    import torch

    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, target.config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, "llama")
    for name, weight in products(target).items():
        found = []
        for rows in weight.split(_ROWS):
            blocks, held = QUANTISED[kind](rows.float())
            rows.copy_(held)
            found.append(blocks)
        raw = torch.cat(found).numpy()
        title = known.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(title, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def bandwidth() -> float:
    """Bytes a second of a sum over more memory than the caches hold."""
    import torch

    held, times = torch.ones(2**26, dtype=torch.int64), []
    for _ in range(3):
        begin = time.perf_counter()
        held.sum()
        times.append(time.perf_counter() - begin)
    return held.numel() * 8 / min(times)


def ways(target: Any, given: Any) -> dict[str, Callable[[int], Decoded]]:
    """By title what decodes so many tokens."""
    import torch
    from gpu_bench.targets import random_drafter, with_nodes
    from oracles.forced_drafter import ForcedDrafter, pattern

    from hf_hsdraft.cpu.packed_weights import PackedWeights, linears_to_pack

    ids = torch.randint(1, target.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(given.seed))
    decode = functools.partial(decoded, target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    copies = PackedWeights(linears_to_pack(target, True))  # made by the first product; drafted calls share them

    def packed(tokens: int) -> Decoded:
        with copies.in_use():
            return decode(tokens)

    found: dict[str, Callable[[int], Decoded]] = {"plain": decode, "packed": packed}
    vocabulary = list(range(min(32000, target.config.vocab_size)))
    drafter = random_drafter(target, num_draft_steps=_DEPTH, draft_vocab_ids=vocabulary)
    for rate in given.rates:
        forced = ForcedDrafter(drafter, pattern(rate, _DEPTH))
        with_nodes(forced, given.nodes, 1)
        forced.generation_config.packed_weights, forced.generation_config.compiled_layers = True, False
        found[f"drafted, acceptance {rate:g}"] = functools.partial(decode, drafter=forced)
    return found


def rows_of(target: Any, shape: str, kind: str, given: Any) -> Iterator[dict[str, Any]]:
    """Measures all ways in turns; times are medians without the first token."""
    from hf_hsdraft.bench.calls import PeakMemory

    peaks, speeds = {}, []
    calls = ways(target, given)
    for way, decode in calls.items():  # packs, and tries the target
        gc.collect()
        memory = PeakMemory(target.device)
        known = memory.start() is not None
        decode(12)
        peaks[way] = memory.peak() if known else None

    def both(way: str) -> tuple[float, Any]:
        first, whole = calls[way](1), calls[way](given.max_new_tokens)
        speeds.append(bandwidth())
        return whole.seconds - first.seconds, whole.statistics

    timed = in_turns({way: functools.partial(both, way) for way in calls}, given.repeats, warm_up=0)
    read, tokens = sum(each.numel() for each in products(target).values()), given.max_new_tokens - 1
    plain = median(seconds for seconds, _ in timed["plain"])
    for way, found in timed.items():
        seconds, statistics = median(seconds for seconds, _ in found), found[-1][1]
        rounds = tokens if statistics is None else statistics.target_forwards - 1
        size = read * (2.0 if way == "plain" else BYTES[kind])
        row = {
            "target": shape, "weights": kind, "way": way, "tau": tokens / rounds, "tokens/s": tokens / seconds,
            "over plain": plain / seconds, "step, ms": 1e3 * seconds / rounds, "GB read": size / 1e9,
            "of bytes": size / median(speeds) / (seconds / rounds),
            "peak GB": None if peaks[way] is None else peaks[way] / 1e9,
        }  # fmt: skip
        for part in ("verify", "draft"):
            row[f"{part}, ms"] = statistics and 1e3 * getattr(statistics, f"{part}_seconds") / rounds
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, max_new_tokens=32, repeats=2, seed=0, json=None)
    parser.add_argument("--shapes", type=names, default=["1b"], help="of 1b and 3b; default: 1b")
    parser.add_argument("--weights", type=names, default=list(BYTES), help=f"default: {','.join(BYTES)}")
    parser.add_argument("--rates", type=rates, default=[0.6, 0.8], help="forced acceptance; default: 0.6,0.8")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of a draft; default: 8")
    parser.add_argument("--folder", type=Path, help="keeps the targets, 3 to 12 GB each, for later runs")
    parser.add_argument("--make", action="store_true", help="only make what --folder keeps")
    given = parser.parse_args(arguments)
    for name, known in (("shapes", SHAPES), ("weights", BYTES)):
        if wrong := set(getattr(given, name)) - known.keys():
            parser.error(f"--{name}: {', '.join(sorted(wrong))} is unknown: expected some of {', '.join(known)}")
    import torch

    from hf_hsdraft.bench.calls import processor
    from hf_hsdraft.cpu.small_weights import KERNEL

    KERNEL.operators(wait=True)
    print(f"{processor(torch.device('cpu'))}, {torch.get_num_threads()} threads, {bandwidth() / 1e9:.1f} GB/s\n")
    rows: list[dict[str, Any]] = []

    def measured(folder: Path) -> Iterator[list[Any]]:
        for shape, kind in itertools.product(given.shapes, given.weights):
            torch.manual_seed(given.seed)
            target = target_of(shape, kind, folder)
            for row in () if given.make else rows_of(target, shape, kind, given):
                rows.append(row)
                keep(given.json, {"rows": rows})
                yield [row[name] for name in _COLUMNS]

    with torch.no_grad(), tempfile.TemporaryDirectory() as temporary:
        print_table(_COLUMNS, measured(given.folder or Path(temporary)))


if __name__ == "__main__":
    main()
