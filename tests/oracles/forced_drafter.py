"""A drafter whose rounds accept as many drafted tokens as a pattern says, whatever the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call, Session
from hf_hsdraft.drafters.base.wrapped_drafter import WrappedDrafter
from hf_hsdraft.drafters.hidden_state.modeling_hsdraft import HSDrafter
from hf_hsdraft.verify.verdict import Nodes, OwnChoice, Verdict, Verifier, own_choice, walk


class ForcedDrafter(WrappedDrafter):
    """A drafter for one call of one text, whose rounds accept as many drafted tokens as given.

    Drafter, target and the rules of the text do all their work. Then a path of that length takes the place of the
    tree's own nodes, and the text follows it.

    Args:
        drafter: drafter that makes the drafts. All its trees have one size, without n-grams.
        accepted: number of drafted tokens to accept, round by round, over and over.

    Attributes:
        times: times when each round began, and when the last one ended.
        path: nodes to accept in the current round.
    """

    def __init__(self, drafter: HSDrafter, accepted: Sequence[int]) -> None:
        super().__init__(drafter)
        self.times: list[float] = []
        self.path: list[int] = []
        self._accepted = accepted

    def session(self, call: Call) -> Session:
        return _ForcedSession(super().session(call), self)

    def verifier(self, options: DraftOptions) -> Verifier:
        return _AlongPath(self.path)

    @property
    def length(self) -> int:
        """Number of drafted tokens to accept in the current round."""
        return self._accepted[(len(self.times) - 1) % len(self._accepted)]


class _ForcedSession(Session):
    """Drafts as another session, and puts a path of the wanted length in the tree."""

    def __init__(self, session: Session, forced: ForcedDrafter) -> None:
        self.free, self.kind = session.free, session.kind
        self._session, self._forced = session, forced

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        [tree] = self._session.draft(asks)
        length = min(self._forced.length, asks[0].depth, len(tree) - 1)
        self._forced.path[:] = range(0, len(tree), max((len(tree) - 1) // max(length, 1), 1))[1 : length + 1]
        return [_along(tree, self._forced.path)]

    def observe(self, news: Sequence[Accepted]) -> None:
        self._forced.times.append(time.perf_counter())
        self._forced.path.clear()
        self._session.observe(news)

    def end(self) -> None:
        self._session.end()


class _AlongPath(OwnChoice):
    """Makes the target's own choice at each node, but then follows a given path. After its end no node is accepted.

    Args:
        path: nodes of the current round's tree.
    """

    def __init__(self, path: Sequence[int]) -> None:
        self._path = path

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        own, children = own_choice(nodes), tree.children()

        def choose(node: int, tokens: list[int]) -> int:
            token = own(node, tokens)
            if len(tokens) < len(self._path):
                return tree.tokens[self._path[len(tokens)]]
            while token in children[node]:
                token = (token + 1) % nodes.logits.shape[-1]
            return token

        return walk(tree, choose, nodes.ends)


def _along(tree: DraftTree, path: Sequence[int]) -> DraftTree:
    """Returns a tree of the same size whose nodes `path` form one path. The other nodes are siblings of these.

    As in drafted trees, the path's nodes are not neighbours, so that a commit has to move them.
    """
    parents, depths, tip, depth = [-1], [0], 0, 0
    for node in range(1, len(tree)):
        parents.append(tip)
        depths.append(depth + 1)
        if node in path:
            tip, depth = node, depth + 1
    tokens = (tree.tokens[0], *range(1, len(tree)))
    return DraftTree(tokens, tuple(parents), tuple(depths), tuple(-float(each) for each in depths))
