"""Trees of sampled nodes, for verification by rejection without replacement.

Where a beam takes the most probable continuations, these draw them from the drafter's distribution, so that a verifier
may use that distribution. Siblings are drawn without replacement, in their order. Nothing is pruned afterwards: leaving
sampled nodes out by their probability would bias the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .draft_tree import DraftTree, Expand


def build_gumbel_trees(
    expand: Expand,
    root_tokens: torch.Tensor,
    vocab_ids: torch.Tensor,
    *,
    branching: Sequence[int],
    max_depths: Sequence[int] | None = None,
) -> list[DraftTree]:
    """Draws a fixed number of children for every node (RSD-C: "Recursive Speculative Decoding", section 3.2).

    Gumbel noise on the log-probabilities makes the greatest k of them k draws without replacement, in order.

    Args:
        expand: gives the children's log-probabilities.
        root_tokens: `[B]`, int64, the last accepted token of each sequence.
        vocab_ids: `[V']`, int64, token ids behind the columns.
        branching: children of each node, depth by depth.
        max_depths: greatest depth of each sequence, where some should end earlier.
    """
    growth = _Growth(root_tokens, vocab_ids, max_depths)
    for level, width in enumerate(branching, 1):
        log_probs = growth.expanded(expand, level)
        drawn = (log_probs + gumbel_like(log_probs)).topk(min(width, log_probs.shape[-1]), dim=-1)
        growth.grow(log_probs, drawn.indices, drawn.values > -torch.inf)
    return growth.trees()


def build_stochastic_beam_trees(
    expand: Expand,
    root_tokens: torch.Tensor,
    vocab_ids: torch.Tensor,
    *,
    depth: int,
    beam_width: int,
    max_depths: Sequence[int] | None = None,
) -> list[DraftTree]:
    """Draws `beam_width` whole paths without replacement at each depth (RSD-S, section 3.2; stochastic beam search).

    Each path has a perturbed log-probability, a Gumbel variable around its log-probability; a node's children take
    theirs such that the greatest of them equals the node's own. The beam keeps the greatest. Whether a further child of
    a node stays depends on its perturbed value, which says nothing of who it is once its elder siblings are known: they
    remain draws without replacement, so the same verification is exact.

    Args:
        depth: greatest depth.
        beam_width: nodes kept at each depth.
        expand, root_tokens, vocab_ids, max_depths: see `build_gumbel_trees`.
    """
    growth = _Growth(root_tokens, vocab_ids, max_depths)
    device = vocab_ids.device
    totals = torch.zeros(len(root_tokens), 1, device=device)
    perturbed = torch.zeros(len(root_tokens), 1, device=device)
    for level in range(1, depth + 1):
        log_probs = growth.expanded(expand, level)
        paths = totals[:, :, None] + log_probs
        noisy = _conditioned(paths + gumbel_like(paths), perturbed)
        values, chosen = noisy.flatten(1).topk(min(beam_width, noisy.shape[1] * noisy.shape[2]))
        parents, columns = chosen // log_probs.shape[-1], chosen % log_probs.shape[-1]
        growth.keep(log_probs, parents, columns, values > -torch.inf)
        totals, perturbed = paths.flatten(1).gather(1, chosen), values
    return growth.trees()


def branching_for(depth: int, tree_size: int) -> tuple[int, ...]:
    """Children per node, depth by depth, that use up to `tree_size` nodes: as many as fit, evenly, the root's first."""
    branching = [1] * min(depth, tree_size)
    level = 0
    while level < len(branching):
        branching[level] += 1
        if _nodes(branching) > tree_size:
            branching[level] -= 1
            break
        level = (level + 1) % len(branching)
    return tuple(branching)


def _nodes(branching: Sequence[int]) -> int:
    total, level = 0, 1
    for width in branching:
        level *= width
        total += level
    return total


def gumbel_like(x: torch.Tensor) -> torch.Tensor:
    """Independent standard Gumbel noise of the shape of `x`."""
    return -torch.empty_like(x).exponential_().log()


