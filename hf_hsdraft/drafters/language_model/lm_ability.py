"""What a language model can do as a drafter: by its class and cache, by a trial, and by its vocabulary."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ...core.cache_name import takes_cache
from ...core.checks import few, printable
from ...core.tensors import device_of, embedded_tokens
from ...runtime.cache_slots import CacheSlots, cache_layers
from ...runtime.misreading import same_but_rounding
from ...runtime.module_hooks import fingerprint
from ...runtime.target_limits import text_config, why_no_trees, why_refused
from ...runtime.tree_reading import AttentionKind, attention_kinds
from .lm_texts import LMTexts

_TEXTS = ((5, 6, 7), (8, 9))  # different lengths
_NODES = (10, 11)  # at each of two depths
_NAMED = 3  # differences between tokenizers shown in a message


@dataclass(frozen=True)
class LMAbility:
    """What a model can do."""

    kinds: Sequence[AttentionKind] = ()  # attention types whose masks it respects; empty for chains of single rows only
    reason: str = ""  # why it cannot draft at all; empty if it can


def ability_of(model: Any) -> LMAbility:
    """Returns what a model can do; tested once per model and device."""
    known = _known.setdefault(model, {})
    key: tuple[Any, ...] = ()
    if hasattr(model, "config"):
        key = fingerprint(model), device_of(model), text_config(model)._attn_implementation
    if key not in known:
        known[key] = _found(model)
    return known[key]


def _found(model: Any) -> LMAbility:
    reason = _why_it_cannot_draft(model)
    if reason:
        return LMAbility(reason=reason)
    cache, kinds = _empty_cache(model), []
    if not why_no_trees(model, cache):
        with contextlib.suppress(ValueError):  # some layers take no tree's mask
            kinds = attention_kinds(text_config(model), [True] * len(cache_layers(cache)))
    if kinds and not _fault(model, kinds):
        return LMAbility(kinds)
    reason = _fault(model, [])
    return LMAbility(reason=f"{type(model).__name__} {reason}" if reason else "")


def _why_it_cannot_draft(model: Any) -> str:
    """Returns why a model cannot draft at all by its class, configuration and cache; "" if it may."""
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        return f"{name} has no output layer: expected a causal language model"
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder: a drafter has only the text to read"
    cache = _empty_cache(model)
    if getattr(model, "_is_stateful", False) or CacheSlots(cache).recurrent:
        return f"{name} has recurrent layers: they cannot take back the tokens that the target rejects"
    if not takes_cache(model):
        return f"{name} keeps no keys and values: it would read the whole text for every drafted token"
    reason = why_refused(model, cache)
    return f"{name}: {reason}" if reason else ""


def _empty_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=text_config(model))


@torch.no_grad()
def _fault(model: Any, kinds: Sequence[AttentionKind]) -> str:
    """Returns what goes wrong when drafted tokens are read; "" if the logits match plain forwards."""
    size = text_config(model).vocab_size
    texts = [[token % size for token in text] for text in (_TEXTS if kinds else _TEXTS[:1])]
    nodes = [token % size for token in (_NODES if kinds else _NODES[:1])]
    try:
        read = LMTexts(model, range(len(texts)), kinds, len(nodes) ** 2 + len(nodes))
        read.read(texts)
        first = torch.tensor([nodes] * len(texts), device=device_of(model))
        _, paths = read.read_nodes(first, first[..., None][..., :0])
        twice = first.repeat_interleave(len(nodes), dim=1)
        logits, _ = read.read_nodes(first.repeat(1, len(nodes)), paths.repeat_interleave(len(nodes), dim=1))
        for row, text in enumerate(texts):
            both = zip(twice[row].tolist(), first.repeat(1, len(nodes))[row].tolist(), strict=True)
            ids = torch.tensor([[*text, *pair] for pair in both], device=device_of(model))
            plain = model(input_ids=ids, use_cache=False).logits[:, -1]
            if not same_but_rounding(logits[row], plain.to(logits.device)):
                return "reads drafted tokens otherwise than those of a text"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of the model's code means that it cannot
        lines = str(error).strip().splitlines()
        return f"cannot read drafted tokens ({type(error).__name__}: {lines[0][:160] if lines else 'no message'})"
    return ""


def what_differs(own: Any, targets: Any) -> str:
    """Returns how two tokenizers differ; "" if every id in both stands for the same token. Either may have more."""
    known = _compared.setdefault(own, weakref.WeakKeyDictionary())
    if targets not in known:
        known[targets] = _difference(own.get_vocab(), targets.get_vocab())
    return known[targets]


def shared_tokens(model: Any, target: Any) -> int:
    """Returns the number of tokens that model and target share: the first ids."""
    rows = embedded_tokens(model)
    return min(text_config(model).vocab_size, text_config(target).vocab_size, rows)


def _difference(own: dict[str, int], targets: dict[str, int]) -> str:
    by_id = {index: token for token, index in targets.items()}
    other = {index: token for token, index in own.items() if by_id.get(index, token) != token}
    if not other:
        return ""
    told = [
        f"{index} is {printable(other[index])!r}, the target's {printable(by_id[index])!r}" for index in sorted(other)
    ]
    return f"{len(other):,} of {len(own):,} token ids stand for other tokens: {few(told, _NAMED)}"


_known: weakref.WeakKeyDictionary[Any, dict[Any, LMAbility]] = weakref.WeakKeyDictionary()
_compared: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, str]] = weakref.WeakKeyDictionary()
