"""Drafts from n-grams: the tokens that followed the same words before ("Cacheback", section 3).

Tables map a leader, a few tokens, to its followers, and evict the least recently used leader when full. Look-ups along
the drafted path grow a tree. A table's accuracy depends on the text, so it is measured on the text: each token is
looked up, as a draft would, before it is entered. These probabilities are comparable to a trained drafter's.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from ...core.draft_tree import NGRAM_LEAST, DraftTree, grown_tree
from ...core.tensors import embedded_tokens
from ...core.tuning import NGRAM_DEPTH
from ..base.protocol import Accepted, Ask, Call, Session

NGRAM_LEADERS = 2**17  # number of leaders that a table keeps - by hand
NGRAM_FOLLOWERS = 8  # number of followers of a leader - by hand
# Probability that the latest follower is the next token, after leaders of 1, 2, ... tokens - by hand.
NGRAM_RIGHT = (0.2, 0.45, 0.65, 0.75)
NGRAM_EARLIER = 0.5  # share of what is left that each earlier follower is assumed to have - by hand
NGRAM_PRIOR = 8.0  # number of tokens that these assumptions count for - by hand
# Power of the probabilities after a draft's first token
# - replayed: estimated speed-up 2.14 instead of 2.12; 2.13 with 0.8, 0.6 and 0.5.
NGRAM_BEYOND = 0.7


@dataclass
class FollowerTable:
    """Followers of leaders of one length, and how often they were right."""

    length: int  # tokens of a leader
    # Of each leader, latest first. Leaders are ordered from least to most recently used.
    followers: OrderedDict[tuple[int, ...], list[int]] = field(default_factory=OrderedDict)
    reached: int = 0  # tokens for which a draft would have found a leader in this table
    # By rank, how many of these tokens were the follower of that rank
    right: list[int] = field(default_factory=lambda: [0] * NGRAM_FOLLOWERS)

    def probability(self, rank: int) -> float:
        """Returns the probability that the follower of a rank is the next token, given that the leader was found."""
        first = NGRAM_RIGHT[min(self.length, len(NGRAM_RIGHT)) - 1]
        assumed = first if rank == 0 else (1.0 - first) * NGRAM_EARLIER ** (rank + 1)
        return (self.right[rank] + NGRAM_PRIOR * assumed) / (self.reached + NGRAM_PRIOR)

    def after(self, path: Sequence[int]) -> list[int]:
        """Returns the followers of the leader at the end of a path; empty if there are none."""
        return self.followers.get(tuple(path[-self.length :]), [])

    def count(self, path: Sequence[int], token: int) -> bool:
        """Counts and returns whether the token after a path is among the followers."""
        known = self.after(path)
        self.reached += bool(known)
        if token in known:
            self.right[known.index(token)] += 1
        return token in known

    def enter(self, path: Sequence[int], token: int) -> None:
        if len(path) < self.length:
            return
        leader = tuple(path[-self.length :])
        known = self.followers.setdefault(leader, [])
        self.followers.move_to_end(leader)
        if token in known:
            known.remove(token)
        known.insert(0, token)
        del known[NGRAM_FOLLOWERS:]
        if len(self.followers) > NGRAM_LEADERS:
            self.followers.popitem(last=False)


class NgramCache:
    """N-grams of one sequence, with leaders of 1 to `length` tokens; `own` are its tables.

    Args:
        frozen: tables of other texts, consulted after the sequence's table of the same length, and never changed.
        vocab_size: ids outside 0 to `vocab_size - 1` are no tokens, and in no n-gram; 0 for no limit.
    """

    def __init__(self, length: int, frozen: Sequence[FollowerTable] = (), vocab_size: int = 0) -> None:
        self._vocab_size = vocab_size
        self.own = [FollowerTable(size) for size in range(length, 0, -1)]
        others = [FollowerTable(table.length, table.followers) for table in frozen]  # fresh counts for this sequence
        # Longest leaders first.
        self._tables = sorted([*self.own, *others], key=lambda table: -table.length)
        self._tail: list[int] = []  # the last tokens, as many as the longest leader has
        self._counted: list[list[float]] | None = None  # see `_probabilities`

    @property
    def last(self) -> int | None:
        """The last token, from which a draft continues."""
        return self._tail[-1] if self._tail else None

    def extend(self, tokens: Iterable[int], counted: bool = True) -> None:
        """Enters further tokens of the sequence, `counted` after counting whether a draft would have held them."""
        self._counted = None
        for token in tokens:
            if token < 0 or 0 < self._vocab_size <= token:
                self._tail = []
                continue
            for table in self._tables if counted else ():
                if table.count(self._tail, token):  # a draft would have found the token here
                    break
            for table in self.own:
                table.enter(self._tail, token)
            self._tail = [*self._tail, token][-self._tables[0].length :]

    def draft(
        self,
        tree_size: int,
        depth: int,
        width: int | None = None,  # most children of a node; 1 gives a chain, None is no limit
        threshold: float = 0.0,  # least probability of a path, 0 to 1
    ) -> DraftTree:
        """Returns the most probable continuations as a tree, with at most `tree_size` nodes besides the root."""
        return grown_tree(self._tail[-1], self.after, tree_size, depth, width, threshold)

    @property
    def _probabilities(self) -> list[list[float]]:
        """Of each table, by rank; counted until the text grows again."""
        if self._counted is None:
            ranks = range(NGRAM_FOLLOWERS)
            self._counted = [[table.probability(rank) for rank in ranks] for table in self._tables]
        return self._counted

    def after(self, drafted: Sequence[int]) -> list[tuple[int, float]]:
        """Returns likely tokens after a drafted path with probabilities, the most probable first.

        Longer leaders come first; shorter ones share the remaining probability. Probabilities were counted at all
        occurrences of a leader. After drafted tokens they assume that these are right; then the text repeats itself,
        and in greedy texts the next token is right more often, so its probability is raised. Sampled texts do not show
        this, but there the error costs little.
        """
        found: dict[int, float] = {}
        path, left = [*self._tail, *drafted], 1.0
        for table, probabilities in zip(self._tables, self._probabilities, strict=True):
            followers, total = table.after(path), 0.0
            for token, probability in zip(followers, probabilities, strict=False):
                found.setdefault(token, left * probability)
                total += probability
            left *= max(1.0 - total, 0.0)
            if left < NGRAM_LEAST:
                break
        ranked = sorted(found.items(), key=itemgetter(1), reverse=True)
        if drafted:
            raised = [(token, probability**NGRAM_BEYOND) for token, probability in ranked]
            total = max(sum(probability for _, probability in raised), 1.0)
            ranked = [(token, probability / total) for token, probability in raised]
        return ranked


class LookupSession(Session):
    """A session that looks drafts up in tokens, which takes no time; subclasses have the tree of a row."""

    free = takes_new_texts = True
    takes_ngrams = False

    def __init__(self, call: Call) -> None:
        self._options, self._foresight = call.options, call.foresight

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: self._tree(ask) for ask in asks}
        if self._foresight is not None:
            trees = self._foresight.scored(trees)
        return list(trees.values())

    def _tree(self, ask: Ask) -> DraftTree:
        raise NotImplementedError


class NgramSession(LookupSession):
    """Drafts by the n-grams of each row, and of other texts' `frozen` tables; needs the option `ngram_length`."""

    def __init__(self, call: Call, frozen: Sequence[FollowerTable] = ()) -> None:
        super().__init__(call)
        sizes = call.options.ngram_length, frozen, embedded_tokens(call.target)
        self.caches: dict[int, NgramCache] = defaultdict(lambda: NgramCache(*sizes))

    def _tree(self, ask: Ask) -> DraftTree:
        ngrams, depth, threshold = self.caches[ask.row], min(ask.depth, NGRAM_DEPTH), self._options.threshold
        if ngrams.last != ask.root:  # the root was not observed, or is outside the vocabulary
            return DraftTree.root(ask.root)
        return ngrams.draft(ask.size, depth, 1 if ask.chain else None, threshold)

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self.caches[each.row].extend([*each.earlier, *each.tokens])

    def keep(self, rows: Sequence[int]) -> None:
        for row in self.caches.keys() - set(rows):
            del self.caches[row]
