"""Records what identifies a drafter's target: its name, commit, tokenizer, and a short text that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from ...core.cache_name import CACHE, returned_cache
from ...core.checks import public_name
from ...drafters.hidden_state.modeling_hsdraft import HSDrafter
from ...drafters.hidden_state.target_match import can_measure, measure_match, tokenizer_hash
from ...runtime.prompt_inputs import encode_prompt
from ...runtime.target_limits import furthest_position

_PROMPT = "Write a letter to a friend about a walk through an old town, then list three things to see there."
_TOKENS = 96


def record_target(drafter: HSDrafter, target: Any, tokenizer: Any, name: str | None = None) -> None:
    """Records a drafter's target in its configuration, so that `target_match` can recognise the target.

    The target writes a text, and the drafter guesses along. All processes of a sharded target have to take part. `name`
    is `None` for the name by which the target was loaded. A drafter for a target of other sizes is a ValueError.
    """
    config = drafter.config
    config.target_reference = None
    record_name(drafter, target, tokenizer, name)
    prompt = encode_prompt(tokenizer, _PROMPT, target.device)["input_ids"]
    start = prompt.shape[1]
    tokens = min(_TOKENS, furthest_position(target) - start)
    if start < 2 or tokens < 1 or not can_measure(target, start + tokens):
        return
    text = _greedy(target, prompt, tokens)
    match = measure_match(target, drafter, text, start)
    config.target_reference = {
        "input_ids": text,
        "start": start,
        "agreed": match.agreed,
        "drafted": match.drafted,
    }
    config.check()


def record_name(drafter: Any, target: Any, tokenizer: Any, name: str | None = None) -> None:
    """Records the target's name, tokenizer and special tokens in a drafter's configuration. See `record_target`."""
    drafter.check(target)
    config = drafter.config
    own_name = getattr(target, "name_or_path", "") or ""
    config.target_name = public_name(name or own_name)
    config.target_revision = _revision(own_name)
    config.target_tokenizer_hash = tokenizer_hash(tokenizer)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(target.config.get_text_config(), token, None))


@torch.no_grad()
def _greedy(target: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    """Returns a prompt and its greedy continuation, without `generate()`, whose defaults a target may change."""
    text, cache, read = prompt, None, prompt
    for _ in range(tokens):
        output = target(read, **{CACHE: cache}, use_cache=True)
        cache, read = returned_cache(output), output.logits[:, -1:].argmax(dim=-1).to(prompt.device)
        text = torch.cat([text, read], dim=1)
    return [int(token) for token in text[0]]


def _revision(name: str) -> str:
    """Returns the commit of a model of the Hub, if the cache has only one; else an empty string."""
    if not name or Path(name).exists():
        return ""
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no such name on the Hub
        return ""
    if not isinstance(cached, str) or len(list(Path(cached).parent.parent.iterdir())) != 1:
        return ""
    return Path(cached).parent.name
