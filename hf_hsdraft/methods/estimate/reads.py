"""The weights that a draft reads, for estimates. Drafters of methods have a method `reads(depth, width)` for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...drafters.base.protocol import weights_of


@dataclass(frozen=True)
class Read:
    """Weights that a draft multiplies by."""

    part: str
    weights: int
    times: int  # reads per draft
    rows: int  # rows multiplied per read
    borrowed: bool = False  # whether the weights are the target's and take no extra memory


def reads_of(drafter: Any, depth: int, width: int) -> Sequence[Read]:
    """Weights read by a draft of one sequence, expanding `width` nodes per depth; () if the time is negligible."""
    if hasattr(drafter, "reads"):
        return tuple(drafter.reads(depth, width))
    return tuple(_of_states(drafter, depth, width)) if hasattr(drafter, "injector") else ()


def _of_states(drafter: Any, depth: int, width: int) -> Iterator[Read]:
    """`Trunk.step` says which parameters each step uses."""
    config, layers, modules = drafter.config, [*drafter.layers], [*drafter.step_modules]
    context, bias = config.num_hidden_layers - config.num_roll_layers, weights_of(drafter.injector.up)
    yield Read("fusion", weights_of(drafter.fuse), 1, 1)
    if context:
        yield Read("context layers", weights_of(*layers[:context]), 1, 1)
    yield Read("trunk layers", weights_of(*layers[context:]), 1 if modules else depth, 1)
    for step, module in enumerate(modules, 1):
        times = max(depth - step, 0) if step == len(modules) else int(step < depth)
        yield Read(f"step module {step}", weights_of(module), times, 1)
    yield Read("head", config.draft_vocab_size * config.hidden_size, 1, depth, borrowed=drafter.lm_head is None)
    yield Read("injector", weights_of(drafter.injector) - bias, depth, width)
    yield Read("token bias", bias, depth - 1, width)
