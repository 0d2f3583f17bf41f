"""Training of drafters in the package's own format, which are saved with their code: those of hidden states."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...core.cache_name import CACHE, returned_cache
from ...core.checks import demand
from ...core.tensors import biased
from ...drafters.base.draft_options import leave_folder
from ...drafters.base.registry import tokenizer_hash
from ...drafters.hidden_state.modeling_hsdraft import HSDrafter
from ...drafters.hidden_state.target_match import can_measure, measure_match
from ...hub.model_card import trunk_in_words
from ...runtime.prompt_inputs import encode_prompt
from ...runtime.target_limits import furthest_position
from .family import KEPT, Choose, TrainableFamily, name_of, some_columns, trained

_PROMPT = "Write a letter to a friend about a walk through an old town, then list three things to see there."
_TOKENS, _FEWEST = 96, 24  # that the target writes; fewer than these say too little

_SHORTEST_WINDOW = 128
_FREE = ("tree_size", "beam_width", "sliding_window")  # fields on which no weights depend


class TravellingFamily(TrainableFamily):
    """Families whose configurations are transformers', drafting options included."""

    def config_for(self, target: Any, fields: Mapping[str, Any]) -> Any:
        return self.drafter.config_class.for_target(target, **fields)

    def fresh(self, target: Any, fields: Mapping[str, Any], longest: int, choose: Choose) -> Any:
        # Training never looks back further than the longest text.
        window = {"sliding_window": max(longest, _SHORTEST_WINDOW)} if "sliding_window" in self.fields else {}
        return super().fresh(target, {**window, **fields}, longest, choose)

    def continued(self, drafter: Any, fields: Mapping[str, Any]) -> None:
        config, options = drafter.config, drafter.generation_config
        config.target_name = fields.get("target_name", config.target_name)
        leave_folder(drafter)  # and its recipe and figures, which are not this run's
        for name in _FREE:
            if name in fields and hasattr(config, name):
                setattr(config, name, fields[name])
                if name != "sliding_window":
                    setattr(options, name, fields[name])
        config.check()
        for name, value in fields.items():
            found = getattr(config, name)
            demand(found == value or name == "draft_vocab_size", name, value, KEPT.format(found))

    def record_target(
        self, drafter: Any, target: Any, tokenizer: Any, name: str | None = None, seconds: float | None = None
    ) -> None:
        record_name(drafter, target, tokenizer, name)


def record_name(drafter: Any, target: Any, tokenizer: Any, name: str | None = None) -> None:
    """Records the target's name, tokenizer and special tokens in a drafter's configuration."""
    drafter.check(target)
    config = drafter.config
    config.target_name = name_of(target, name)
    config.target_revision = getattr(target.config, "_commit_hash", None) or ""
    config.target_tokenizer_hash = tokenizer_hash(tokenizer)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(target.config.get_text_config(), token, None))


class HiddenStateFamily(TravellingFamily):
    """Drafters that roll hidden states forward without tokens; an injector adds the tokens of a path.

    The first depth needs none: its states have read the parent.
    """

    name = "hidden-state"
    drafter = HSDrafter
    least = {"draft_vocab_size": 1, "intermediate_size": 1, "injector_rank": 1, "injector_hidden_size": 1}  # noqa: RUF012
    arguments = {"rolled_fraction": 0.2}  # noqa: RUF012  # most of a step would be rolled chains otherwise
    takes_adapters = True

    def by_columns(self, config: Any) -> bool:
        chooses: bool = config.injector == "selector"  # among all columns
        return not chooses

    def continued(self, drafter: HSDrafter, fields: Mapping[str, Any]) -> None:
        drafter.config.target_reference = None  # it is recorded again at the end
        super().continued(drafter, fields)

    def layers(self, drafter: HSDrafter) -> list[nn.Module]:
        return [*drafter.layers, *(layer for step in drafter.step_modules for layer in step.layers)]  # type: ignore

    def bias_rows(self, drafter: HSDrafter) -> torch.Tensor:
        return drafter.injector.up.weight

    def record_target(
        self, drafter: HSDrafter, target: Any, tokenizer: Any, name: str | None = None, seconds: float | None = None
    ) -> None:
        record_target(drafter, target, tokenizer, name, seconds)

    def describe(self, drafter: HSDrafter) -> str:
        config = drafter.config
        return f"{trunk_in_words(config.to_dict())}, {config.injector} injector"

    @property
    def parameters(self) -> list[nn.Parameter]:
        return trained(self.model.norm, self.model.injector, self.model.lm_head)

    def states(self, tokens: torch.Tensor, hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        embeds, advance = self.weights.embed(tokens), self.model.injector.advance
        states = advance(embeds[:, 0], None)
        result: list[torch.Tensor | None] = [None]
        for depth, hidden in enumerate(hidden_states[1:], 1):
            rows = hidden.shape[0]
            states = advance(embeds[:rows, depth], states[:rows])
            result.append(states)
        return result

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits, injector = super().logits(hidden, states, columns), self.model.injector
        if states is None:
            return logits
        bias = some_columns(injector.up, injector.code(injector.project(hidden), states), columns)
        return biased(logits, bias, injector.reach(logits))


def record_target(
    drafter: HSDrafter, target: Any, tokenizer: Any, name: str | None = None, seconds: float | None = None
) -> None:
    """Records a drafter's target in its configuration, so that `target_match` can recognise the target.

    The target writes a text, and the drafter guesses along. After `seconds`, if given, no text is recorded, or a
    shorter one. A drafter for a target of other sizes is a ValueError.
    """
    config = drafter.config
    config.target_reference = None
    record_name(drafter, target, tokenizer, name)
    prompt = encode_prompt(tokenizer, _PROMPT, target.device)["input_ids"]
    start = prompt.shape[1]
    tokens = min(_TOKENS, furthest_position(target) - start)
    if start < 2 or tokens < 1 or not can_measure(target, start + tokens):
        return
    text = _greedy(target, prompt, tokens, math.inf if seconds is None else seconds)
    if len(text) < start + min(tokens, _FEWEST):
        return
    match = measure_match(target, drafter, text, start)
    config.target_reference = {"input_ids": text, "start": start, "agreed": match.agreed, "drafted": match.drafted}
    config.check()


@torch.no_grad()
def _greedy(target: Any, prompt: torch.Tensor, tokens: int, seconds: float) -> list[int]:
    """Returns a prompt and its greedy continuation, without `generate()`, whose defaults a target may change."""
    text, cache, read, begin = prompt, None, prompt, time.monotonic()
    for _ in range(tokens):
        if time.monotonic() - begin >= seconds:
            break
        output = target(read, **{CACHE: cache}, use_cache=True)
        cache, read = returned_cache(output), output.logits[:, -1:].argmax(dim=-1).to(prompt.device)
        text = torch.cat([text, read], dim=1)
    return [int(token) for token in text[0]]
