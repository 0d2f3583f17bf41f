"""The drafting of a call: free sessions first, then the drafter's to the depth that pays, merged into one tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.draft_tree import DraftTree, certainty, merge_trees
from ..core.tensors import embedded_tokens
from ..drafters.base.draft_options import NO_HISTORY, DraftOptions
from ..drafters.base.protocol import Accepted, Ask, Call, Drafter, Session
from ..drafters.lookup.ngrams import NgramSession
from ..pace.pacing import CostPace, KindOfCall, Pace, pace_for
from ..trees.tree_builders import Expansion
from .late_news import LateReader


@dataclass(frozen=True)
class Wanted(Ask):
    """An ask with what the engine needs besides."""

    reach: int = 0  # greatest depth that the target can verify, which n-grams in front of a drafter may use
    ahead: int = 0  # tokens by which the text is longer than the shortest one that still grows
    decides: bool = True  # whether the batch waits for this text; the pace looks at these only


class Drafting:
    """All sessions of a call, and their pace.

    Attributes:
        session: the drafter's, `drafter.session(call)` by default.
        pace: unlimited until `set_pace`.
        depth: depth that the drafter's session was asked for in the last round; 0 where it was not asked.
    """

    def __init__(self, drafter: Drafter, call: Call, session: Session | None = None) -> None:
        self._call, self._drafter = call, drafter
        self.session = session = session or drafter.session(call)
        self._listeners = [each.on_expansion for each in call.observers if each.on_expansion is not None]
        if self._listeners:
            session.on_expansion = self._tell
        ngrams = NgramSession(call) if call.options.ngram_length and session.takes_ngrams else None
        self.pace: Pace = Pace()
        self.depth = 0
        history = None if call.history is None else _past_texts(call)
        self._sessions = [each for each in (ngrams, history, session) if each is not None]
        self._continuing = ngrams if call.options.ngram_continuation else None
        self._free = [each for each in self._sessions if each.free]
        self._paced = None if session.free else session
        self._late = LateReader(session) if self._paced is not None else None
        self._rests = False
        self._vocab_size = embedded_tokens(call.target)
        self._drafted: dict[int, DraftTree] = {}  # the paced session's last drafts, by text

    def set_pace(self, options: DraftOptions, kind: KindOfCall, share: float = 1.0) -> None:
        """Sets how much to draft: by measured costs of `kind`, or fixed. `share` is the share of texts that stay."""
        if options.tree_sizing == "fixed" or options.depth == 0:
            self.pace = Pace()
        else:
            before = self.pace if isinstance(self.pace, CostPace) else None
            self.pace = pace_for(self._call.target, self._drafter, kind, options.costs, before, share)

    def draft(self, asks: Sequence[Wanted]) -> list[DraftTree]:
        roots = [DraftTree.root(ask.root) for ask in asks]
        self.depth, self._drafted = 0, {}
        wanted = [ask for ask in asks if ask.depth > 0]
        if not wanted or self._rests:
            return roots
        guessed = {ask.row: DraftTree.root(ask.root) for ask in wanted}
        for session in self._free:
            # N-grams in front cost nothing, so the option that limits the drafter's depth does not limit theirs.
            asked = wanted if session is self.session else [replace(ask, depth=ask.reach) for ask in wanted]
            found = self._of_session(session, asked)
            guessed = {ask.row: _joined(guessed[ask.row], tree, ask) for ask, tree in zip(wanted, found, strict=True)}
        deciding = [ask.row for ask in wanted if ask.decides] or [ask.row for ask in wanted]
        depth = self.pace.plan(certainty([guessed[row] for row in deciding]))
        trees = self._of_drafter(wanted, depth, deciding)
        trees = {ask.row: _joined(trees[ask.row], guessed[ask.row], ask) for ask in wanted}
        cut = self.pace.cut(list(trees.values()), [trees[row] for row in deciding])
        trees = dict(zip(trees, cut, strict=True))
        if self._continuing is not None:
            trees = {ask.row: self._continued(self._continuing, trees[ask.row], ask) for ask in wanted}
        return [trees.get(ask.row, root) for ask, root in zip(asks, roots, strict=True)]

    def _of_drafter(self, asks: Sequence[Wanted], depth: int, deciding: Sequence[int]) -> Mapping[int, DraftTree]:
        """The paced session's drafts, scored by the pace; roots alone where it does not draft."""
        if self._paced is None or depth == 0:
            return {ask.row: DraftTree.root(ask.root) for ask in asks}
        self.catch_up()
        limited = [replace(ask, depth=min(ask.depth, depth)) for ask in asks]
        drafted = self._of_session(self._paced, limited)
        self._drafted = {ask.row: tree for ask, tree in zip(asks, drafted, strict=True)}
        self.depth = max(ask.depth for ask in limited)
        return self.pace.scored(self._drafted, self.depth, deciding)

    def _of_session(self, session: Session, asks: Sequence[Ask]) -> list[DraftTree]:
        """Drafts of a session, without nodes that would be verified in vain."""
        trees = session.draft(asks)
        if type(session) is not NgramSession:  # whose tokens are in the vocabulary
            _check(session, trees, asks, self._vocab_size)
        return [self._pruned(tree, ask) for ask, tree in zip(asks, trees, strict=True)]

    def _pruned(self, tree: DraftTree, ask: Ask) -> DraftTree:
        texts = self._call.texts
        return tree if texts is None else texts.prune(ask.row, tree)

    def _continued(self, ngrams: NgramSession, tree: DraftTree, ask: Wanted) -> DraftTree:
        """The tree to verify, where n-grams extend its end."""
        return self._pruned(ngrams.continued(tree, replace(ask, depth=ask.reach)), ask)

    def _tell(self, rows: Sequence[int], expansion: Expansion) -> None:
        for each in self._listeners:
            each(rows, expansion)

    def rest(self) -> None:
        """Ends drafting and frees what was kept for it, unless the session listens."""
        if self.session.listens:
            return
        self.keep(())
        self._rests = True

    def observe(self, news: Sequence[Accepted]) -> None:
        if self._rests:
            return
        for each in news:
            drafted = self._drafted.get(each.row)
            if drafted is not None:
                self.pace.learn(drafted, each.tokens)
        self._drafted = {}
        for session in self._sessions:
            if self._late is not None and session is self._paced:
                self._late.observe(news, drafted=self.depth > 0)
            else:
                session.observe(news)

    def catch_up(self) -> None:
        """Lets the drafter's session observe all that was accepted."""
        if self._late is not None:
            self._late.catch_up()

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all other texts."""
        if self._rests:
            return
        for session in self._sessions:
            (self._late if self._late is not None and session is self._paced else session).keep(rows)


def history_for(drafter: Drafter, target: Any, options: DraftOptions) -> Any:
    """Opens the history that the option asks for; None for none. Raises an OSError if its folder cannot be used."""
    if options.history == NO_HISTORY:
        return None
    from ..drafters.lookup.history import history_of  # most calls do without

    return history_of(drafter, target, options.history)


def _past_texts(call: Call) -> Session:
    from ..drafters.lookup.past_texts import HistorySession

    return HistorySession(call, call.history)


def _check(session: Session, trees: Any, asks: Sequence[Ask], vocab_size: int) -> None:
    """Raises a ValueError for drafts of a session that the target could not read correctly."""
    name, found = type(session).__name__, len(trees) if isinstance(trees, Sequence) else type(trees).__name__
    if found != len(asks):
        raise ValueError(f"{name}.draft returned {found}: expected a list with {len(asks)} trees, one for each ask")
    for tree, ask in zip(trees, asks, strict=True):
        fault = _fault(tree, ask, vocab_size)
        if fault:
            raise ValueError(f"{name}.draft returned a wrong tree for text {ask.row}: {fault}")


def _fault(tree: Any, ask: Ask, vocab_size: int) -> str:
    """Returns what is wrong with a tree, or an empty string."""
    if not isinstance(tree, DraftTree):
        return f"got {type(tree).__name__}, expected a DraftTree; DraftTree.root(ask.root) drafts nothing"
    fault = tree.fault(vocab_size)
    if fault:
        return fault
    if tree.tokens[0] != ask.root:
        return f"its root has token {tree.tokens[0]}: expected ask.root={ask.root}"
    if max(tree.depths) > ask.depth:
        return f"it has depth {max(tree.depths)}: expected at most ask.depth={ask.depth}"
    if len(tree) - 1 > ask.size:
        return f"it has {len(tree) - 1} nodes beside the root: expected at most ask.size={ask.size}"
    if ask.chain and max(tree.depths) < len(tree) - 1:
        return "it has branches: expected one path, as ask.width=1 says"
    return ""


def _joined(tree: DraftTree, other: DraftTree, ask: Ask) -> DraftTree:
    """Merges two trees; of two chains it returns the better one."""
    if len(other) == 1 or len(tree) == 1:
        return tree if len(other) == 1 else other
    if ask.chain:
        return max(tree, other, key=DraftTree.expected_length)
    return merge_trees(tree, other, ask.size)
