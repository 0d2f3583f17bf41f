"""What a target can do, found out by trying: whether it reads a draft at once as it reads its paths token by token.

No list of architectures could say that. So before the first draft a few tokens are read after the prompt in each way
that drafting would use, compared with reading them one at a time, and taken back. What was found is remembered for as
long as the target lives. It counts for texts up to some length, see `known_until`, and longer ones are tried again:
a target may read them otherwise, for instance where it drops keys.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..trees.draft_tree import DraftTree
from .target_limits import cache_layers, known_until, layer_class, text_config
from .target_runtime import TargetRuntime

# Tokens a, b, c after the root: a and b follow it, c follows a. As a tree in the order a, b, c.
_PARENTS = (-1, 0, 0, 1)
_CHAIN, _BRANCH = (0, 2, 1), (1,)  # root-a-c, then b; and root-b: as places in (a, b, c)
PROBE_DEPTH = 3
PROBE_COLUMNS = len(_PARENTS)
_ATTEMPTS = 4
# Of logits in half precision, relative to their spread: SmolLM2-135M in bfloat16 comes to 0.12 at most.
_ROUNDING = 0.15


@dataclass(frozen=True)
class Ability:
    """What a target was found to do.

    Attributes:
        trees, chains: drafts it reads rightly.
        reason: why it reads no trees, or no drafts at all.
        unclear: whether other tokens might tell more; no trees until then.
        tried: length of the longest text that it was found with.
        until: length of text up to which that counts.
    """

    trees: bool
    chains: bool
    reason: str = ""
    unclear: bool = False
    tried: int = 0
    until: int = sys.maxsize


# By the kind of a call; one for trees and one for chains alone, which may have been found at other lengths.
_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], dict[bool, Ability]]] = weakref.WeakKeyDictionary()


def known_ability(runtime: TargetRuntime, doubling: bool = True) -> Ability | None:
    """What is known of the target of a call, for calls of its kind and length; `None` if it has to be tried.

    Args:
        doubling: see `known_until`.
    """
    unknown = [type(layer).__name__ for layer in cache_layers(runtime.cache) if not _is_known(layer)]
    if unknown and runtime.attended is not None:
        return Ability(False, False, f"its cache ({unknown[0]}) is not known to keep padding and drafts apart")
    found = _known.get(runtime.target, {}).get(kind_of_call(runtime), {}).values()
    for ability in sorted(found, key=lambda ability: ability.tried):
        until = known_until(runtime.target, ability.tried, doubling)
        if any(ability.tried < other.tried <= until for other in found):  # another one was found sooner than that
            until = ability.tried
        if runtime.length + 1 <= until:
            return replace(ability, until=until)
    return None


def tried_ability(
    runtime: TargetRuntime,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    ragged: bool = False,
    doubling: bool = True,
) -> Ability:
    """Tries what the target of a call can do, and remembers it; but no refusal, which may be the call's own fault.

    In half precision a misreading may be as small as rounding for some tokens: others are tried until it is clear.

    Args:
        input_ids: `[B, length]`, the texts with their last token, which the target has not read yet.
        logits: `[B, V]`, whose likeliest tokens are read; those that the last token was chosen from will do.
        ragged: the rows may be at different lengths, where only trees can be read.
        doubling: see `known_until`.
    """
    ability = _tried(runtime, input_ids, logits, 0, ragged)
    for attempt in range(1, _ATTEMPTS):
        if not ability.unclear:
            break
        ability = _tried(runtime, input_ids, logits, attempt, ragged)
    length = runtime.length + 1
    if ability.chains:
        found = _known.setdefault(runtime.target, {}).setdefault(kind_of_call(runtime), {})
        before = found.get(ability.trees)
        found[ability.trees] = replace(ability, tried=max(length, before.tried if before else 0))
    return replace(ability, tried=length, until=known_until(runtime.target, length, doubling))


def tried_again(runtime: TargetRuntime, input_ids: torch.Tensor, ragged: bool) -> Ability:
    """The same in the middle of a call; the tokens to read are found by reading the last ones once more.

    Args:
        input_ids: `[B, length]`, the texts as they are now, of the rows that are read.
        ragged: see `tried_ability`.
    """
    runtime = runtime.apart()
    runtime.trees = ragged
    logits = _one_by_one(runtime, input_ids[:, -1:].tolist(), input_ids)[:, -1]
    return tried_ability(runtime, input_ids, logits, ragged)


def kind_of_call(runtime: TargetRuntime) -> tuple[Any, ...]:
    """All that what a target can do may depend on."""
    target = runtime.target
    layers = tuple(layer_class(layer).__name__ for layer in cache_layers(runtime.cache))
    attention = text_config(target)._attn_implementation
    cast = torch.is_autocast_enabled(target.device.type)
    rows = runtime.num_texts > 1
    return attention, target.dtype, target.device, target.training, cast, layers, rows, runtime.attended is not None


def _is_known(layer: Any) -> bool:
    return layer_class(layer).__module__ == CacheLayerMixin.__module__


def _tried(
    runtime: TargetRuntime, input_ids: torch.Tensor, logits: torch.Tensor, attempt: int, ragged: bool
) -> Ability:
    runtime = runtime.apart()
    no_trees = runtime.prepare_trees()
    roots = input_ids[:, -1].tolist()
    # Likely tokens are ordinary text, no markers of images or the like.
    likely = logits.topk(min(4 + 3 * attempt, logits.shape[-1]), dim=-1).indices.tolist()
    drafts = [[token for token in row if token != root][-3:] for row, root in zip(likely, roots, strict=True)]
    if min(map(len, drafts)) < 3:
        return Ability(False, True, "its vocabulary is too small for a tree")

    runtime.trees = ragged
    rows = list(zip(roots, drafts, strict=True))
    chain, branch = (
        _one_by_one(runtime, [[root, *(row[place] for place in path)] for root, row in rows], input_ids)
        for path in (_CHAIN, _BRANCH)
    )
    nexts = [row[_CHAIN[2]] for row in drafts]
    # Ragged rows have no chains: there a tree is read even where it has one path.
    chains = [_chain([root, row[0], row[2]]) for root, row in rows]
    trial = _Trial(runtime, input_ids, chains, [1, 2], nexts)
    problem = trial.problem([([0, 1, 2], chain[:, :3])], chain[:, 3:])
    if problem:
        return Ability(False, False, f"several tokens at once are {problem}")
    if no_trees:
        return Ability(False, True, no_trees)
    runtime.trees = True
    scores = (0.0,) * 4
    trees = [DraftTree((root, *row), _PARENTS, (0, 1, 1, 2), scores) for root, row in rows]
    trial = _Trial(runtime, input_ids, trees, [1, 3], nexts)
    # In half precision each of these decides by itself: a target deaf to masks misreads c and b only.
    problem = trial.problem([([0, 1], chain[:, :2]), ([3], chain[:, 2:3]), ([2], branch[:, 1:])], chain[:, 3:])
    if not problem and logits.element_size() < 4:
        heeded = _heeds_trees(runtime, input_ids, trees, {3: chain[:, 2], 2: branch[:, 1]})
        if heeded is None:
            return Ability(False, True, f"what its masks change drowns in the rounding of {logits.dtype}", unclear=True)
        problem = "" if heeded else "read otherwise than one by one"
    return Ability(not problem, True, f"the branches of a tree are {problem}" if problem else "")


def _heeds_trees(
    runtime: TargetRuntime, input_ids: torch.Tensor, trees: list[DraftTree], true: dict[int, torch.Tensor]
) -> bool | None:
    """Whether nodes are read as on their own paths rather than as a target would that does not heed masks or positions.

    Such a target is played by the same forward: with the nodes in one line, and with a position for each slot.

    Args:
        true: logits `[B, V]` of nodes whose reading would be another, read one by one.

    Returns:
        `None` if masks make no difference here that rounding could not make.
    """
    line = tuple(range(-1, len(_PARENTS) - 1))
    seen, in_line, by_slot = (
        _read(runtime, kind, input_ids)
        for kind in (
            trees,
            [replace(tree, parents=line) for tree in trees],
            [replace(tree, depths=tuple(range(len(tree)))) for tree in trees],
        )
    )
    heeded: bool | None = None
    for node, expected in true.items():
        own = _distances(seen[:, node], expected)
        for fault, must_show in ((in_line, True), (by_slot, False)):  # not every model has positions
            other = _distances(fault[:, node], expected)
            nearer = own <= 0.5 * other
            if bool((~nearer & (other > 2 * _ROUNDING)).any()):
                return False
            if must_show and bool((nearer & (other > _ROUNDING)).any()):
                heeded = True
    return heeded


def _read(runtime: TargetRuntime, trees: list[DraftTree], input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, nodes, V]` of trees, of which nothing is kept."""
    start = runtime.mark(before_commit=True)
    try:
        return runtime.verify(trees, input_ids).logits
    finally:
        runtime.restore(start)


