"""The package `economize` as a system to compare with: prompt lookup, EAGLE-3, and a hybrid of both."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..runtime.prompt_inputs import end_tokens

KINDS = {"economize-lookup": "lookup", "economize-eagle3": "EAGLE-3", "economize-hybrid": "hybrid"}
CYCLE = 4  # economize's default: tokens of a cycle, one of them the target's


@dataclass(frozen=True)
class Answer:
    """New tokens, and the number of drafted tokens accepted in each cycle."""

    tokens: list[int]
    accepted: list[int]


# Takes prompts (each [length]), the greatest number of new tokens, a temperature (0 is greedy), a seed, and a function
# to call when the first token is there. Returns the answers.
Decode = Callable[[Sequence[torch.Tensor], int, float, int, Callable[[], None]], list[Answer]]


def check_installed() -> None:
    if importlib.util.find_spec("economize") is None:
        raise ImportError("the comparison needs economize: pip install --no-deps economize")


def decoder(
    kind: str, target: Any, folder: Path | None = None, cycle_length: int = CYCLE, min_confidence: float | None = None
) -> Decode:
    """Returns the function by which economize decodes with a target.

    `folder` was written by `economize.save`, with an EAGLE-3 or, for the hybrid, a hybrid; None for the lookup. A cycle
    includes the target's token. Drafting stops below the probability `min_confidence`.

    Raises:
        ImportError: economize is not installed.
        ValueError: the folder holds another technique.
    """
    check_installed()
    import economize

    model = _model(kind, target, folder)
    ends = end_tokens(target)

    def decode(
        prompts: Sequence[torch.Tensor], max_new_tokens: int, temperature: float, seed: int, first: Callable[[], None]
    ) -> list[Answer]:
        waiting = [True]

        def ends_text(text: torch.Tensor) -> bool:  # economize calls it after every token
            if waiting:
                waiting.clear()
                first()
            return int(text[-1]) in ends

        sampler = economize.TopPSampler(temperature, seed=seed) if temperature > 0 else None
        options = economize.DecodeConfig(
            cycle_length=cycle_length, min_confidence=min_confidence, verifier="rejection" if sampler else None
        )
        results = model.decode_batch(list(prompts), max_new_tokens, decoding=options, selector=sampler, stop=ends_text)
        return [
            Answer([int(token) for token in result.tokens], [accepted for _, accepted in result.acceptance])
            for result in results
        ]

    return decode


def _model(kind: str, target: Any, folder: Path | None) -> Any:
    import economize
    from economize.techniques.hybrid import HybridConfig
    from economize.techniques.lookup import LookupConfig

    if kind == "economize-lookup":
        return economize.apply(target, LookupConfig()).eval()
    assert folder is not None
    checkpoint = economize.read_checkpoint(folder)
    found = checkpoint.configs[0].technique
    if found not in (("eagle3",) if kind == "economize-eagle3" else ("eagle3", "hybrid")):
        raise ValueError(f"{folder} holds {found!r} of economize; {kind} expects an EAGLE-3")
    config, state = checkpoint.configs[0], checkpoint.states[found]
    # The target's dtype, as for our drafter; the default is float32.
    if found == "hybrid":
        model = economize.apply(target, replace(config, fallback=replace(config.fallback, param_dtype="model")))
        model.techniques["hybrid"].load_state_dict(state)
        return model.eval()
    config = replace(config, param_dtype="model")
    if kind == "economize-hybrid":
        model = economize.apply(target, HybridConfig(fallback=config))
        model.techniques["hybrid"].fallback.load_state_dict(state)
    else:
        model = economize.apply(target, config)
        model.techniques["eagle3"].load_state_dict(state)
    return model.eval()
