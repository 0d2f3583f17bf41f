"""Compares the vocabularies of drafter and target."""

from __future__ import annotations

import weakref
from typing import Any

from ...core.checks import few, printable
from ...runtime.target_limits import text_config

_NAMED = 3  # differences shown in a message


def what_differs(own: Any, targets: Any) -> str:
    """Returns how two tokenizers differ; "" if every id in both stands for the same token. Either may have more."""
    known = _compared.setdefault(own, weakref.WeakKeyDictionary())
    if targets not in known:
        known[targets] = _difference(own.get_vocab(), targets.get_vocab())
    return known[targets]


def shared_tokens(model: Any, target: Any) -> int:
    """Returns the number of tokens that model and target share: the first ids."""
    rows = model.get_input_embeddings().weight.shape[0]
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


_compared: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, str]] = weakref.WeakKeyDictionary()
