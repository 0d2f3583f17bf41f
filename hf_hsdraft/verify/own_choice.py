"""Verification by the target's own choice: exact for any tree."""

from __future__ import annotations

from ..core.draft_tree import DraftTree
from .verdict import ChooseToken, Nodes, Verdict, Verifier, walk


class OwnChoice(Verifier):
    """Chooses at each node the token that plain decoding would choose there.

    The drafted children play no part in the choice: they only decide how far one forward reaches. So sampling uses up
    the same random numbers as plain decoding: one draw for each token, and none after the last one.
    """

    exact = True
    own_draws = True

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        return walk(tree, own_choice(nodes), nodes.ends)


def own_choice(nodes: Nodes) -> ChooseToken:
    """Returns the function that chooses the target's own token at a node."""
    if nodes.draw is None and not nodes.processed:
        # `max` takes the first of equal logits, as `argmax` does, and is faster on CPUs.
        choices = nodes.logits.max(dim=-1).indices.tolist()
        return lambda node, tokens: choices[node]

    def choose(node: int, tokens: list[int]) -> int:
        scores = nodes.scores(node, tokens)
        return int(scores.argmax(dim=-1)) if nodes.draw is None else nodes.draw(scores.softmax(dim=-1))

    return choose
