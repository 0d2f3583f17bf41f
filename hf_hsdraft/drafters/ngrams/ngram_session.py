"""The session that drafts by the n-grams of each text of a call.

It is the session of `CachebackDrafter`. The option `ngram_length` puts it in front of other sessions too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.draft_tree import DraftTree
from ...core.tuning import TUNING
from ..base.protocol import Accepted, Ask, Call, Session
from .ngram_cache import FollowerTable, NgramCache


class NgramSession(Session):
    """Drafts by the n-grams of each text of a call.

    Args:
        call: the call. Its option `ngram_length` is 1 or more.
        frozen: tables of other texts, see `NgramCache`.
    """

    free = True
    takes_ngrams = False

    def __init__(self, call: Call, frozen: Sequence[FollowerTable] = ()) -> None:
        vocab_size = call.target.get_input_embeddings().weight.shape[0]
        length = call.options.ngram_length
        self._caches = {row: NgramCache(length, frozen, vocab_size) for row in range(call.rows)}
        self._options, self._foresight = call.options, call.foresight
        self._supposed: dict[int, list[int]] = {}  # tokens after the texts that may be taken back

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: self._tree(ask) for ask in asks}
        if self._foresight is not None:
            trees = self._foresight.scored(trees)
        return list(trees.values())

    def _tree(self, ask: Ask) -> DraftTree:
        """Returns what the n-grams of a text propose."""
        ngrams, depth, threshold = self._caches[ask.row], min(ask.depth, TUNING.ngram_depth), self._options.threshold
        supposed = self._supposed.get(ask.row) or []
        last = supposed[-1] if supposed else ngrams.last
        if last != ask.root:  # they were not told of the root, or it is no token of the vocabulary
            return DraftTree.root(ask.root)
        return ngrams.draft(ask.size, depth, 1 if ask.chain else None, threshold, supposed)

    def continued(self, tree: DraftTree, ask: Ask) -> DraftTree:
        """Returns a tree whose most probable path goes on by n-grams, beyond the depth of its drafter.

        At most `ngram_continuation` nodes are added. Where a tree is full, as many nodes give way, the least probable
        ones. A tree of the root alone stays alone: nothing is to be drafted.

        FLy (arXiv:2511.22972) drafts on two levels so that its drafts become longer than its window.

        Args:
            tree: of a text.
            ask: the limits of the longer tree.
        """
        if len(tree) == 1 or self._caches[ask.row].last != ask.root:
            return tree
        following = self._following(tree, ask)
        kept = tree.first(max(ask.size - len(following), 1))
        if following and len(kept) < len(tree):  # the end of the path may have given way
            following = self._following(kept, ask)[: ask.size - len(kept) + 1]
        return kept.extended(kept.likeliest_path()[-1], following) if following else tree

    def _following(self, tree: DraftTree, ask: Ask) -> list[tuple[int, float]]:
        """Returns what n-grams say after the most probable path of a tree."""
        path = tree.likeliest_path()
        most = min(self._options.ngram_continuation, ask.depth - len(path))
        return self._caches[ask.row].follow([tree.tokens[node] for node in path], most)

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self._supposed.pop(each.row, None)
            self._caches[each.row].extend([*each.earlier, *each.tokens])

    def suppose(self, news: Sequence[Accepted]) -> None:
        """Goes on from tokens after the texts that hold until the next news only, as in a cascade."""
        self._supposed.update({each.row: each.tokens for each in news})

    def keep(self, rows: Sequence[int]) -> None:
        self._caches = {row: self._caches[row] for row in rows}
