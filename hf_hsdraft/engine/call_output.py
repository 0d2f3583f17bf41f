"""What a call returns: transformers' own fields and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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
