"""Estimates what training a drafter and decoding with it would take, by arithmetic that is shown.

Of training it counts the operations of products with weight matrices, 2 per weight and row. A trained part takes three
such products: forward, gradient of its input, gradient of its weights. A frozen part between trained parts takes two.

Of decoding, a product with a weight matrix takes as long as reading the weights or as multiplying by them, whichever is
longer. Other kernels and the host's work are not counted, so the estimate is a limit.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ...core.checks import demand
from ...drafters.base.protocol import Drafter
from ...drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from ...drafters.hidden_state.modeling_hsdraft import HSDrafter
from ...training.data.vocabulary import best_size
from ...training.loss.loss import CHUNK_LOGITS
from .reads import reads_of

_NOT_COUNTED = (
    "not counted: answering prompts and measuring tau; operations of attention scores; memory of temporary results and "
    "of the target's activations. Steps are assumed to run in float32; in bfloat16 activations need about half."
)
# Parts of a drafter by its modules; all others belong to the roll step.
_PARTS = {"tap_norms": "fusion", "token_norm": "fusion", "fuse": "fusion"}
_PARTS |= {"layers": "layers", "step_modules": "step modules", "injector": "injector", "lm_head": "head"}
RANK_POWER = 1.2  # of answers that are not known: the token of rank r occurs in proportion to 1 / r ** 1.2
_TARGET_BYTES = 2  # per weight of the target, and of the weights that the drafter borrows
_JOINED = {"x": operator.mul, "+": operator.add, "/": operator.truediv}


@dataclass
class Estimate:
    """Figures by name with their arithmetic; `lines` has each one's formula, and then what is not counted."""

    figures: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, unit: str, formula: str, *numbers: float, sign: str = "x") -> float:
        """Adds a figure that combines the numbers from left to right by `sign`: `"x"`, `"+"` or `"/"`.

        Without numbers it is 0, and the formula says why. Units are `""` for a plain number, `"s"`, `"B"` or `"FLOP"`.
        """
        self.units[name] = unit
        self.figures[name] = functools.reduce(_JOINED[sign], numbers) if numbers else 0
        shown = f" {sign} ".join(readable(number, unit if sign == "+" else "") for number in numbers)
        result = f" = {shown} = {readable(self.figures[name], unit)}" if numbers else ""
        self.lines.append(f"{name}: {formula}{result}")
        return self.figures[name]

    def total(self, name: str, unit: str, first: str) -> float:
        """Adds the sum of all figures from `first` on."""
        names = list(self.figures)[list(self.figures).index(first) :]
        return self.add(name, unit, " + ".join(names), *(self.figures[part] for part in names), sign="+")

    def result(self, *names: str) -> str:
        """Returns these figures in a line, without any that are 0."""
        known = [name for name in names if self.figures.get(name)]
        return "; ".join(f"{name}: {readable(self.figures[name], self.units[name])}" for name in known)


