"""Session that drafts by n-grams: that of `CachebackDrafter`, and in front of other sessions with `ngram_length`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...core.draft_tree import DraftTree
from ...core.tensors import embedded_tokens
from ...core.tuning import TUNING
from ..base.protocol import Accepted, Ask, Call, Session
from .ngram_cache import FollowerTable, NgramCache


class NgramSession(Session):
    """Drafts by the n-grams of each row, and of other texts' `frozen` tables; needs the option `ngram_length`."""

    free = takes_new_texts = True
    takes_ngrams = False

    def __init__(self, call: Call, frozen: Sequence[FollowerTable] = ()) -> None:
        sizes = call.options.ngram_length, frozen, embedded_tokens(call.target)
        self._caches: dict[int, NgramCache] = defaultdict(lambda: NgramCache(*sizes))
        self._options, self._foresight = call.options, call.foresight

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: self._tree(ask) for ask in asks}
        if self._foresight is not None:
            trees = self._foresight.scored(trees)
        return list(trees.values())

    def _tree(self, ask: Ask) -> DraftTree:
        ngrams, depth, threshold = self._caches[ask.row], min(ask.depth, TUNING.ngram_depth), self._options.threshold
        if ngrams.last != ask.root:  # the root was not observed, or is outside the vocabulary
            return DraftTree.root(ask.root)
        return ngrams.draft(ask.size, depth, 1 if ask.chain else None, threshold)

    def continued(self, tree: DraftTree, ask: Ask) -> DraftTree:
        """Extends the most probable path of another drafter's tree by n-grams, within the limits of `ask`.

        Adds at most `ngram_continuation` nodes; in a full tree they replace the least probable ones. A lone root stays
        alone: nothing is to be drafted. FLy (arXiv:2511.22972) drafts on two levels for drafts longer than its window.
        """
        if len(tree) == 1 or self._caches[ask.row].last != ask.root:
            return tree
        following = self._following(tree, ask)
        kept = tree.first(max(ask.size - len(following), 1))
        if following and len(kept) < len(tree):  # the path's end may have been dropped
            following = self._following(kept, ask)
        following = following[: ask.size - len(kept) + 1]
        return kept.extended(kept.likeliest_path()[-1], following) if following else tree

    def _following(self, tree: DraftTree, ask: Ask) -> list[tuple[int, float]]:
        path = tree.likeliest_path()
        most = min(self._options.ngram_continuation, ask.depth - len(path))
        return self._caches[ask.row].follow([tree.tokens[node] for node in path], most)

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self._caches[each.row].extend([*each.earlier, *each.tokens])

    def keep(self, rows: Sequence[int]) -> None:
        for row in self._caches.keys() - set(rows):
            del self._caches[row]
