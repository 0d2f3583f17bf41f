"""What `gpu.py` measures, in which order, and what a time budget has room for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PLAIN, OURS, COMPILED, OURS_COMPILED, LOOKUP = WAYS = (  # the most telling ones first
    "plain eager",
    "ours eager",
    "plain compiled",
    "ours compiled",
    "prompt lookup",
)
TARGETS = ("8b", "smollm2")
TRAINING = "training"
# Expected minutes of a part on a GPU: most of a compiled one is compiling. Measured parts correct them.
_MINUTES = {PLAIN: 0.3, COMPILED: 0.9, OURS: 0.6, OURS_COMPILED: 1.5, LOOKUP: 0.3, TRAINING: 1.2}


@dataclass(frozen=True)
class Settings:
    """What all parts have in common. Figures of other settings are not comparable."""

    tiny: bool  # whether all targets are small and random
    dtype: str  # of targets, drafters and products in training
    batches: Sequence[int]  # numbers of texts that are decoded at once
    rates: Sequence[float]  # acceptance rates that are forced at the 8B shape
    prompt_length: int  # tokens of a prompt at the 8B shape
    max_new_tokens: int  # of each text
    repeats: int  # how often each call is timed
    nodes: int  # most nodes of a draft of one text, root excluded
    rows: int  # most nodes of a forward over a batch; texts share them
    train_length: int  # tokens of a conversation in training
    train_batch: int  # conversations of a training step
    train_seconds: float  # after which a training run ends
    backend: str  # of `torch.compile`; empty for what `generate()` takes on this device
    seed: int  # of weights, prompts and conversations
    prompts: str  # digest of the prompts of SmolLM2

    def nodes_of_text(self, rows: int) -> int:
        """Number of nodes of a draft of each of `rows` texts."""
        return max(min(self.nodes, self.rows // rows), 2)


FULL: dict[str, Any] = {
    "batches": [1, 8, 32],
    "prompt_length": 512,
    "max_new_tokens": 64,
    "repeats": 3,
    "nodes": 24,
    "rows": 200,
    "train_length": 1024,
    "train_batch": 8,
    "train_seconds": 25.0,
    "backend": "",
}
# The same batches, drafts and rates.
TINY: dict[str, Any] = FULL | {
    "prompt_length": 16,
    "max_new_tokens": 16,
    "repeats": 1,
    "train_length": 64,
    "train_batch": 2,
    "train_seconds": 1.0,
    "backend": "eager",
}


@dataclass(frozen=True)
class Part:
    """One part, which is measured as a whole; `rows` texts are decoded at once, 0 for training."""

    target: str
    rows: int
    way: str

    @property
    def name(self) -> str:
        return f"{self.target}/{self.rows}/{self.way}" if self.rows else f"{self.target}/{self.way}"


def parts_of(batches: Sequence[int], wanted: Sequence[str] = ()) -> list[Part]:
    """Returns all parts whose names begin with one of `wanted`, the most telling ones first."""

    def decoding(target: str, rows: int) -> list[Part]:
        # transformers' prompt lookup takes one text.
        return [Part(target, rows, way) for way in WAYS if rows == 1 or way != LOOKUP]

    first, others = batches[:1], batches[1:]
    found = [part for rows in first for target in TARGETS for part in decoding(target, rows)]
    found += [Part(target, 0, TRAINING) for target in TARGETS[::-1]]
    found += [part for target in TARGETS[::-1] for rows in others for part in decoding(target, rows)]
    return [part for part in found if not wanted or any(part.name.startswith(name) for name in wanted)]


@dataclass
class Clock:
    """Knows what the remaining minutes have room for."""

    minutes: float  # of the whole command
    now: Callable[[], float] = time.monotonic
    _measured: float = 0.0
    _expected: float = 0.0
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.now()

    @property
    def left(self) -> float:
        return self.minutes - (self.now() - self._begin) / 60

    def expected(self, part: Part) -> float:
        """Minutes that a part will probably take, by how long the parts before it took."""
        pace = (self._measured + 1.0) / (self._expected + 1.0)
        return _MINUTES[part.way] * pace

    def took(self, part: Part, seconds: float) -> None:
        self._measured += seconds / 60
        self._expected += _MINUTES[part.way]


def run(
    parts: Sequence[Part],
    clock: Clock,
    measure: Callable[[Part], Mapping[str, Any]],
    found: dict[str, Any],
    save: Callable[[], None],
    say: Callable[[str], None],
) -> list[str]:
    """Measures each part that `found` lacks, enters it there by name, and saves; returns the names of failed parts.

    A failed part has `error`, and one without time `skipped`; both are measured by the next run.
    """
    failed = []
    for part in parts:
        before = found.get(part.name, {})
        if before and not {"error", "skipped"} & before.keys():
            say(f"{part.name}: done before")
            continue
        if clock.left <= 0 or clock.expected(part) > clock.left:
            reason = f"{clock.left:.1f} minutes left, about {clock.expected(part):.1f} needed"
            found[part.name] = {"skipped": reason}
            say(f"{part.name}: skipped, {reason}")
            save()
            continue
        begin = clock.now()
        try:
            found[part.name] = dict(measure(part))
        except Exception as error:  # out of memory at one batch size says nothing about the others
            found[part.name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            failed.append(part.name)
        seconds = clock.now() - begin
        clock.took(part, seconds)
        found[part.name]["seconds"] = round(seconds, 1)
        say(f"{part.name}: {found[part.name].get('error', f'{seconds:.0f} s')}")
        save()
    return failed
