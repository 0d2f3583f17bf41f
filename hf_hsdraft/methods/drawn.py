"""Trees of drawn nodes, and their verification by rejection without replacement ("Recursive Speculative Decoding").

A beam takes the most probable children. These builders draw them from the drafter's distribution, so that a verifier
may use that distribution. Children of one node are drawn without replacement, and stay in the order of drawing. No
drawn node is dropped afterwards by its probability: that would bias the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from operator import mul

import torch

from ..core.draft_tree import TREE_BUILDERS, Builder, DraftTree, Expansion, TreeLimits, from_nodes, states_of
from ..verify.registry import VERIFIERS
from ..verify.verdict import Nodes, OwnChoice, Verdict, Verifier, draw_token, walk


def gumbel_trees(
    expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> list[DraftTree]:
    """Draws equally many children for each node of a depth (RSD-C: "Recursive Speculative Decoding", section 3.2).

    With Gumbel noise on the log-probabilities, the greatest k are k draws without replacement, in order. A
    `TreeBuilder`; a chain is drawn as `stochastic_beam_trees` draws one path.
    """
    if limits.beam_width == 1:
        return stochastic_beam_trees(expansion, root_tokens, vocab_ids, limits)
    growth = _Growth(expansion, root_tokens, vocab_ids)
    for width in branching_for(expansion.depth, limits.tree_size):
        log_probs = growth.expand()
        drawn = (log_probs + gumbel_like(log_probs)).topk(min(width, log_probs.shape[-1]), dim=-1)
        parents = torch.arange(log_probs.shape[1], device=log_probs.device)[:, None].expand_as(drawn.indices)
        growth.add(parents.flatten(1), drawn.indices.flatten(1), drawn.values.flatten(1) > -torch.inf)
    return growth.trees(limits.max_depths)


def stochastic_beam_trees(
    expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor, limits: TreeLimits
) -> list[DraftTree]:
    """Draws whole paths without replacement, `beam_width` at each depth (RSD-S, section 3.2; stochastic beam search).

    Each path has a perturbed log-probability: a Gumbel variable around its log-probability. The greatest perturbed
    value of a node's children equals the node's own. The beam keeps the greatest values of all. Whether a further child
    of a node is kept depends on its value alone, not on its token, once its elder siblings are known. So the children
    are draws without replacement here too, and the same verification is exact. A `TreeBuilder`.
    """
    width = min(limits.beam_width, limits.tree_size)
    growth = _Growth(expansion, root_tokens, vocab_ids)
    perturbed = torch.zeros_like(growth.scores)
    for _ in range(min(expansion.depth, limits.tree_size // width)):
        log_probs = growth.expand()
        paths = growth.scores[:, :, None] + log_probs
        noisy = _conditioned(paths + gumbel_like(paths), perturbed)
        perturbed, chosen = noisy.flatten(1).topk(min(width, noisy[0].numel()))
        growth.add(chosen // log_probs.shape[-1], chosen % log_probs.shape[-1], perturbed > -torch.inf)
    return growth.trees(limits.max_depths)


def branching_for(depth: int, tree_size: int) -> tuple[int, ...]:
    """Returns the children of each node by depth, as many and as even as `tree_size` allows, the root's first."""
    branching = [1] * min(depth, tree_size)
    for level in cycle(range(len(branching))):
        branching[level] += 1
        if sum(accumulate(branching, mul)) > tree_size:
            branching[level] -= 1
            break
    return tuple(branching)


def gumbel_like(x: torch.Tensor) -> torch.Tensor:
    return -torch.empty_like(x).exponential_().log()


def _conditioned(noisy: torch.Tensor, greatest: torch.Tensor) -> torch.Tensor:
    """Moves perturbed values `[B, n, V']` so that the greatest of each row is `greatest` `[B, n]`.

    The numerically stable form of "Stochastic Beams and Where to Find Them", appendix B.3.
    """
    greatest = greatest[..., None]
    maximum = noisy.max(dim=-1, keepdim=True).values
    v = greatest - noisy + torch.log1p(-torch.exp(noisy - maximum))
    moved = greatest - v.clamp(min=0.0) - torch.log1p(torch.exp(-v.abs()))
    moved = torch.where(noisy == maximum, greatest.expand_as(moved), moved)
    return moved.masked_fill(noisy == -torch.inf, -torch.inf).masked_fill(greatest == -torch.inf, -torch.inf)


