"""Estimates by calculation how fast a drafter would decode on a device that is not at hand.

A product with a weight matrix takes as long as reading the weights or as multiplying by them, whichever is longer.
Other kernels and the host's work are not counted, so the estimate is a limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...drafters.base.protocol import Drafter
from .training_estimate import Estimate, target_parts

_NOT_COUNTED = (
    "not counted: launches, the host, attention scores, reading what was accepted into the drafter, and memory of "
    "temporary results. All experts of a mixture count as read."
)


@dataclass(frozen=True)
class Device:
    """Memory bandwidth of a device, and its rate of matrix products in the dtype of the weights."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Forward:
    """What a forward of a model reads and multiplies by."""

    weights: int  # of its layers and output head
    cache: tuple[int, int, int]  # layers, heads and head size of the keys and values

    @classmethod
    def of(cls, config: Any) -> Forward:
        sizes = config.get_text_config()
        heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
        head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
        weights = target_parts(config)["body"] + sizes.vocab_size * sizes.hidden_size
        return cls(weights, (sizes.num_hidden_layers, heads, head_dim))

    def seconds(self, rows: float, device: Device, length: int, bytes_per_weight: int = 2) -> float:
        """Returns the seconds of a forward over `rows` tokens after a text of `length` tokens."""
        read = (self.weights + 2 * math.prod(self.cache) * length) * bytes_per_weight
        return max(read / device.bytes_per_second, 2 * self.weights * rows / device.flops_per_second)


@dataclass(frozen=True)
class Drafting:
    """Settings of drafting."""

    depth: int  # of a draft
    width: int  # nodes expanded at each depth
    nodes: int  # verified besides the root
    tau: float  # measured tokens per target forward, the bonus token included
    length: int = 1024  # tokens in the target's cache


def estimate_decoding(
    config: Any, drafter: Drafter, plan: Drafting, device: Device, bytes_per_weight: int = 2
) -> Estimate:
    """Estimates memory and time of decoding one text with a drafter, against plain decoding.

    Args:
        config: configuration of the target.
        drafter: the drafter; its weights may be on the meta device.

    Raises:
        ValueError: a number is not above 0.
    """
    for name, number in {**vars(plan), **vars(device), "bytes_per_weight": bytes_per_weight}.items():
        if not number > 0:
            raise ValueError(f"{name}={number!r} is invalid: expected a number above 0")
    sheet, model = Estimate(), Forward.of(config)
    reads = list(drafter.reads(plan.depth, plan.width))
    own = sum(read.weights for read in reads if not read.borrowed)
    add, width = sheet.add, bytes_per_weight
    add("target in memory", "B", "weights x bytes", sum(target_parts(config).values()), width)
    add("drafter in memory", "B", "its own weights that a draft reads x bytes", own, width)
    if hasattr(drafter, "numbers_kept"):  # of whole texts
        kept = drafter.numbers_kept(plan.length)
        add("drafter's keys and values", "B", "numbers kept of the text x bytes", kept, width)
    formula = "2 x layers x heads x head size x tokens x bytes"
    keys = add("keys and values", "B", formula, 2, *model.cache, plan.length, width)
    formula = "(layers + output head) x bytes + keys and values"
    read_bytes = add("read by a forward of the target", "B", formula, model.weights * width, keys, sign="+")
    read_time = add("time of reading", "s", "bytes / bytes per second", read_bytes, device.bytes_per_second, sign="/")

    def forward(name: str, rows: int) -> float:
        operations = 2 * model.weights * rows
        formula = f"2 x weights x {rows} rows / operations per second"
        products = add(f"products of {name}", "s", formula, operations, device.flops_per_second, sign="/")
        longer = "reading" if read_time >= products else "products"
        return add(f"time of {name}", "s", f"the longer of reading and products: {longer}", max(read_time, products))

    step = forward("a plain step", 1)
    verify = forward("verifying", plan.nodes + 1)
    times = []
    for read in reads:
        if read.times:
            moved = read.weights * width / device.bytes_per_second
            multiplied = 2 * read.weights * read.rows / device.flops_per_second
            kind = "reading" if moved >= multiplied else "products"
            formula = f"{read.weights:,} weights, {read.rows} rows, {kind}; times"
            times.append(add(f"draft: {read.part}", "s", formula, max(moved, multiplied), read.times))
    draft = add("time of a draft", "s", "sum of its parts", *times, sign="+") if times else 0.0
    round_time = add("time of a round", "s", "verifying + draft", verify, draft, sign="+")
    plain = add("plain steps for as many tokens", "s", "tau x time of a plain step", plan.tau, step)
    add("speed-up, at most", "", "plain steps / round", plain, round_time, sign="/")
    sheet.lines.append(_NOT_COUNTED)
    return sheet
