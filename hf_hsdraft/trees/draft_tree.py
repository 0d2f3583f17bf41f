"""Draft trees: plain data, and the builders that grow one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a text, as a tree of tokens.

    Node 0 is the root: the last accepted token, which the target has not read yet. Parents stand before their children
    and siblings carry distinct tokens, so every node is one distinct continuation.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent, -1 for the root.
        depths: distance from the root; a node's position in the text is the root's plus its depth.
        scores: log-probability, by the drafter, that the path will be the text; 0 for the root.
        log_probs: only where nodes were sampled: for each node the distribution its children were drawn from without
            replacement, in their order, `[V']`; `None` for nodes without children.
        vocab_ids: only there, `[V']`, int64: the token id of each column of `log_probs`.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]
    log_probs: tuple[torch.Tensor | None, ...] = ()
    vocab_ids: torch.Tensor | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """The tree that drafts nothing."""
        return cls((token,), (-1,), (0,), (0.0,))

    @classmethod
    def idle(cls, token: int) -> DraftTree:
        """What is read for a text that has ended while others go on: in the place of the token before its last one.

        That place exists, also where the text has filled all positions that the target has.
        """
        return cls((token,), (-1,), (-1,), (0.0,))

    def children(self) -> list[dict[int, int]]:
        """For each node, its children: token id to node index."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            children[self.parents[node]][self.tokens[node]] = node
        return children

    def path(self, node: int) -> list[int]:
        """Node indices from the root's child down to `node`; empty for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def first_probability(self) -> float:
        """Returns the probability that the next token is in the tree, as far as the scores tell it."""
        return min(sum(math.exp(s) for s, depth in zip(self.scores, self.depths, strict=True) if depth == 1), 1.0)

    def expected_length(self) -> float:
        """Drafted tokens that are accepted on average, as far as the scores are the probabilities of that."""
        return sum(math.exp(score) for score in self.scores[1:])

    def first(self, size: int) -> DraftTree:
        """Its `size` most probable nodes beside the root; of equals the ones that come first."""
        ranked = sorted(range(1, len(self)), key=lambda node: -self.scores[node])
        return self if size >= len(self) - 1 else self.part({0, *ranked[:size]})

    def part(self, kept: set[int]) -> DraftTree:
        """The tree of some of its nodes, with the root and the parent of each of them.

        It has no `log_probs`: of drawn nodes a part is not a draw.
        """
        nodes = sorted(kept)
        place = {old: new for new, old in enumerate(nodes)}
        return _from_nodes(
            [(self.tokens[n], place.get(self.parents[n], -1), self.depths[n], self.scores[n]) for n in nodes]
        )

    def ancestor_mask(self) -> list[list[bool]]:
        """`[nodes][nodes]`: True where the row's node may see the column's, its ancestors and itself."""
        rows = [[True] + [False] * (len(self) - 1)]
        for node in range(1, len(self)):
            rows.append(rows[self.parents[node]].copy())
            rows[node][node] = True
        return rows


def certainty(trees: Sequence[DraftTree]) -> float:
    """Returns the probability that the next token of a text is in its tree, on average; 0 for no trees."""
    return math.fsum(tree.first_probability() for tree in trees) / max(len(trees), 1)


# Maps (depth of the new nodes, parents' tokens [B, n], parents' states [B, n, S]) to the log-probabilities of the
# children, [B, n, V'], and the states after reading the parents' tokens. States are None at the root.
Expand = Callable[[int, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]

# Maps the same and the nodes' scores [B, n] to the k most probable children of all the nodes, the best first: their
# scores [B, k], tokens [B, k] and parents [B, k], as columns of the nodes, and the nodes' states.
BestChildren = Callable[
    [int, torch.Tensor, torch.Tensor | None, torch.Tensor, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]


def best_children(expand: Expand, vocab_ids: torch.Tensor) -> BestChildren:
    """The best children by all their log-probabilities.

    Args:
        vocab_ids: `[V']`, int64, token ids behind the columns of `expand`.
    """

    def best(
        level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        log_probs, states = expand(level, tokens, states)
        totals = (scores[..., None] + log_probs).flatten(1)
        values, places = totals.topk(min(count, totals.shape[1]))
        return values, vocab_ids[places % len(vocab_ids)], places // len(vocab_ids), states

    return best


def build_beam_trees(
    best: BestChildren,
    root_tokens: torch.Tensor,
    *,
    depth: int,
    beam_width: int,
    tree_size: int,
    threshold: float = 0.0,
    max_depths: Sequence[int] | None = None,
) -> list[DraftTree]:
    """Grows a tree for each sequence of a batch by beam search on cumulative probability (Lyanna; EAGLE-2, 4.1).

    Each depth expands the `beam_width` most probable nodes of the one before. Of all candidates seen, the `tree_size`
    most probable stay: a child is never more probable than its parent, so what stays is a tree. Children are not
    limited to the beam's width: where the drafter is unsure, many siblings of the root are worth more than deep paths.

    Args:
        best: gives the best children of nodes.
        root_tokens: `[B]`, int64, the last accepted token of each sequence.
        depth: greatest depth, 1 or more.
        beam_width: nodes expanded per depth; 1 gives a chain.
        tree_size: nodes beside the root.
        threshold: paths less probable than this are left out, 0 to 1.
        max_depths: greatest depth of each sequence, where some should end before `depth`.
    """
    nodes = root_tokens[:, None]
    batch = torch.arange(len(nodes), device=nodes.device)[:, None]
    scores = torch.zeros_like(nodes, dtype=torch.float32)
    states: torch.Tensor | None = None
    levels = []
    beam = torch.zeros_like(nodes)  # index of each beam node among all candidates, plus one
    count = 0
    for level in range(1, depth + 1):
        # No more than that many can stay of a level; the first of them are the next beam.
        scores, tokens, parents, states = best(level, nodes, states, scores, 1 if beam_width == 1 else tree_size)
        levels.append((tokens, beam.gather(1, parents), torch.full_like(tokens, level), scores))
        if level == depth:
            break
        width, found = min(beam_width, tokens.shape[1]), tokens.shape[1]
        nodes, scores, states = tokens[:, :width], scores[:, :width], states[batch, parents[:, :width]]
        beam = torch.arange(count + 1, count + width + 1, device=nodes.device).expand_as(nodes)
        count += found
    tokens, parents, depths, scores = (torch.cat(column, dim=1) for column in zip(*levels, strict=True))
    return _best_nodes(root_tokens.tolist(), tokens, parents, depths, scores, tree_size, threshold, max_depths)


def _best_nodes(
    root_tokens: Sequence[int],
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    tree_size: int,
    threshold: float,
    max_depths: Sequence[int] | None,
) -> list[DraftTree]:
    """Of each row of candidates the `tree_size` most probable as a tree."""
    if max_depths is not None and int(depths[0, -1]) > min(max_depths):
        scores = scores.masked_fill(depths > scores.new_tensor(max_depths)[:, None], -math.inf)
    # Ties go to the earlier candidate, which is the parent: a probability of exactly 1 must not orphan a child.
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :tree_size].sort(dim=1).values
    picked = torch.stack([order, tokens.gather(1, order), parents.gather(1, order), depths.gather(1, order)], dim=-1)
    floor = math.log(threshold) if threshold > 0 else -math.inf
    trees = []
    for root_token, row, row_scores in zip(root_tokens, picked.tolist(), scores.gather(1, order).tolist(), strict=True):
        index_of = {0: 0}
        nodes: list[tuple[int, int, int, float]] = [(root_token, -1, 0, 0.0)]
        for (candidate, token, parent, depth), score in zip(row, row_scores, strict=True):
            if score < floor or score == -math.inf or parent not in index_of:
                continue
            index_of[candidate + 1] = len(nodes)
            nodes.append((token, index_of[parent], depth, score))
        trees.append(_from_nodes(nodes))
    return trees


def merge_trees(first: DraftTree, second: DraftTree, tree_size: int) -> DraftTree:
    """The union of two trees with the same root, cut to its `tree_size` most probable nodes.

    A token found in both keeps the better of the two probabilities that it has after its parent; what follows it in
    either gains by that too. No child outranks its parent.

    Raises:
        ValueError: the roots differ.
    """
    if first.tokens[0] != second.tokens[0]:
        raise ValueError(f"trees with different roots cannot be merged: {first.tokens[0]} and {second.tokens[0]}")
    nodes: list[tuple[int, int, int]] = [(first.tokens[0], -1, 0)]  # token, parent, depth
    steps = [0.0]  # log-probability of each node after its parent
    place: dict[tuple[int, int], int] = {}
    for tree in (first, second):
        mapped = [0] * len(tree)
        for index in range(1, len(tree)):
            key = mapped[tree.parents[index]], tree.tokens[index]
            step = tree.scores[index] - tree.scores[tree.parents[index]]
            if key not in place:
                place[key] = len(nodes)
                nodes.append((key[1], key[0], tree.depths[index]))
                steps.append(step)
            mapped[index] = place[key]
            steps[place[key]] = max(steps[place[key]], step)
    scores = [0.0]
    for (_, parent, _), step in zip(nodes[1:], steps[1:], strict=True):
        scores.append(scores[parent] + step)
    ranked = sorted(range(1, len(nodes)), key=lambda index: (-scores[index], nodes[index][2], index))
    kept = [0, *sorted(ranked[:tree_size], key=lambda index: (nodes[index][2], index))]
    renumbered = {old: new for new, old in enumerate(kept)}
    return _from_nodes([(nodes[old][0], renumbered.get(nodes[old][1], -1), nodes[old][2], scores[old]) for old in kept])


def _from_nodes(nodes: Sequence[tuple[int, int, int, float]]) -> DraftTree:
    tokens, parents, depths, scores = zip(*nodes, strict=True)
    return DraftTree(tokens, parents, depths, scores)
