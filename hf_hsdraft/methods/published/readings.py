"""Questions that a drafter's files leave open, because its reference implementations read them differently.

A trial on the target decides: the reading by which the drafter finds the target's text most likely. It runs at the
first call, before anything is drafted, and its result is kept in the user's cache. Texts are the target's in any case.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ...core.cache_folder import cache_folder
from ...core.cache_name import CACHE, returned_cache
from ...core.checks import demand, printable
from ...hub.drafter_files import read_document
from ...runtime.prompt_inputs import inputs_of
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_parts import LastState, final_norm
from .target_copies import why_not_copied

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Question:
    """A field of a drafter's configuration that files may leave open."""

    title: str
    readings: Mapping[Any, str]  # what each value means, and who reads files so; the first is taken until it is tried
    matters: Callable[[Any, Any], bool] = lambda config, target: True  # whether the target can tell them apart


def _scales(config: Any, target: Any) -> bool:
    return float(getattr(target.get_input_embeddings(), "embed_scale", 1.0)) != 1.0


def _reads_last(config: Any, target: Any) -> bool:
    layers = decoder_layers(text_config(target))
    return config.taps_of(layers)[-1] == layers and final_norm(target) is not None


QUESTIONS = {
    "norm_output": Question("state fed back", {
        True: "after the norm (EAGLE-3.1)",
        False: "before the norm (EAGLE-3, SpecForge before September 2026)",
    }),
    "norm_before_residual": Question("first residual", {
        False: "the state before its norm (speculators)",
        True: "the normed state (vLLM)",
    }),
    "norms_state_twice": Question("norms of the first layer's state", {
        False: "its own (vLLM, SGLang, ModelOpt's class for Megatron)",
        True: "that of embeddings, then its own (ModelOpt's class for transformers)",
    }),
    "sample_from_anchor": Question("first drafting slot", {
        True: "the anchor's (speculators)",
        False: "the first mask's (vLLM)",
    }),
    "embedding_scale": Question("embeddings of a target that scales them", {
        None: "as the target makes them (SGLang, z-lab's MLX code)",
        1.0: "the target's rows as they are (z-lab's torch code from 0.1.0 on, vLLM)",
    }, _scales),
    "last_tap_is_normed": Question("last layer's output", {
        True: "after the final norm (DFlash of z-lab, MTP layers as vLLM runs them)",
        False: "before it (DFlash in vLLM and SGLang, MTP layers as speculators trains them)",
    }, _reads_last),
    "hands_on_normed": Question("output that the next layer for multi-token prediction reads", {
        True: "after its norm (SGLang, transformers)",
        False: "before it (vLLM)",
    }),
    "rotates_whole_heads": Question("rotated part of heads", {
        True: "all (z-lab, speculators)",
        False: "partial_rotary_factor (vLLM)",
    }),
}  # fmt: skip

_LEAST, _MOST = 40, 96  # tokens of a trial's text
_ROWS = 256  # drafted rows of a trial
_DEPTH = 4
_CLEAR = 0.02  # nats a token between the best two readings; a smaller difference decides nothing
_KNOWS = 0.5  # nats a token below an even guess: a drafter that says less was not trained for this target
_TRIALS = 3  # that decide nothing
_CACHE = "readings.json"
_PROMPTS = (
    "How does a bicycle stay upright? Explain it step by step.",
    "Write a short story about a lighthouse keeper and a storm.",
    "def sorted_by_length(words):",
)
_one_at_a_time = threading.Lock()


