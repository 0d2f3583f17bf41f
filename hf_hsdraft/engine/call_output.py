"""What a call returns: transformers' own fields and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..core.cache_name import CACHE
from ..core.checks import public_name
from ..core.tuning import TUNING
from ..runtime.target_runtime import TargetRuntime
from .decoded_texts import DecodedTexts, stacked


@dataclass(repr=False)
class DraftStatistics:
    """What one call did; kept when `return_dict_in_generate=True`, and for an [`Attachment`].

    Attributes:
        new_tokens: tokens emitted, over all rows.
        target_forwards: forwards of the target; reading the prompts is one, however it is chunked. Forwards that only
            find out what a target can do are not counted.
        row_forwards: the same, each counted for every row that was still growing; in a batch of one, equal.
        accepted_lengths: drafted tokens emitted in each round after the prompts' forward, for each row.
        drafted_nodes: nodes verified in each round, without the root, for each row.
        round_rows: row of each entry of `accepted_lengths` and `drafted_nodes`.
        drafter, target: class of the drafter; class and name of the target.
        draft_kind: `"tree"` or `"chain"`, what was drafted.
        reason: why chains were drafted, if they were not asked for.
        exact: whether the text has the target's distribution; False only for a lossy verification rule.
        relaxed_tokens: tokens that a lossy rule accepted in place of the target's own; 0 under exact rules.
        packed_weights: whether rounds used packed copies of the target's weights at some point.
        compiled_layers: whether rounds ran the target's decoder layers as compiled programs at some point.
        reused_share: share of the layers' work in verifying trees that self-speculation had done while drafting; 0 for
            other drafters.
        processor_share: part of the processor time that the process's threads wanted in the call which they got, 0 to
            1; other processes and a container's quota take the rest. `None` on a GPU, and where it is unknown.
        prefill_seconds, draft_seconds, verify_seconds, commit_seconds, total_seconds: wall-clock time. The rest of the
            total is Python between the parts, and finding out what a target can do. The parts are 0 without
            `return_dict_in_generate=True`.
    """

    new_tokens: int = 0
    target_forwards: int = 0
    row_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted_nodes: list[int] = field(default_factory=list)
    round_rows: list[int] = field(default_factory=list)
    drafter: str = ""
    target: str = ""
    draft_kind: str = "tree"
    reason: str = ""
    exact: bool = True
    relaxed_tokens: int = 0
    packed_weights: bool = False
    compiled_layers: bool = False
    reused_share: float = 0.0
    processor_share: float | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        """Rounds of drafting, each counted for every row; the prompts' forward is not counted."""
        return len(self.accepted_lengths)

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward and row, the bonus token included; plain decoding has exactly 1."""
        return self.new_tokens / max(self.row_forwards, 1)

    @property
    def accepted_by_row(self) -> list[list[int]]:
        """`accepted_lengths` of each row, round by round; a row that drafted nothing has none."""
        found: list[list[int]] = [[] for _ in range(max(self.round_rows, default=-1) + 1)]
        for row, length in zip(self.round_rows, self.accepted_lengths, strict=True):
            found[row].append(length)
        return found

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the rounds that accepted at least 1, 2, ... drafted tokens; their sum and 1 are emitted a round."""
        return [count / self.rounds for count in reached_depths(self.accepted_lengths)]

    def __repr__(self) -> str:
        """A few lines for people; the fields hold the figures."""
        kind = f"{self.draft_kind}s" + (f": {self.reason}" if self.reason else "")
        used = {"packed weights": self.packed_weights, "compiled layers": self.compiled_layers}
        return "\n".join(
            [
                told_tau(self),
                told_depths(self.acceptance_by_depth, self.rounds),
                f"drafter: {self.drafter or 'unknown'}, {kind}; target: {self.target or 'unknown'}",
                self._told_seconds(),
                ", ".join([told_text(self.exact, self.relaxed_tokens), *(name for name, was in used.items() if was)]),
            ]
        )

    def _told_seconds(self) -> str:
        held_up = ""
        if self.processor_share is not None and self.processor_share < TUNING.least_share:
            held_up = f"; its threads got {self.processor_share:.0%} of the processor time that they wanted"
        parts = {part: getattr(self, f"{part}_seconds") for part in ("prefill", "draft", "verify", "commit")}
        if not any(parts.values()):
            return f"seconds: {self.total_seconds:.2f}{held_up}"
        parts["other"] = max(self.total_seconds - sum(parts.values()), 0.0)
        summed = " + ".join(f"{each:.2f} {part}" for part, each in parts.items())
        return f"seconds: {self.total_seconds:.2f} = {summed}{held_up}"

    # Whisper's `generate` splits each field of an output by row, and moves the parts to the CPU.
    __iter__ = None

    def __getitem__(self, row: int) -> DraftStatistics:
        """The statistics of the whole call, as its rows are decoded together."""
        return self

    def cpu(self) -> DraftStatistics:
        return self