def readable(value: float, unit: str) -> str:
    """Formats a number: in full without a unit, otherwise with a prefix that fits. Units are as in `Estimate.add`."""
    if unit in ("", "s"):
        if unit and 0 < value < 1:
            return f"{1e3 * value:.4g} ms"
        plain = f"{value:,.0f}" if value == int(value) or 1e4 < value < 1e15 else f"{value:.6g}"
        return f"{plain} s ({value / 3600:,.3g} hours)" if unit else plain
    power = max(0, min(6, int(math.log10(value) // 3))) if value else 0
    return f"{float(f'{value / 1000**power:.3g}'):g} {' kMGTPE'[power].strip()}{unit}"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a training run does. Raises a ValueError if a number is out of range."""

    tokens: int  # positions of all conversations
    epochs: float  # passes over them
    chains_per_token: float  # share of the positions where a chain starts, above 0
    rolled_fraction: float  # share of the chains that is followed beyond the first depth
    conversations_tokens_per_step: int  # positions that one device reads in one step
    cached: bool  # whether the target's features are computed once and kept, not in every epoch
    flops_per_second: float | None = None  # of one device; `None` leaves the time out
    world_size: int = 1  # devices, each with other conversations
    sharded: bool = False  # whether every device holds only its share of the target

    def __post_init__(self) -> None:
        positive = {**vars(self), "cached": 1, "sharded": 1, "rolled_fraction": 1}
        for name, number in positive.items():
            demand(number is None or 0 < number < math.inf, name, number, "expected a number above 0")
        for name in ("chains_per_token", "rolled_fraction"):
            demand(0 <= (share := getattr(self, name)) <= 1, name, share, "expected a share from 0 to 1")


def estimate(config: PreTrainedConfig, drafter: HSDraftConfig, **work: Any) -> Estimate:
    """Estimates disk, memory, operations and time of training a drafter, by the configurations of target and drafter.

    Both models are built without storage, to count their parameters. All experts of a mixture count as used. `work` are
    fields of `Work`.

    Raises:
        ValueError: a number is out of range, or the drafter was made for another target.
    """
    run, sizes = Work(**work), config.get_text_config()
    found, wanted = (sizes.hidden_size, sizes.vocab_size), (drafter.target_hidden_size, drafter.vocab_size)
    if found != wanted:
        raise ValueError(f"the drafter is for a target of (hidden size, vocabulary) {wanted}, but this one has {found}")
    sheet = Estimate()
    target, parts = target_parts(config), _drafter_parts(drafter)
    sheet.add("target parameters", "", " + ".join(target), *target.values(), sign="+")
    sheet.add("drafter parameters", "", " + ".join(parts), *parts.values(), sign="+")
    unrolled = (run.chains_per_token, run.rolled_fraction, drafter.num_draft_steps - 1)
    rolls = sheet.add("roll steps", "", "chains per token x rolled x (depths - 1)", *unrolled)
    sheet.add("predictions", "", "chains + roll steps", run.chains_per_token, rolls, sign="+")
    deep = (drafter.num_hidden_layers - 1, run.chains_per_token, drafter.num_roll_layers * rolls)
    sheet.add("layer rows", "", "(layers - 1) + chains + layers of a roll step x roll steps", *deep, sign="+")
    _add_bytes(sheet, run, drafter, parts)
    _add_operations(sheet, run, drafter, parts, target["body"])
    sheet.lines.append(_NOT_COUNTED)
    return sheet


def _add_bytes(sheet: Estimate, run: Work, d: HSDraftConfig, parts: Mapping[str, int]) -> None:
    add, known = sheet.add, sheet.figures
    features, wide, positions = len(d.target_tap_layers) + 1, d.target_hidden_size, run.conversations_tokens_per_step
    if run.cached:
        add("taps on disk", "B", "tokens x (taps + 1) x hidden x 2 bytes", run.tokens, features, wide, 2)
        add("target weights", "B", "none, the features are read from disk")
    else:
        add("taps on disk", "B", "none, the target runs in every step")
        held = (known["target parameters"], _TARGET_BYTES, 1 / run.world_size if run.sharded else 1)
        add("target weights", "B", "parameters x bytes x share of a device", *held)
    formula = "parameters x (4 weight + 4 gradient + 8 Adam) bytes"
    add("drafter and optimiser", "B", formula, known["drafter parameters"], 16)
    copies, tables = 1 if parts["head"] else 2, 1 if run.cached else 0
    formula = f"({copies} x draft vocabulary + {tables} x vocabulary) x hidden x bytes"
    vocab, rows = d.draft_vocab_size, known["layer rows"]
    add("borrowed rows", "B", formula, copies * vocab + tables * d.vocab_size, wide, _TARGET_BYTES)
    add("trunk inputs", "B", "tokens x 3 x (taps + 1) x hidden x 4 bytes", positions, 3, features, wide, 4)
    queries, keys = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
    row = 4 * d.hidden_size + 2 * queries + 4 * keys + 4 * d.intermediate_size
    formula = "tokens x layer rows x (4 hidden + 2 queries + 2 keys and values + 4 inner) x 4 bytes"
    add("layer activations", "B", formula, positions, rows, row, 4)
    formula = "tokens x layer rows x heads x tokens x 4 bytes"
    add("attention weights", "B", formula, positions, rows, d.num_attention_heads, positions, 4)
    add("logits", "B", "(drafter + teacher + gradient) x chunk x 4 bytes", 3, max(CHUNK_LOGITS["cuda"], vocab), 4)
    sheet.total("memory", "B", "target weights")


def _add_operations(sheet: Estimate, run: Work, d: HSDraftConfig, parts: Mapping[str, int], body: int) -> None:
    """`parts` are weights by part of the drafter, `body` those of the target's layers."""
    add, rolls, drafts = sheet.add, sheet.figures["roll steps"], sheet.figures["predictions"]
    layers, modules, vocab, hidden = d.num_hidden_layers, d.num_step_modules, d.draft_vocab_size, d.hidden_size
    layer, key_values = parts["layers"] // layers, 2 * hidden * d.num_key_value_heads * d.head_dim
    read = (parts["fusion"], (layers - 1) * layer, key_values, run.chains_per_token * (layer - key_values))
    formula = "fusion + other layers + keys and values of the last + chains x rest of the last"
    trunk = add("weights that read a token", "", formula, *read, sign="+")
    again = 3 if parts["head"] else 2
    add("trunk read per token", "FLOP", "2 x 3 products x weights that read a token", 2, 3, trunk)
    step = parts["step modules"] // (modules - 1) if modules > 1 else d.num_roll_layers * layer
    formula = "2 x 3 products x roll steps x (roll + layers of a roll step + injector)"
    add("roll steps per token", "FLOP", formula, 2, 3, rolls, parts["roll"] + step + parts["injector"])
    formula = "predictions x draft vocabulary x hidden"
    add("draft head per token", "FLOP", f"2 x {again} products x {formula}", 2, again, drafts, vocab, hidden)
    add("teacher head per token", "FLOP", f"2 x {formula}", 2, drafts, vocab, d.target_hidden_size)
    drafting = sheet.total("drafter per token", "FLOP", "trunk read per token")
    forward = add("target per token", "FLOP", "2 x body", 2, body)
    formula, passes = ("1 pass, to write the features", 1.0) if run.cached else ("epochs", run.epochs)
    add("target forwards", "FLOP", f"per token x tokens x {formula}", forward, run.tokens, passes)
    add("drafter training", "FLOP", "per token x tokens x epochs", drafting, run.tokens, run.epochs)
    whole = sheet.total("operations", "FLOP", "target forwards")
    steps = (run.tokens * run.epochs, run.conversations_tokens_per_step, run.world_size)
    add("steps", "", "tokens x epochs / tokens of a step / devices", *steps, sign="/")
    if run.flops_per_second is None:
        add("time", "s", "unknown; give the operations per second that one device sustains (--flops-per-second)")
    else:
        formula = "operations / operations per second of a device / devices"
        add("time", "s", formula, whole, run.flops_per_second, run.world_size, sign="/")


def typical_size(vocab_size: int, column_cost: float) -> int:
    """As `paying_size`, for answers that are not known, see `RANK_POWER`."""
    return best_size((torch.arange(1, vocab_size + 1, dtype=torch.float64) ** -RANK_POWER).cumsum(0), column_cost)


def target_parts(config: PreTrainedConfig) -> dict[str, int]:
    """Returns the number of weights of a target: of its layers, and of its embedding and output head."""
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    tables = {id(m.weight): m.weight.numel() for m in (target.get_input_embeddings(), target.get_output_embeddings())}
    outside = sum(tables.values())  # one table if the two are tied
    return {"body": target.num_parameters() - outside, "embedding and output head": outside}


def _drafter_parts(config: HSDraftConfig) -> dict[str, int]:
    with torch.device("meta"):
        drafter = HSDrafter(config)
    parts = dict.fromkeys(("fusion", "roll", "layers", "step modules", "injector", "head"), 0)
    for name, parameter in drafter.named_parameters():
        parts[_PARTS.get(name.partition(".")[0], "roll")] += parameter.numel()
    return parts


_LEFT_OUT = (
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
    reads = reads_of(drafter, plan.depth, plan.width)
    own = sum(read.weights for read in reads if not read.borrowed)
    add, width = sheet.add, bytes_per_weight
    add("target in memory", "B", "weights x bytes", sum(target_parts(config).values()), width)
    add("drafter in memory", "B", "its own weights that a draft reads x bytes", own, width)
    if kept := getattr(drafter, "numbers_kept", lambda length: 0)(plan.length):
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
    sheet.lines.append(_LEFT_OUT)
    return sheet
