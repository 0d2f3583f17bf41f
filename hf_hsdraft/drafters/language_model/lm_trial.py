"""Tests once, on a few tokens, what a language model can do as a drafter, against plain forwards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.tensors import device_of
from ...runtime.misreading import same_but_rounding
from ...runtime.module_hooks import fingerprint
from ...runtime.target_limits import text_config
from ...runtime.tree_reading import AttentionKind
from .lm_limits import kinds_for_trees, why_it_cannot_draft
from .lm_texts import LMTexts

_TEXTS = ((5, 6, 7), (8, 9))  # different lengths
_NODES = (10, 11)  # at each of two depths


@dataclass(frozen=True)
class LMAbility:
    """What a model can do.

    Attributes:
        kinds: attention types whose masks it respects; empty for chains of single rows only.
        reason: why it cannot draft at all; empty if it can.
    """

    kinds: Sequence[AttentionKind] = ()
    reason: str = ""


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
    reason = why_it_cannot_draft(model)
    if reason:
        return LMAbility(reason=reason)
    try:
        kinds = kinds_for_trees(model)
    except ValueError:
        kinds = []
    if kinds and not _fault(model, kinds):
        return LMAbility(kinds)
    reason = _fault(model, [])
    return LMAbility(reason=f"{type(model).__name__} {reason}" if reason else "")


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


_known: weakref.WeakKeyDictionary[Any, dict[Any, LMAbility]] = weakref.WeakKeyDictionary()
