"""Tokens, trees and hidden states as little-endian bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import torch

from ..core.draft_tree import DraftTree
from .messages import MOST_NODES, Draft
from .wire import WireError


def packed_ints(values: Iterable[int], kind: str = "i") -> bytes:
    """Packs integers: `"i"` as int32, `"h"` as int16."""
    return _least_first(array(kind, values)).tobytes()


def unpacked_ints(data: bytes, kind: str = "i") -> list[int]:
    values = array(kind)
    values.frombytes(data)
    return _least_first(values).tolist()


def _least_first(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def packed_states(states: torch.Tensor) -> bytes:
    """Packs vectors `[..., D]` as bfloat16."""
    return states.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def unpacked_states(data: bytes | bytearray, width: int) -> torch.Tensor:
    """Unpacks vectors `[n, width]`, bfloat16; raises a WireError for a fraction of a vector."""
    if len(data) % max(2 * width, 1) or (data and not width):
        raise WireError(f"{len(data)} bytes are no vectors of {width} numbers")
    if not data:
        return torch.zeros(0, width, dtype=torch.bfloat16)
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, width)


def packed_tree(number: int, tree: DraftTree) -> Draft:
    """Returns the message of a draft. Depths follow from the parents, and scores stay with the drafter."""
    return Draft(number, packed_ints(tree.tokens), packed_ints(tree.parents, "h"))


def unpacked_tree(draft: Draft, vocab_size: int) -> DraftTree:
    """Returns the tree in a message; raises a WireError that says what is wrong with it."""
    tokens, parents = unpacked_ints(draft.tokens), unpacked_ints(draft.parents, "h")
    if not 1 <= len(tokens) <= MOST_NODES or len(parents) != len(tokens):
        raise WireError(f"a draft came in with {len(tokens)} tokens and {len(parents)} parents")
    if parents[0] != -1 or not 0 <= tokens[0] < vocab_size:
        raise WireError("the root of a draft has a parent, or no token of the vocabulary")
    depths = [0]
    for node, parent in enumerate(parents[1:], 1):
        if not 0 <= parent < node:
            raise WireError(f"node {node} of a draft has parent {parent}: expected a node before it")
        depths.append(depths[parent] + 1)
    tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), (0.0,) * len(tokens))
    fault = tree.fault(vocab_size)
    if fault:
        raise WireError(f"a draft is no tree: {fault}")
    return tree
