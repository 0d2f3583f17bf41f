"""Lists of the tokens that a drafter with a part of the vocabulary drafts, as other projects write them."""

from __future__ import annotations

import torch

from ...core.checks import demand, printable
from ...hub.checkpoint import Checkpoint

TOKEN_MAP = "token_map"  # vLLM's name of a list of drafted tokens among the weights


def drafted_ids(checkpoint: Checkpoint, vocab_size: int) -> torch.Tensor:
    """Returns `[V']`, int64, the token id of each row of the head: the row's number plus `d2t` `[V']`.

    `t2d` `[vocab_size]`, if there, marks the drafted tokens. Raises a ValueError if maps are not integers or contradict
    each other, or ids repeat or exceed the vocabulary.
    """
    name, maps = printable(checkpoint.name), dict(checkpoint.tensors(("d2t", "t2d")))
    for title, tensor in maps.items():
        if tensor.is_floating_point() or (title == "d2t" and tensor.dtype == torch.bool):
            wanted = "integers" if title == "d2t" else "bool or integers"
            raise ValueError(f"{title} of {name} has dtype {tensor.dtype}: expected {wanted}")
    ids = torch.arange(len(maps["d2t"])) + maps["d2t"].long()
    least, most, again = int(ids.min()), int(ids.max()), len(ids) - len(ids.unique())
    if least < 0 or most >= vocab_size or again:
        raise ValueError(
            f"d2t of {name} leads to tokens {least} to {most}, {again} of them twice: expected 0 to {vocab_size - 1}, "
            "each once, as the number of its row plus d2t"
        )
    marked = maps.get("t2d")
    if marked is not None and not torch.equal(ids.sort().values, marked.nonzero().flatten()):
        raise ValueError(f"d2t and t2d of {name} name different tokens: expected each drafted token once, in both")
    return ids


def offsets_listed(checkpoint: Checkpoint, vocab_size: int) -> torch.Tensor:
    """Returns `d2t` `[V']` by the list `TOKEN_MAP`; raises a ValueError unless it has tokens, each once."""
    ids = dict(checkpoint.tensors((TOKEN_MAP,)))[TOKEN_MAP]
    valid = not ids.is_floating_point() and ids.dtype != torch.bool
    demand(valid, TOKEN_MAP, ids.dtype, "expected integers")
    valid = 0 <= int(ids.min()) <= int(ids.max()) < vocab_size and len(ids.unique()) == len(ids)
    demand(valid, TOKEN_MAP, ids.tolist(), f"expected tokens below {vocab_size}, each once")
    return ids.long() - torch.arange(len(ids))
