"""The drafting of a call: free sessions first, then the drafter's to the depth that pays, merged into one tree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..core.draft_tree import DraftTree, Expansion, certainty, merge_trees
from ..core.methods import load
from ..core.tensors import embedded_tokens, on_device
from ..core.tuning import MOST_PENDING
from ..drafters.base.draft_options import NO_HISTORY, DraftOptions
from ..drafters.base.protocol import Accepted, Ask, Call, Drafter, Session
from ..drafters.lookup.ngrams import NgramSession
from ..pace.pacing import CostPace, KindOfCall, pace_for

_PACKAGE = f"{__package__.partition('.')[0]}."


@dataclass(frozen=True)
class Wanted(Ask):
    """An ask with what the engine needs besides."""

    reach: int = 0  # greatest depth that the target can verify, which n-grams in front of a drafter may use
    ahead: int = 0  # tokens by which the text is longer than the shortest one that still grows
    decides: bool = True  # whether the batch waits for this text; the pace looks at these only


class LateNews(Accepted):
    """News of a round, which wait until the drafter is asked; `positions` and `following` are made when they are read.

    Args:
        begin: position of the first token that was read.
        given: the other fields, all but those two.
    """

    def __init__(self, begin: int, **given: Any) -> None:
        vars(self).update(given, begin=begin)

    def __getattr__(self, name: str) -> Any:
        if name not in ("positions", "following"):
            raise AttributeError(name)
        values = self.tokens if name == "following" else range(self.begin, self.begin + len(self.tokens))
        vars(self)[name] = found = on_device(values, self.taps.device)
        return found

    @classmethod
    def joined(cls, news: Sequence[LateNews]) -> LateNews:
        """The news of successive rounds of a row as those of one round."""
        tokens = [token for each in news for token in each.tokens]
        return cls(news[0].begin, row=news[0].row, tokens=tokens, taps=torch.cat([each.taps for each in news]))


class Drafting:
    """All sessions of a call, and their pace.

    Attributes:
        session: the drafter's, `drafter.session(call)` by default.
        sessions: all that observe; the drafter's last, before those of methods.
        extend: grows the tree that answers an ask further, by what costs nothing; set by methods.
        pace: `None` where trees have fixed sizes, and until `set_pace`.
        depth: depth that the drafter's session was asked for in the last round; 0 where it was not asked.
    """

    def __init__(self, drafter: Drafter, call: Call, session: Session | None = None) -> None:
        self._call, self._drafter = call, drafter
        self.session = session = session or drafter.session(call)
        if listeners := [each.on_expansion for each in call.observers if each.on_expansion is not None]:
            session.on_expansion = partial(_tell, listeners)
        ngrams = NgramSession(call) if call.options.ngram_length and session.takes_ngrams else None
        self.pace: CostPace | None = None
        self.depth = 0
        history = None if call.history is None else call.history.session(call)
        self.sessions = [each for each in (ngrams, history, session) if each is not None]
        self.extend: Callable[[DraftTree, Ask], DraftTree] | None = None
        self._free = [each for each in self.sessions if each.free]
        self._paced = None if session.free else session
        self._waiting: dict[int, list[LateNews]] = {}  # news that the paced session has not observed, by text
        self._rests = False
        self._vocab_size = embedded_tokens(call.target)
        for option in call.options.of_methods:
            option.begin(call, self)

    def set_pace(self, options: DraftOptions, kind: KindOfCall, share: float = 1.0) -> None:
        """Sets how much to draft: by measured costs of `kind`, or fixed. `share` is the share of texts that stay."""
        if options.tree_sizing == "fixed" or options.depth == 0:
            self.pace = None
        else:
            self.pace = pace_for(self._call.target, self._drafter, kind, options.costs, self.pace, share)

    def draft(self, asks: Sequence[Wanted]) -> list[DraftTree]:
        roots = [DraftTree.root(ask.root) for ask in asks]
        self.depth = 0
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
        depth = sys.maxsize if self.pace is None else self.pace.plan(certainty([guessed[row] for row in deciding]))
        drafted = self._of_drafter(wanted, depth)

        def join(drafted: Mapping[int, DraftTree]) -> dict[int, DraftTree]:
            return {ask.row: _joined(drafted.get(ask.row), guessed[ask.row], ask) for ask in wanted}

        trees = join(drafted) if self.pace is None else self.pace.fit(drafted, self.depth, deciding, join)
        if (extend := self.extend) is not None:
            longer = ((ask, extend(trees[ask.row], replace(ask, depth=ask.reach))) for ask in wanted)
            trees = {ask.row: self._pruned(tree, ask) for ask, tree in longer}
        return [trees.get(ask.row, root) for ask, root in zip(asks, roots, strict=True)]

    def _of_drafter(self, asks: Sequence[Wanted], depth: int) -> dict[int, DraftTree]:
        """The paced session's drafts by text; empty where it does not draft."""
        if self._paced is None or depth == 0:
            return {}
        self.catch_up()
        limited = [replace(ask, depth=min(ask.depth, depth)) for ask in asks]
        self.depth = max(ask.depth for ask in limited)
        return dict(zip([ask.row for ask in asks], self._of_session(self._paced, limited), strict=True))

    def _of_session(self, session: Session, asks: Sequence[Ask]) -> list[DraftTree]:
        """Drafts of a session, without nodes that would be verified in vain."""
        trees = session.draft(asks)
        if not type(session).__module__.startswith(_PACKAGE):  # the package's own trees are right
            _check(session, trees, asks, self._vocab_size)
        return [self._pruned(tree, ask) for ask, tree in zip(asks, trees, strict=True)]

    def _pruned(self, tree: DraftTree, ask: Ask) -> DraftTree:
        texts = self._call.texts
        return tree if texts is None else texts.prune(ask.row, tree)

    def rest(self) -> None:
        """Ends drafting and frees what was kept for it, unless the session listens."""
        if self.session.listens:
            return
        self.keep(())
        self._rests = True

    def observe(self, news: Sequence[Accepted]) -> None:
        if self._rests:
            return
        for session in self.sessions:
            if session is not self._paced:
                session.observe(news)
        if self._paced is None:
            return
        late = [each for each in news if isinstance(each, LateNews)]
        if self.depth or len(late) < len(news):  # it has drafted, or these are prompts
            self.catch_up()
            self._paced.observe(news)
            return
        for each in late:
            self._waiting.setdefault(each.row, []).append(each)
        waits = (each.begin + len(each.tokens) - self._waiting[each.row][0].begin for each in late)
        if max(waits, default=0) >= MOST_PENDING:  # nothing waits for long
            self.catch_up()

    def catch_up(self) -> None:
        """Lets the drafter's session observe all that was accepted."""
        waiting, self._waiting = self._waiting, {}
        if waiting and self._paced is not None:
            self._paced.observe([LateNews.joined(news) for news in waiting.values()])

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all other texts."""
        if self._rests:
            return
        self._waiting = {row: news for row, news in self._waiting.items() if row in rows}
        for session in self.sessions:
            session.keep(rows)


def history_for(drafter: Drafter, target: Any, options: DraftOptions) -> Any:
    """Opens the history that the option asks for; None for none. Raises an OSError if its folder cannot be used."""
    if options.history == NO_HISTORY:
        return None
    return load("remembering", "history").history_of(drafter, target, options.history)


def _tell(listeners: Sequence[Callable[..., None]], rows: Sequence[int], expansion: Expansion) -> None:
    for each in listeners:
        each(rows, expansion)


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


def _joined(tree: DraftTree | None, other: DraftTree, ask: Ask) -> DraftTree:
    """Merges two trees; of two chains it returns the better one."""
    if tree is None or len(tree) == 1:
        return other
    if len(other) == 1:
        return tree
    if ask.chain:
        return max(tree, other, key=DraftTree.expected_length)
    return merge_trees(tree, other, ask.size)