@dataclass
class _Trial:
    """Reads drafts at once, keeps one path of them, reads on, and puts the cache back.

    Attributes:
        drafts: a draft for each row; path: the nodes that are kept; nexts: the token read after them, by row.
    """

    runtime: TargetRuntime
    input_ids: torch.Tensor
    drafts: list[DraftTree]
    path: list[int]
    nexts: list[int]

    def problem(self, expected: Sequence[tuple[list[int], torch.Tensor]], after: torch.Tensor) -> str:
        """How it differs from reading one by one, `expected` by nodes and `after` the path; empty if nowhere."""
        runtime = self.runtime.apart()
        start = runtime.mark(before_commit=True)
        try:
            logits = runtime.verify(self.drafts, self.input_ids).logits
            runtime.commit(self.drafts, [self.path] * len(self.drafts))
            pairs = zip(self.drafts, self.nexts, strict=True)
            kept = [[*(tree.tokens[node] for node in self.path), token] for tree, token in pairs]
            ids = torch.cat([self.input_ids, self.input_ids.new_tensor(kept)], dim=1)
            further = runtime.verify([DraftTree.root(token) for token in self.nexts], ids).logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model's own code raises, it says that it cannot do this
            lines = str(error).strip().splitlines()
            return f"refused by its forward ({type(error).__name__}: {lines[0][:160] if lines else 'no message'})"
        finally:
            runtime.restore(start)
        compared = [*((logits[:, nodes], true) for nodes, true in expected), (further, after)]
        right = all(_is_rounding(_distances(seen, true), seen.dtype) for seen, true in compared)
        return "" if right else "read otherwise than one by one"


