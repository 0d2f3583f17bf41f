"""Estimates by calculation how fast a drafter would decode on a device that is not at hand.

A product with a weight matrix takes as long as reading the weights or as multiplying by them, whichever is longer.
Other kernels and the host's work are not counted, so the estimate is a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...drafters.base.protocol import Drafter
from .training_estimate import Arithmetic, Estimate, target_parts

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
class Drafting:
    """Settings of drafting.

    Attributes:
        depth: depth of a draft.
        width: number of nodes expanded at each depth.
        nodes: number of nodes verified besides the root.
        tau: measured tokens per target forward, the bonus token included.
        length: number of tokens in the target's cache.
    """

    depth: int
    width: int
    nodes: int
    tau: float
    length: int = 1024


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
    sheet = Arithmetic()
    parts = target_parts(config)
    sizes = config.get_text_config()
    head = sizes.vocab_size * sizes.hidden_size
    reads = list(drafter.reads(plan.depth, plan.width))
    own = sum(read.weights for read in reads if not read.borrowed)
    add, width = sheet.add, bytes_per_weight
    add("target in memory", "B", "weights x bytes", sum(parts.values()), width)
    add("drafter in memory", "B", "its own weights that a draft reads x bytes", own, width)
    if hasattr(drafter, "numbers_kept"):  # of whole texts
        kept = drafter.numbers_kept(plan.length)
        add("drafter's keys and values", "B", "numbers kept of the text x bytes", kept, width)
    formula = "2 x layers x heads x head size x tokens x bytes"
    kv_heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    cache = sizes.num_hidden_layers, kv_heads, head_dim
    keys = add("keys and values", "B", formula, 2, *cache, plan.length, width)
    read_weights = parts["body"] + head
    formula = "(layers + output head) x bytes + keys and values"
    read_bytes = add("read by a forward of the target", "B", formula, read_weights * width, keys, sign="+")
    read_time = add("time of reading", "s", "bytes / bytes per second", read_bytes, device.bytes_per_second, sign="/")

    def forward(name: str, rows: int) -> float:
        operations = 2 * read_weights * rows
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
    return Estimate(sheet.figures, (*sheet.lines, _NOT_COUNTED), sheet.units)