def _conditioned(noisy: torch.Tensor, greatest: torch.Tensor) -> torch.Tensor:
    """Moves perturbed values `[B, n, V']` such that the greatest of each row is `greatest` `[B, n]`.

    The numerically stable form of "Stochastic Beams and Where to Find Them", appendix B.3.
    """
    maximum = noisy.max(dim=-1, keepdim=True).values
    v = greatest[..., None] - noisy + torch.log1p(-torch.exp(noisy - maximum))
    moved = greatest[..., None] - v.clamp(min=0.0) - torch.log1p(torch.exp(-v.abs()))
    moved = torch.where(noisy == maximum, greatest[..., None].expand_as(moved), moved)
    return moved.masked_fill(noisy == -torch.inf, -torch.inf).masked_fill(greatest[..., None] == -torch.inf, -torch.inf)


class _Growth:
    """Trees of a batch while they grow level by level; all have the same number of nodes until they are read out."""

    def __init__(self, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, max_depths: Sequence[int] | None) -> None:
        self._vocab_ids = vocab_ids
        self._batch = torch.arange(len(root_tokens), device=vocab_ids.device)[:, None]
        self._max_depths = max_depths
        self._tokens = root_tokens[:, None]
        self._states: torch.Tensor | None = None
        self._alive = torch.ones_like(self._tokens, dtype=torch.bool)
        self._scores = torch.zeros_like(self._tokens, dtype=torch.float32)
        roots = torch.full_like(self._tokens, -1)
        self._levels = [(self._tokens, roots, self._scores, self._alive)]
        self._log_probs: list[torch.Tensor] = []

    def expanded(self, expand: Expand, level: int) -> torch.Tensor:
        log_probs, self._states = expand(level, self._tokens, self._states)
        return log_probs

    def grow(self, log_probs: torch.Tensor, columns: torch.Tensor, valid: torch.Tensor) -> None:
        """Gives every node of the last level the children in `columns` `[B, n, k]`."""
        parents = torch.arange(columns.shape[1], device=columns.device)[None, :, None].expand_as(columns)
        self.keep(log_probs, parents.flatten(1), columns.flatten(1), valid.flatten(1))

    def keep(self, log_probs: torch.Tensor, parents: torch.Tensor, columns: torch.Tensor, valid: torch.Tensor) -> None:
        """Makes `columns` `[B, m]` of nodes `parents` `[B, m]` the next level, siblings in the order of drawing."""
        assert self._states is not None
        self._alive = valid & self._alive.gather(1, parents)
        self._scores = self._scores.gather(1, parents) + log_probs[self._batch, parents, columns]
        self._tokens = self._vocab_ids[columns]
        self._states = self._states[self._batch, parents]
        self._log_probs.append(log_probs)
        self._levels.append((self._tokens, parents, self._scores, self._alive))

    def trees(self) -> list[DraftTree]:
        levels = [[part.tolist() for part in level] for level in self._levels]
        return [self._tree(row, levels) for row in range(len(self._batch))]

    def _tree(self, row: int, levels: list[list[list[list[float]]]]) -> DraftTree:
        limit = len(levels) - 1 if self._max_depths is None else self._max_depths[row]
        nodes: list[tuple[int, int, int, float]] = []
        log_probs: list[torch.Tensor | None] = []
        above: list[int] = []
        for depth, (tokens, parents, scores, alive) in enumerate(levels[: limit + 1]):
            here = []
            for place, token in enumerate(tokens[row]):
                parent = above[int(parents[row][place])] if depth else -1
                if not alive[row][place] or (depth and parent < 0):
                    here.append(-1)
                    continue
                here.append(len(nodes))
                nodes.append((int(token), parent, depth, scores[row][place]))
                expanded = depth < len(self._log_probs) and depth < limit
                log_probs.append(self._log_probs[depth][row, place] if expanded else None)
            above = here
        node_tokens, node_parents, depths, node_scores = zip(*nodes, strict=True)
        return DraftTree(node_tokens, node_parents, depths, node_scores, tuple(log_probs), self._vocab_ids)
