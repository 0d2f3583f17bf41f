"""What a call returns: transformers' own fields and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..core.cache_name import CACHE
from ..core.checks import public_name
from ..core.statistics import DraftStatistics
from ..runtime.target_runtime import TargetRuntime
from .decoded_texts import DecodedTexts, stacked


def named_target(target: Any) -> str:
    """Returns a target's class and its name, without local directories."""
    name = public_name(getattr(target, "name_or_path", "") or "")
    return " ".join(filter(None, [type(target).__name__, name]))


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
    exact = HSDraftGenerateOutput.exact


def as_output(
    texts: DecodedTexts, runtime: TargetRuntime, statistics: DraftStatistics, config: Any, model_kwargs: dict[str, Any]
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
