"""What tells a drafter's target from others: its name, commit, tokenizer, and a short text it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from ..bench.measure import encode_prompt
from ..configuration_hsdraft import public_name
from ..modeling_hsdraft import HSDrafter
from ..target_match import measure_match, tokenizer_hash

_PROMPT = "Write a letter to a friend about a walk through an old town, then list three things to see there."
_TOKENS = 96


def record_target(drafter: HSDrafter, target: Any, tokenizer: Any, name: str | None = None) -> None:
    """Notes in the drafter's configuration which target it was made for, so that `target_match` can tell.

    The target writes a text and the drafter guesses along; of a sharded target all processes have to take part.

    Args:
        name: of the target, if it is known by another one than it was loaded by.
    """
    config = drafter.config
    own_name = getattr(target, "name_or_path", "") or ""
    config.target_name = public_name(name or config.target_name or own_name)
    config.target_revision = _revision(own_name)
    config.target_tokenizer_hash = tokenizer_hash(tokenizer)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(target.config.get_text_config(), token, None))
    inputs = encode_prompt(tokenizer, _PROMPT, target.device)
    start = inputs["input_ids"].shape[1]
    room = getattr(target.config.get_text_config(), "max_position_embeddings", None) or start + _TOKENS
    tokens = min(_TOKENS, room - start)
    if tokens < 1 or start < 2:
        return  # too small a window for this text
    text = target.generate(**inputs, do_sample=False, num_beams=1, min_new_tokens=tokens, max_new_tokens=tokens)[0]
    with torch.no_grad():
        match = measure_match(target, drafter, text.tolist(), start)
    config.target_reference = {
        "input_ids": text.tolist(),
        "start": start,
        "agreed": match.agreed,
        "drafted": match.drafted,
    }
    config.check()


def _revision(name: str) -> str:
    """The commit of a model that was loaded from the Hub, empty for other ones."""
    if not name or Path(name).exists():
        return ""
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of the Hub
        return ""
    return Path(cached).parent.name if isinstance(cached, str) else ""