def reached_depths(lengths: Sequence[int]) -> list[int]:
    """Returns for d = 1, 2, ... the number of rounds that accepted at least d drafted tokens, given those of each."""
    return [sum(length >= depth for length in lengths) for depth in range(1, max(lengths, default=0) + 1)]


def named_target(target: Any) -> str:
    """Returns a target's class and its name, without local directories."""
    name = public_name(getattr(target, "name_or_path", "") or "")
    return " ".join(filter(None, [type(target).__name__, name]))


def told_tau(found: Any) -> str:
    """Tau with its definition and the numbers that it is made of, out of statistics of one call or of several."""
    counted = f"{found.target_forwards} forwards"
    if found.row_forwards != found.target_forwards:
        counted = f"{found.row_forwards} forwards counted by row, {counted} in all"
    per = "tokens emitted per target forward and row, bonus token included"
    return f"tau {found.tau:.2f} ({per}): {found.new_tokens} tokens, {counted}"


def told_depths(shares: Sequence[float], rounds: int) -> str:
    shown = "  ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(shares, 1)) or "nothing"
    return f"accepted by depth, share of {rounds} rounds: {shown}"


def told_text(exact: bool, relaxed: int) -> str:
    return "text: the target's own" if exact else f"text: lossy verification, {relaxed} tokens relaxed"


def pooled_tau(statistics: Sequence[DraftStatistics]) -> float:
    """Returns tau over several calls: all emitted tokens per row forward."""
    forwards = sum(call.row_forwards for call in statistics)
    return sum(call.new_tokens for call in statistics) / max(forwards, 1)


@dataclass
class HSDraftGenerateOutput(GenerateDecoderOnlyOutput):
    """Output of `generate()` with a drafter: transformers' own fields, and `statistics` of the call."""

    statistics: DraftStatistics | None = None

    @property
    def exact(self) -> bool:
        """Whether the text has the target's distribution; see [`DraftStatistics`]."""
        return self.statistics is None or self.statistics.exact


