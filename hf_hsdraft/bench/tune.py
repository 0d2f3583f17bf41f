"""Which draft shape is fastest on this machine? Measured, not guessed: the answer depends on what a node costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..modeling_hsdraft import HSDrafter
from .measure import encode_prompt


@dataclass(frozen=True)
class DraftShape:
    """How much is drafted per round; the names are those of the drafting options."""

    num_assistant_tokens: int
    tree_size: int
    beam_width: int


SHAPES = (
    DraftShape(1, 3, 3),
    DraftShape(2, 5, 3),
    DraftShape(3, 8, 4),
    DraftShape(4, 14, 6),
    DraftShape(4, 32, 8),
    DraftShape(6, 24, 8),
    DraftShape(6, 48, 8),
)
_PROMPT = "Explain in a few sentences why the sky is blue, then add 17 and 25 step by step."


@dataclass(frozen=True)
class Tuning:
    """Tokens per second of every shape that was tried, and of plain decoding."""

    plain: float
    speeds: dict[DraftShape, float]

    @property
    def best(self) -> DraftShape:
        return max(self.speeds, key=lambda shape: self.speeds[shape])


def apply_shape(drafter: HSDrafter, shape: DraftShape) -> None:
    """Sets the drafting options of `drafter` to `shape`, cut to the depth it was trained for."""
    for name, value in asdict(shape).items():
        setattr(drafter.generation_config, name, value)
    depth = min(shape.num_assistant_tokens, drafter.config.num_draft_steps)
    drafter.generation_config.num_assistant_tokens = depth


def tune(
    target: Any,
    tokenizer: Any,
    drafter: HSDrafter,
    prompts: Sequence[str] = (_PROMPT,),
    shapes: Sequence[DraftShape] = SHAPES,
    max_new_tokens: int = 32,
) -> Tuning:
    """Times `generate()` with each shape, alternating, and leaves the fastest set on `drafter`.

    On a GPU or a CPU with matrix units a forward over 25 tokens costs little more than one over a single token, and
    large trees win; elsewhere every node costs, and small ones do.
    """
    choices: list[DraftShape | None] = [None, *shapes]
    seconds = dict.fromkeys(choices, 0.0)
    tokens = dict.fromkeys(choices, 0)
    for prompt in prompts:
        inputs = encode_prompt(tokenizer, prompt, target.device)
        for choice in choices:
            if choice is not None:
                apply_shape(drafter, choice)
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            begin = time.perf_counter()
            output = target.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                assistant_model=None if choice is None else drafter,
            )
            tokens[choice] += output.shape[1] - inputs["input_ids"].shape[1]
            seconds[choice] += time.perf_counter() - begin
    tuning = Tuning(
        plain=tokens[None] / seconds[None], speeds={shape: tokens[shape] / seconds[shape] for shape in shapes}
    )
    apply_shape(drafter, tuning.best)
    return tuning
