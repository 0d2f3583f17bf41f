"""Compares systems over prompts, in one process and in changing order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from ..engine.divergence import Divergence, first_divergence
from ..training.data.conversations import Prompt
from .calls import Run, Settings, time_call
from .systems import PLAIN, System

WARM_UP_TOKENS = 96  # enough rounds for a pace to learn what forwards cost
Inputs = dict[str, torch.Tensor]
_Any = TypeVar("_Any")


@dataclass
class Measured:
    """All calls of a comparison.

    Attributes:
        runs: calls of each system, plain decoding first. Each list goes prompt by prompt, repeat after repeat.
        left_out: systems that could not decode, with the reason.
        first: first call of each system, not included in `runs`.
    """

    runs: dict[str, list[Run]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    first: dict[str, Run] = field(default_factory=dict)

    @property
    def plain(self) -> list[Run]:
        return self.runs[PLAIN]


def spread(questions: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Returns at most `limit` questions, in turn from all categories, in file order within each category."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    rounds = max((len(group) for group in groups.values()), default=0)
    ordered = [group[turn] for turn in range(rounds) for group in groups.values() if turn < len(group)]
    return ordered[:limit]


def turn_order(items: Sequence[_Any], turn: int) -> list[_Any]:
    """Returns the items in the order of one turn.

    Every two turns the items rotate by one place; the second turn of the two is reversed. Over `2 n` turns each of the
    `n` items has every place twice, and precedes each other item as often as it follows it.
    """
    start = turn // 2 % max(len(items), 1)
    rotated = [*items[start:], *items[:start]]
    return rotated[::-1] if turn % 2 else rotated


def measure(
    target: Any,
    systems: Sequence[System],
    inputs: Sequence[Inputs],
    settings: Settings,
    repeats: int = 1,
    tell: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """Lets every system decode every prompt (or batch) several times, after a short warm-up.

    Plain decoding is always measured too. The seed of `settings` is that of the first prompt and grows by 1 per prompt.
    `tell` is called with all calls so far whenever all systems have decoded a prompt.

    Raises:
        Exception: what plain decoding or one of our systems raised. Other systems that fail are left out.
    """
    longest = max(each["input_ids"].shape[1] for each in inputs) + settings.max_new_tokens
    settings = replace(settings, max_cache_len=longest)
    going = [System(PLAIN), *systems]
    measured = Measured({system.name: [] for system in going})

    def call(system: System, each: Inputs, how: Settings) -> tuple[list[list[int]], Run] | None:
        try:
            return time_call(target, each, system, how)
        except Exception as error:
            if not system.may_be_left_out:
                raise
            going.remove(system)
            del measured.runs[system.name]
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            measured.left_out[system.name] = f"{type(error).__name__}: {reason}"[:300]
            return None

    short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
    for system in list(going):
        for _ in range(2 if system.static else 1):  # the first call compiles, the second records CUDA graphs
            found = call(system, inputs[0], short) if system in going else None
            if found is not None:
                measured.first.setdefault(system.name, found[1])
    for repeat in range(repeats):
        for question, each in enumerate(inputs):
            texts: dict[str, list[list[int]]] = {}
            seeded = replace(settings, seed=settings.seed + question)
            for system in turn_order(going, question + repeat):
                found = call(system, each, seeded)
                if found is not None:
                    texts[system.name], run = found
                    run.question, run.repeat = question, repeat
                    measured.runs[system.name].append(run)
            for system in going:
                _compare(target, each, measured.runs[system.name][-1], texts, system, settings)
            tell(measured)
    return measured


def _compare(
    target: Any, inputs: Inputs, run: Run, texts: dict[str, list[list[int]]], system: System, settings: Settings
) -> None:
    """Records how a call's texts differ from plain decoding's, if they should be equal."""
    plain, own = texts[PLAIN], texts[system.name]
    # Plain decoding samples the tokens of all rows at once, other systems row by row.
    if settings.temperature > 0 and not (system.draws_as_plain and len(plain) == 1):
        return
    run.same_rows = sum(a == b for a, b in zip(plain, own, strict=True))
    if len(plain) > 1 or run.same_rows:
        return
    if settings.temperature > 0:
        shared = zip(plain[0], own[0], strict=False)  # either text may end first
        first = next((index for index, (a, b) in enumerate(shared) if a != b), min(len(plain[0]), len(own[0])))
        run.divergence = Divergence(first, None)
        return
    ids = inputs["input_ids"]
    whole = [torch.cat([ids, ids.new_tensor([tokens])], dim=1) for tokens in (plain[0], own[0])]
    run.divergence = first_divergence(target, ids.shape[1], *whole)
