"""What a target can do, found out by trying: whether it reads a draft at once as it reads its paths token by token.

No list of architectures could say that. So before the first draft a few tokens are read after the prompt in each way
that drafting would use, compared with reading them one at a time, and taken back. What was found is remembered for as
long as the target lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .draft_tree import DraftTree
from .target_runtime import TargetRuntime, cache_layers, text_config

# Tokens a, b, c after the root: a and b follow it, c follows a. As a tree in the order a, b, c.
_PARENTS = (-1, 0, 0, 1)
_PATHS = ((0, 2), (1,))  # root-a-c and root-b, as places in (a, b, c)
PROBE_DEPTH = 2


@dataclass(frozen=True)
class Ability:
    """What a target was found to do.

    Attributes:
        trees, chains: drafts it reads rightly.
        reason: why it reads no trees, or no drafts at all.
    """

    trees: bool
    chains: bool
    reason: str = ""


_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Ability]] = weakref.WeakKeyDictionary()


def ability_of(runtime: TargetRuntime, input_ids: torch.Tensor, logits: torch.Tensor) -> Ability:
    """What the target of a call can do; tried once for each attention implementation and kind of call.

    Args:
        input_ids: `[B, length]`, the texts with the first new token, which the target has not read yet.
        logits: `[B, V]`, from which that token was chosen.
    """
    target = runtime.target
    layers = tuple(type(layer).__name__ for layer in cache_layers(runtime.cache))
    attention = text_config(target)._attn_implementation
    key = (attention, target.dtype, target.device, layers, len(input_ids) > 1, runtime.attended is not None)
    found = _known.setdefault(target, {})
    unknown = [name for layer, name in zip(cache_layers(runtime.cache), layers, strict=True) if not _is_known(layer)]
    if unknown and runtime.attended is not None:
        return Ability(False, False, f"its cache ({unknown[0]}) is not known to keep padding and drafts apart")
    if key not in found:
        found[key] = _tried(runtime, input_ids, logits)
    return found[key]


def _tried(runtime: TargetRuntime, input_ids: torch.Tensor, logits: torch.Tensor) -> Ability:
    no_trees = runtime.prepare_trees()
    roots = input_ids[:, -1].tolist()
    # Likely tokens are ordinary text, no markers of images or the like.
    likely = logits.topk(min(4, logits.shape[-1]), dim=-1).indices.tolist()
    drafts = [[token for token in row if token != root][:3] for row, root in zip(likely, roots, strict=True)]
    if min(map(len, drafts)) < 3:
        return Ability(False, True, "its vocabulary is too small for a tree")

    runtime.trees = False
    expected = []
    for path in _PATHS:
        tokens = [[root, *(row[place] for place in path)] for root, row in zip(roots, drafts, strict=True)]
        expected.append(_one_by_one(runtime, tokens, input_ids))
    chains = [_chain([root, row[0], row[2]]) for root, row in zip(roots, drafts, strict=True)]
    trees = [
        DraftTree((root, *row), _PARENTS, (0, 1, 1, 2), (0.0,) * 4) for root, row in zip(roots, drafts, strict=True)
    ]
    reason = _misread(runtime, chains, input_ids, [[0, 1, 2]], expected[:1])
    if reason:
        return Ability(False, False, f"several tokens at once are {reason}")
    if not no_trees:
        runtime.trees = True
        reason = _misread(runtime, trees, input_ids, [[0, 1, 3], [0, 2]], expected)
        no_trees = f"the branches of a tree are {reason}" if reason else ""
    return Ability(not no_trees, True, no_trees)


def _is_known(layer: Any) -> bool:
    return type(layer).__module__ == CacheLayerMixin.__module__


def _one_by_one(runtime: TargetRuntime, tokens: Sequence[Sequence[int]], input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, length, V]` of each row's tokens, the root first, every one read in a forward of its own."""
    logits: list[torch.Tensor] = []
    start = runtime.mark()
    with runtime.undone_on_error(ends_call=False):
        for column in zip(*tokens, strict=True):
            if logits:
                input_ids = torch.cat([input_ids, input_ids.new_tensor(column)[:, None]], dim=1)
            logits.append(runtime.verify([DraftTree.root(token) for token in column], input_ids).logits)
    runtime.roll_back(start)
    return torch.cat(logits, dim=1)


def _misread(
    runtime: TargetRuntime,
    drafts: list[DraftTree],
    input_ids: torch.Tensor,
    paths: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
) -> str:
    """How the drafts, read at once, differ from `expected` on `paths`; empty if they do not."""
    start = runtime.mark()
    try:
        with runtime.undone_on_error(ends_call=False):
            logits = runtime.verify(drafts, input_ids).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises, it says that it cannot do this
        lines = str(error).strip().splitlines()
        return f"refused by its forward ({type(error).__name__}: {lines[0][:160] if lines else 'no message'})"
    runtime.roll_back(start)
    distances = torch.cat([_distances(logits[:, path], true) for path, true in zip(paths, expected, strict=True)])
    return "" if _is_rounding(distances, runtime.target.dtype) else "read otherwise than one by one"


def _is_rounding(distances: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether rounding explains relative distances; another token, mask or position is far beyond it."""
    if dtype in (torch.float32, torch.float64):
        return float(distances.max()) <= (1e-4 if torch.get_float32_matmul_precision() == "highest" else 1e-2)
    # In half precision a close call of an expert router may change one position; a wrong mask changes most.
    return float(distances.median()) <= 0.05


def _distances(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance of each row of logits, relative to the spread of the expected one."""
    logits, expected = logits.float(), expected.float()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return ((logits - expected).norm(dim=-1) / spread.clamp(min=1e-12)).flatten()


def _chain(tokens: Sequence[int]) -> DraftTree:
    size = len(tokens)
    return DraftTree(tuple(tokens), tuple(range(-1, size - 1)), tuple(range(size)), (0.0,) * size)