@dataclass
class HSDraftEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same for an encoder-decoder target."""

    statistics: DraftStatistics | None = None

    @property
    def exact(self) -> bool:
        """As in [`HSDraftGenerateOutput`]."""
        return self.statistics is None or self.statistics.exact


def as_output(
    texts: DecodedTexts,
    runtime: TargetRuntime,
    statistics: DraftStatistics,
    config: Any,
    model_kwargs: dict[str, Any],
) -> HSDraftGenerateOutput | HSDraftEncoderDecoderOutput:
    def steps(name: str, wanted: bool) -> Any:
        return _by_step(texts, name) if wanted else None

    common = {
        "sequences": texts.sequences(),
        "scores": _scores(texts, "scores") if texts.keeps_scores else None,
        "logits": _scores(texts, "logits") if texts.keeps_logits else None,
        CACHE: runtime.cache,
        "statistics": statistics,
    }
    if runtime.target.config.is_encoder_decoder:
        encoder = model_kwargs["encoder_outputs"]
        return HSDraftEncoderDecoderOutput(
            **common,
            encoder_attentions=encoder.get("attentions") if config.output_attentions else None,
            encoder_hidden_states=encoder.get("hidden_states") if config.output_hidden_states else None,
            decoder_attentions=steps("decoder_attentions", config.output_attentions),
            cross_attentions=steps("cross_attentions", config.output_attentions),
            decoder_hidden_states=steps("decoder_hidden_states", config.output_hidden_states),
        )
    return HSDraftGenerateOutput(
        **common,
        attentions=steps("attentions", config.output_attentions),
        hidden_states=steps("hidden_states", config.output_hidden_states),
    )


def _scores(texts: DecodedTexts, name: str) -> tuple[torch.Tensor, ...]:
    """`scores` or `logits`: `[B, V]` for each step; 0 where a row had ended."""
    rows = [getattr(row, name)[: texts.new_tokens(index)] for index, row in enumerate(texts.rows)]
    return tuple(stacked(rows, step) for step in range(texts.length() - texts.prompt_length))


def _by_step(texts: DecodedTexts, name: str) -> tuple[tuple[torch.Tensor, ...], ...] | None:
    """Outputs by step and layer, rows joined; 0 where a row had ended. `None` if the target gave none."""
    if any(name not in step for row in texts.rows for step in row.steps):
        return None
    rows = [[step[name] for step in row.steps[: texts.new_tokens(index)]] for index, row in enumerate(texts.rows)]
    layers = range(len(max(rows, key=len)[0]))
    by_layer = [[[step[layer] for step in row] for row in rows] for layer in layers]
    steps = range(texts.length() - texts.prompt_length)
    return tuple(tuple(stacked(each, step) for each in by_layer) for step in steps)


def prompt_outputs(runtime: TargetRuntime, row: int) -> list[dict[str, tuple[torch.Tensor, ...]]]:
    """Hidden states and attentions of the prompts' forward, for one row."""
    return [{name: tuple(layer[row : row + 1] for layer in runtime.outputs[name]) for name in runtime.recorded}]


def path_outputs(runtime: TargetRuntime, row: int, path: Sequence[int]) -> list[dict[str, tuple[torch.Tensor, ...]]]:
    """Hidden states and attentions of root and path, for each node as plain decoding returns them for one token."""
    nodes = [0, *path]
    return [_node_outputs(runtime, row, nodes[: index + 1]) for index in range(len(nodes))]


def _node_outputs(runtime: TargetRuntime, row: int, path: Sequence[int]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Outputs for the last node of `path`, from the root on."""
    found, place = {}, runtime.read_again + path[-1]
    for name in runtime.recorded:
        layers = runtime.outputs[name]
        if name == runtime.names.states:
            found[name] = tuple(layer[row : row + 1, place : place + 1].clone() for layer in layers)
        else:
            weights = [layer[row : row + 1, :, place : place + 1] for layer in layers]
            own = name != "cross_attentions"
            found[name] = tuple(_weights_of_text(runtime, weights, row, path) if own else weights)
    return found


def _weights_of_text(
    runtime: TargetRuntime, weights: Sequence[torch.Tensor], row: int, path: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Reduces each layer's weights `[1, heads, 1, kv]` over the cache and all nodes to the row's text."""
    slots, read = runtime.slots, runtime.read_again + runtime.columns
    static = slots.static is not None
    path = [*range(runtime.read_again), *(runtime.read_again + node for node in path)]
    left_over = slots.length - read - (runtime.rows.kept[row] - runtime.read_again)  # slots of other rows' longer paths
    for index, layer in zip(slots.attending(len(weights)), weights, strict=True):
        empty = layer.shape[-1] - slots.length if static else 0  # slots beyond the nodes
        cached = layer.shape[-1] - empty - read
        text = torch.cat([layer[..., : cached - left_over], layer[..., [cached + node for node in path]]], dim=-1)
        if static:
            text = F.pad(text, (0, layer.shape[-1] - text.shape[-1]))
        yield text[..., -slots.windows[index] :] if index in slots.windows else text