def settle(drafter: Any, target: Any, tokens: Sequence[int]) -> None:
    """Decides open questions on a text's tokens, which the target continues if they are few; none without tokens."""
    asked = [name for name in drafter.config.untold if QUESTIONS[name].matters(drafter.config, target)]
    if not asked or not tokens or not drafter.can_be_tried or drafter.trials >= _TRIALS:
        return
    with _one_at_a_time, torch.no_grad():
        if known := _remembered(drafter, target, asked):
            _take(drafter, asked, known[0], known[1])
            return
        drafter.trials += 1
        usual = [getattr(drafter.config, name) for name in asked]
        try:
            found = _losses(drafter, target, asked, tokens)
        except Exception as error:  # of any type: the target may want more than a text
            logger.info(f"{', '.join(asked)} cannot be tried: {printable(error)}")
            return
        finally:
            drafter.reread(**dict(zip(asked, usual, strict=True)))
        best, second, *_ = sorted(found, key=lambda values: found[values])
        guess = math.log(drafter.config.draft_vocab_size or text_config(target).vocab_size)
        why = f"the target's text has {found[best]:.2f} nats a token, otherwise {found[second]:.2f}"
        if found[second] - found[best] >= _CLEAR and found[best] <= guess - _KNOWS:
            _take(drafter, asked, best, why)
            _remember(drafter, target, asked, best, why)
        else:
            drafter.tried |= {
                name: f"{QUESTIONS[name].readings[value]}, which a trial does not decide; at best {why}"
                for name, value in zip(asked, usual, strict=True)
            }


def _losses(drafter: Any, target: Any, asked: Sequence[str], tokens: Sequence[int]) -> dict[tuple[Any, ...], float]:
    """Returns the surprise of each reading, by the values of the fields; leaves the last reading on the drafter."""
    text, found = _continued(target, list(tokens)[-_MOST:], _LEAST), {}
    states = _states(target, text)
    for values in itertools.product(*(QUESTIONS[name].readings for name in asked)):
        drafter.reread(**dict(zip(asked, values, strict=True)))
        found[values] = _loss(drafter, target, states, text)
    return found


def _take(drafter: Any, asked: Sequence[str], values: Sequence[Any], why: str) -> None:
    left = tuple(name for name in drafter.config.untold if name not in asked)
    drafter.reread(**dict(zip(asked, values, strict=True)), untold=left)
    for name, value in zip(asked, values, strict=True):
        drafter.tried[name] = f"{QUESTIONS[name].readings[value]}; {why}"
        logger.info(f"{QUESTIONS[name].title}, which the drafter's files do not tell: {drafter.tried[name]}")