def _one_by_one(runtime: TargetRuntime, tokens: Sequence[Sequence[int]], input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, length, V]` of each row's tokens, the root first, every one read in a forward of its own."""
    logits: list[torch.Tensor] = []
    runtime = runtime.apart()
    start = runtime.mark(before_commit=True)
    try:
        for column in zip(*tokens, strict=True):
            if logits:
                input_ids = torch.cat([input_ids, input_ids.new_tensor(column)[:, None]], dim=1)
            roots = [DraftTree.root(token) for token in column]
            logits.append(runtime.verify(roots, input_ids).logits)
            runtime.commit(roots, [[]] * len(roots))
    finally:
        runtime.restore(start)
    return torch.cat(logits, dim=1)


def _is_rounding(distances: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether rounding explains relative distances; another token, mask or position is far beyond it."""
    if dtype in (torch.float32, torch.float64):
        return float(distances.max()) <= (1e-4 if torch.get_float32_matmul_precision() == "highest" else 1e-2)
    # In half precision a close call of an expert router may change one position.
    return float(distances.median()) <= _ROUNDING


def _distances(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance of each row of logits, relative to the spread of the expected ones; infinite if not comparable."""
    floor = torch.finfo(logits.dtype).min / 2  # some models mask tokens by the least number there is, or less
    logits, expected = logits.float(), expected.float()
    ruled_out = [~(x > floor) for x in (logits, expected)]
    count = (~ruled_out[1]).sum(dim=-1, keepdim=True).clamp(min=1)
    kept = expected.masked_fill(ruled_out[1], 0.0)
    spread = (kept - kept.sum(dim=-1, keepdim=True) / count).masked_fill(ruled_out[1], 0.0).norm(dim=-1)
    distance = (logits.masked_fill(ruled_out[0], 0.0) - kept).norm(dim=-1) / spread.clamp(min=1e-12)
    same = (ruled_out[0] == ruled_out[1]).all(dim=-1) & distance.isfinite()
    return distance.masked_fill(~same, float("inf")).flatten()


def _chain(tokens: Sequence[int]) -> DraftTree:
    size = len(tokens)
    return DraftTree(tuple(tokens), tuple(range(-1, size - 1)), tuple(range(size)), (0.0,) * size)
