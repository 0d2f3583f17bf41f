"""Decoding by one way: its time, memory, acceptance and what a step costs the host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hf_hsdraft import harmless
from hf_hsdraft.bench.calls import PeakMemory, timed, until_end

from .counts import counted, per_step
from .plan import COMPILED, LOOKUP, OURS, OURS_COMPILED, Settings
from .targets import Case, Inputs

_PROFILED = 12  # new tokens of a profiled call
_SPARE = 64  # slots of a static cache behind the text, more than a draft takes
_LOOKUP_TOKENS = 10  # transformers' own example


def measure(case: Case, way: str, rows: int, settings: Settings) -> list[dict[str, Any]]:
    """Measures a way for so many texts at once: a row of figures, or one for each drafter."""
    if way not in (OURS, OURS_COMPILED):
        return [_Measured(case, way, rows, settings).row("")]
    return [_Measured(case, way, rows, settings, made).row(name) for name, made in case.drafters.items()]


@dataclass(frozen=True)
class _Measured:
    case: Case
    way: str
    rows: int
    settings: Settings
    drafter: Callable[[int], Any] | None = None

    def row(self, name: str) -> dict[str, Any]:
        """Returns the figures; seconds are medians over repeats, summed over the calls."""
        device, calls, most = self.case.target.device, self.case.inputs(self.rows), self.settings.max_new_tokens
        memory = PeakMemory(device)
        _, warm_up = timed(device, self.decode, calls[0], most)
        held = memory.start()
        first = whole = 0.0
        texts: list[list[int]] = []
        for inputs in calls:
            self.decode(inputs, most)
            seconds: dict[int, list[float]] = {1: [], most: []}
            for _ in range(self.settings.repeats):
                for tokens, times in seconds.items():
                    ids, spent = timed(device, self.decode, inputs, tokens)
                    times.append(spent)
            texts += self.new_tokens(ids, inputs)
            first, whole = first + median(seconds[1]), whole + median(seconds[most])
        tokens, steps = sum(map(len, texts)), self.steps(calls, most)
        after = max(whole - first, 1e-9)
        return {
            "drafter": name,
            "calls": len(calls),
            "texts": [hashlib.sha256(repr(text).encode()).hexdigest()[:12] for text in texts],
            "tokens": tokens,
            "tokens_per_second": tokens / whole,
            "decode_tokens_per_second": (tokens - len(texts)) / after,
            "first_token_ms": 1e3 * first / len(calls),
            "warm_up_seconds": warm_up,
            "held_bytes": held,
            "peak_bytes": None if held is None else memory.peak(),
            **steps,
            "step_ms": 1e3 * after / max(steps["steps"], 1),
            "per_step": self.counts(calls[0]),
        }

    def decode(self, inputs: Inputs, tokens: int, **more: Any) -> Any:
        """Calls `generate()`, which returns ids `[rows, length]`."""
        kwargs: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens, **more}
        if self.way in (COMPILED, OURS_COMPILED):
            kwargs |= {"cache_implementation": "static", "max_cache_len": self.slots, **self.compiled()}
        if self.way == LOOKUP:
            kwargs["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        if self.drafter is not None:
            kwargs["assistant_model"] = self.drafter(self.rows)
        return self.case.target.generate(**inputs, **kwargs)

    @property
    def slots(self) -> int:
        """Slots of a static cache, the same for all calls and ways."""
        needed = self.case.longest + self.settings.max_new_tokens + _SPARE
        return needed + -needed % 64

    def compiled(self) -> dict[str, Any]:
        """How to compile. On a GPU `generate()` knows, unless a backend is given."""
        from transformers import CompileConfig

        if not self.settings.backend:
            return {}
        mode = {"mode": "reduce-overhead"} if self.settings.backend == "inductor" else {"mode": None}
        config = CompileConfig(backend=self.settings.backend, **mode)
        config._compile_all_devices = True
        return {"compile_config": config}

    def new_tokens(self, ids: torch.Tensor, inputs: Inputs) -> list[list[int]]:
        """New tokens of each text, up to its end."""
        return [until_end(text, self.case.target) for text in ids[:, inputs["input_ids"].shape[1] :].tolist()]

    def steps(self, calls: list[Inputs], tokens: int) -> dict[str, Any]:
        """Forwards after the prompts' ones, as `steps`, and tau and nodes: of one text, with the token after them."""
        if self.drafter is None:
            with _forwards(self.case.target, self.way == LOOKUP) as forwards:
                ids = [self.decode(inputs, tokens) for inputs in calls]
            pairs = list(zip(ids, calls, strict=True))
            emitted = sum(sum(map(len, self.new_tokens(*pair))) - len(pair[0]) for pair in pairs)
            longest = sum(each.shape[1] - inputs["input_ids"].shape[1] - 1 for each, inputs in pairs)
            steps = forwards[0] - len(calls) if self.way == LOOKUP else longest
            return {"steps": steps, "tau": emitted / max(steps, 1) if self.way == LOOKUP else 1.0, "nodes": None}
        found = [self.decode(inputs, tokens, return_dict_in_generate=True).statistics for inputs in calls]
        emitted, row_rounds = sum(each.new_tokens for each in found), sum(each.row_forwards for each in found)
        texts, rounds = self.rows * len(calls), sum(each.target_forwards - 1 for each in found)
        nodes = [count for each in found for count in each.drafted_nodes]
        parts = {
            name: sum(getattr(each, f"{name}_seconds") for each in found) for name in ("draft", "verify", "commit")
        }
        return {
            "steps": rounds,
            "tau": (emitted - texts) / max(row_rounds - texts, 1),
            "nodes": sum(nodes) / max(len(nodes), 1),
            "kind": found[0].draft_kind,
            "parts_ms": {name: 1e3 * seconds / max(rounds, 1) for name, seconds in parts.items()},
        }

    def counts(self, inputs: Inputs) -> dict[str, float]:
        """What the profiler counts in a step or round."""
        device, most = self.case.target.device, min(_PROFILED, self.settings.max_new_tokens)
        first, whole = (counted(lambda tokens=tokens: self.decode(inputs, tokens), device) for tokens in (1, most))
        return per_step(whole, first, self.steps([inputs], most)["steps"])


@contextmanager
def _forwards(target: Any, watched: bool) -> Any:
    """Counts a target's forwards, in a list of one number. Compiled ones are not watched: they would compile again."""
    count = [0]

    def add(*_: Any) -> None:
        count[0] += 1

    hook = target.register_forward_hook(harmless(add)) if watched else None
    try:
        yield count
    finally:
        if hook is not None:
            hook.remove()