def told(config: Any, tried: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Returns lines by title about questions: which reading is taken, and why."""
    found = {}
    for name in names:
        question, value = QUESTIONS[name], getattr(config, name)
        if name in tried:
            found[question.title] = tried[name]
        elif name in config.untold:
            found[question.title] = (
                f"not told by the files: {' or '.join(question.readings.values())}; the first call tries both, "
                f"`hsdraft info --target` too, and {name}=... of from_pretrained decides"
            )
        elif value in question.readings:
            found[question.title] = f"{question.readings[value]}, as the files or the caller tell"
    return found


@torch.no_grad()
def _continued(target: Any, tokens: list[int], length: int) -> list[int]:
    """Extends a text greedily to `length` tokens; that of a compiled or offloaded target stays as it is."""
    if why_not_copied([target]):
        return tokens
    known: dict[str, Any] = {}
    while len(tokens) < length:
        output = target(**inputs_of(target, tokens, len(tokens) - 1 if known else 0), use_cache=True, **known)
        cache = returned_cache(output)  # without one, each step reads the whole text
        known = {} if cache is None else {CACHE: cache}
        tokens = [*tokens, int(output.logits[0, -1].argmax())]
    return tokens


def _states(target: Any, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Returns the hidden states `[T, D]` by tap; the last one is before the final norm."""
    norm = final_norm(target)
    kept = None if norm is None else LastState(norm, decoder_layers(text_config(target)))
    with contextlib.nullcontext() if kept is None else kept.kept():
        states = target(**inputs_of(target, tokens), use_cache=False, output_hidden_states=True).hidden_states
    return tuple(state[0] for state in (states if kept is None else kept.behind(states)))


def _loss(drafter: Any, target: Any, states: Sequence[torch.Tensor], text: Sequence[int]) -> float:
    """Returns the mean surprise, in nats, of drafts after many positions at the text's tokens, those drafted at all."""
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    taps = torch.cat([states[tap].to(drafter.device, drafter.dtype) for tap in drafter.taps_of(target)], dim=-1)[:-1]
    tokens, depth = torch.tensor(text, device=drafter.device), min(drafter.num_draft_steps, _DEPTH)
    count = len(tokens) - 1 - depth
    starts = torch.arange(0, count, max(1, -(-count * drafter.rows_of_trial // _ROWS)), device=drafter.device)
    columns = torch.full((int(max(weights.vocab_ids.max(), tokens.max())) + 1,), -1, device=drafter.device)
    columns[weights.vocab_ids] = torch.arange(len(weights.vocab_ids), device=drafter.device)
    losses = []
    for level, hidden in enumerate(drafter.trial_states(taps, tokens, starts, depth, weights)[:depth]):
        wanted = columns[tokens[starts + 2 + level]]
        log_probs = drafter.logits(hidden, weights).float().log_softmax(dim=-1)
        losses.append(-log_probs.gather(1, wanted.clamp(min=0)[:, None])[wanted >= 0, 0])
    found = torch.cat(losses)
    return float(found.mean()) if len(found) else 0.0


def _state_of(folder: Any) -> str:
    """Names a drafter's files as they are now; empty if there are none."""
    with contextlib.suppress(OSError, TypeError):
        return f"{Path(folder).resolve()} {os.stat(Path(folder) / 'config.json').st_mtime_ns}"
    return ""


def _key(drafter: Any, target_name: str) -> str:
    """Names a drafter's files and the target; empty where they have no name."""
    state = _state_of(getattr(drafter, "loaded_from", None))
    return f"{state} {target_name}" if state and target_name else ""


def kept(folder: Path) -> dict[str, str]:
    """Returns lines by title about what trials of earlier processes have found for a drafter's files."""
    state, found = f"{_state_of(folder)} ", {}
    for key, entry in _stored().items():
        if key.startswith(state) and isinstance(entry, dict):
            for name, value in dict(entry.get("readings", {})).items():
                if name in QUESTIONS and value in QUESTIONS[name].readings:
                    title = f"{QUESTIONS[name].title}, for {printable(key.removeprefix(state))}"
                    found[title] = f"{QUESTIONS[name].readings[value]}; {printable(str(entry.get('why')))}"
    return found


def _stored() -> dict[str, Any]:
    with contextlib.suppress(OSError):  # a user without a home
        return read_document(cache_folder(_CACHE))
    return {}


def _remembered(drafter: Any, target: Any, asked: Sequence[str]) -> tuple[list[Any], str] | None:
    entry = _stored().get(_key(drafter, getattr(target, "name_or_path", "") or ""))
    if not isinstance(entry, dict) or not all(name in entry.get("readings", {}) for name in asked):
        return None
    values = [entry["readings"][name] for name in asked]
    valid = all(value in QUESTIONS[name].readings for name, value in zip(asked, values, strict=True))
    return (values, printable(str(entry.get("why")))) if valid else None


def _remember(drafter: Any, target: Any, asked: Sequence[str], values: Sequence[Any], why: str) -> None:
    if not (key := _key(drafter, getattr(target, "name_or_path", "") or "")):
        return
    path = cache_folder(_CACHE)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"readings": dict(zip(asked, values, strict=True)), "why": why}
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({**_stored(), key: entry}, indent=1), encoding="utf-8")
        os.replace(part, path)


def settled_by(config: Any, **values: Any) -> Any:
    """Returns a configuration with questions decided by the caller; raises a ValueError for a value that none has."""
    for name, value in values.items():
        known = QUESTIONS[name].readings
        demand(value in known, name, value, f"expected {' or '.join(map(repr, known))}")
    if not values:
        return config
    return replace(config, **values, untold=tuple(name for name in config.untold if name not in values))


def try_on(drafter: Any, target: Any, tokenizer: Any) -> None:
    """Decides open questions on a few lines that the target writes, until the difference is clear."""
    for prompt in _PROMPTS:
        tokens = tokenizer(prompt, return_token_type_ids=False)["input_ids"]
        drafter.settle(target, _continued(target, list(tokens), _MOST))


def match_told(drafter: Any, target: Any, tokenizer: Any, name: str) -> list[str]:
    """As `Drafter.match_told`, after trying what is open."""
    drafter.check(target)
    questions = getattr(drafter.config, "untold", ())
    if not questions:
        return [f"{name} fits: its sizes are the drafter's, whose files leave nothing open"]
    try_on(drafter, target, tokenizer)
    return [f"{title}: {reading}" for title, reading in told(drafter.config, drafter.tried, questions).items()]