class _Growth:
    """The trees of a batch while they grow by level. All have equally many nodes, of which some are void."""

    def __init__(self, expansion: Expansion, root_tokens: torch.Tensor, vocab_ids: torch.Tensor) -> None:
        self._expansion, self._vocab_ids = expansion, vocab_ids
        self._batch = torch.arange(len(root_tokens), device=vocab_ids.device)[:, None]
        self._tokens = root_tokens[:, None]
        self._states: torch.Tensor | None = None
        self._real = torch.ones_like(self._tokens, dtype=torch.bool)
        self.scores = torch.zeros_like(self._tokens, dtype=torch.float32)  # `[B, n]`, of paths to the last level
        self._levels = [(self._tokens, torch.full_like(self._tokens, -1), self.scores, self._real)]
        self._log_probs: list[torch.Tensor] = []  # `[B, n, V']`, by which the next level was drawn

    def expand(self) -> torch.Tensor:
        """Returns the log-probabilities `[B, n, V']` of the children of the last level's nodes."""
        log_probs, self._states = self._expansion(len(self._levels), self._tokens, self._states)
        log_probs = log_probs.expand(-1, self._tokens.shape[1], -1)
        self._log_probs.append(log_probs)
        return log_probs

    def add(self, parents: torch.Tensor, columns: torch.Tensor, real: torch.Tensor) -> None:
        """Adds the next level.

        Args:
            parents: `[B, m]`, int64, the parent of each node as a column of the last level.
            columns: `[B, m]`, int64, column of each node in `vocab_ids`. Siblings stand in the order of drawing.
            real: `[B, m]`, False where a node is void, because its parent had no further child to draw.
        """
        self._real = real & self._real.gather(1, parents)
        self.scores = self.scores.gather(1, parents) + self._log_probs[-1][self._batch, parents, columns]
        self._tokens, self._states = self._vocab_ids[columns], states_of(self._states, parents)
        self._levels.append((self._tokens, parents, self.scores, self._real))

    def trees(self, max_depths: Sequence[int]) -> list[DraftTree]:
        levels = [[part.tolist() for part in level] for level in self._levels]
        return [self._tree(row, levels[: depth + 1]) for row, depth in enumerate(max_depths)]

    def _tree(self, row: int, levels: list[list[list]]) -> DraftTree:
        """A text's tree from each level's tokens, parents, scores and real nodes."""
        nodes: list[tuple[int, int, int, float]] = []
        log_probs: list[torch.Tensor | None] = []
        above: list[int] = []  # indices in the tree of the nodes of the level above
        for depth, level in enumerate(levels):
            indices = []
            for column, (token, parent, score, real) in enumerate(zip(*(part[row] for part in level), strict=True)):
                indices.append(len(nodes) if real else -1)
                if real:
                    nodes.append((token, above[parent] if depth else -1, depth, score))
                    log_probs.append(self._log_probs[depth][row, column] if depth < len(levels) - 1 else None)
            above = indices
        return replace(from_nodes(nodes), log_probs=tuple(log_probs), vocab_ids=self._vocab_ids)


class Rejection(Verifier):
    """Offers the children of a node to the target in the order in which the drafter drew them.

    p is the target's distribution and q the drafter's. A child is accepted with probability min(1, p / q). After a
    rejection, p becomes the normalised positive part of p - q, and q loses the rejected token. After the last child the
    next token is drawn from p. This accepts more drafted tokens than the target's own draw, above all at high
    temperature. It is exact for drawn trees only. Greedy calls take the target's own choice.
    """

    exact = True
    own_choices = True
    drawn_nodes = True

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        if nodes.draw is None:
            return OwnChoice().judge(tree, nodes)
        children = tree.children()

        def choose(node: int, tokens: list[int]) -> int:
            p = nodes.scores(node, tokens)[0].softmax(dim=-1)
            return _draw(p, children[node], tree.log_probs[node] if children[node] else None, tree.vocab_ids)

        return walk(tree, choose, nodes.ends)


def _draw(
    p: torch.Tensor, children: Iterable[int], log_probs: torch.Tensor | None, vocab_ids: torch.Tensor | None
) -> int:
    """Draws the next token: an accepted child, or another token.

    Args:
        p: `[V]`, the target's probabilities.
        children: tokens of the children, in the order of drawing.
        log_probs: `[V']`, log q; `None` without children. Tokens outside `vocab_ids` have q = 0.
        vocab_ids: `[V']`, int64, the token id of each column of `log_probs`.
    """
    if log_probs is not None and vocab_ids is not None:
        q = torch.zeros_like(p)
        q[vocab_ids.to(p.device)] = log_probs.to(p.device, p.dtype).exp()
        for token in children:
            if float(torch.rand((), device=p.device)) * float(q[token]) < float(p[token]):
                return token
            left = (p - q).clamp(min=0.0)
            total = left.sum()
            if total > 0:  # 0 only by rounding, where p and q are equal
                p = left / total
            q[token] = 0.0
            q = q / q.sum().clamp(min=torch.finfo(q.dtype).tiny)
    return draw_token(p)


VERIFIERS["rejection"] = Rejection()
TREE_BUILDERS["gumbel"] = Builder(gumbel_trees, draws=True)
TREE_BUILDERS["stochastic_beam"] = Builder(stochastic_beam_trees, draws=True)
