"""The rounds of a call: draft, verify, accept, commit, observe ("Make Every Draft Count").

Accepted so far are the tokens x_0 to x_t of a text. The target has read all of them but x_t, the root of the next tree.
One round makes a + 1 tokens in one forward:

- draft: the drafter proposes a tree. A node of depth d is a candidate for x_{t+d}. The pace sets depth and size.
- verify: the target reads the root at position t and the nodes at t + depth, all at once.
- accept: from the root on, the target chooses its own next token at each node, for as long as that token was drafted.
- commit: the path of a nodes and the token after it are emitted. The cache keeps root and path, and drops the rest.
- observe: the drafter takes the new tokens and the hidden states of root and path.

A batch takes the same steps with a tree for each text. `decode` does not know where the target is: it runs in this
process (`local_target`) or at a server (`remote`). Clocks, statistics and the pace listen as observers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.draft_tree import DraftTree
from ..drafters.base.protocol import Accepted
from ..trees.tree_builders import Expansion
from .drafting import Drafting, Wanted


class Target(Protocol):
    """Verifies drafts and holds the texts after the prompts. `read` and `verdicts` have its own types."""

    @property
    def forwards(self) -> int: ...

    def goes_on(self) -> bool:
        """Whether a text still grows."""
        ...

    def prepare(self, drafting: Drafting) -> None:
        """Before a round: removes texts that have ended, and renews limits that no longer hold."""
        ...

    def asks(self) -> list[Wanted]:
        """The wanted drafts, for the texts that still grow."""
        ...

    def undone_on_error(self) -> contextlib.AbstractContextManager[None]:
        """Undoes what a forward has read if it, or what follows it inside, is interrupted."""
        ...

    def verify(self, trees: Sequence[DraftTree]) -> Any:
        """Reads the trees of `asks`, in this order, in one forward."""
        ...

    def accept(self, read: Any) -> Any:
        """Decides which path of each tree is accepted, and which token follows it."""
        ...

    def commit(self, read: Any, verdicts: Any) -> None:
        """Emits what is accepted, and keeps it in the cache."""
        ...

    def news(self, read: Any, verdicts: Any) -> list[Accepted]:
        """What each text got, in the order of `asks`."""
        ...


def decode(target: Target, drafting: Drafting, observers: Sequence[Observer]) -> None:
    """Runs rounds until all texts have ended. Observers are called in order."""
    while target.goes_on():
        target.prepare(drafting)
        for each in observers:
            each.began()
        asks, forwards = target.asks(), target.forwards
        trees = drafting.draft(asks)
        for each in observers:
            each.drafted()
        with target.undone_on_error():
            read = target.verify(trees)
            verdicts = target.accept(read)
            for each in observers:
                each.verified()
            target.commit(read, verdicts)
        news = target.news(read, verdicts)
        drafting.observe(news)
        done = Round(asks, trees, news, target.forwards - forwards, drafting.depth)
        for each in observers:
            each.ended(done)


@dataclass(frozen=True)
class Round:
    """What a round did for the texts that still grew."""

    asks: Sequence[Wanted]
    trees: Sequence[DraftTree]
    news: Sequence[Accepted]
    forwards: int  # of the target
    depth: int  # asked of the drafter's session; 0 if it was not asked. Its trees may be shallower.

    @property
    def nodes(self) -> list[int]:
        """Number of nodes besides the root, for each text."""
        return [len(tree) - 1 for tree in self.trees]

    @property
    def accepted(self) -> list[int]:
        """Number of accepted draft tokens, for each text."""
        return [each.num_drafted for each in self.news]

    @property
    def emitted(self) -> list[int]:
        """Number of emitted tokens, for each text that the batch waits for."""
        return [len(each.tokens) for ask, each in zip(self.asks, self.news, strict=True) if ask.decides]

    @property
    def progress(self) -> int:
        """Number of tokens by which the shortest text, with which the batch ends, has grown."""
        return min((ask.ahead + len(each.tokens) for ask, each in zip(self.asks, self.news, strict=True)), default=0)


class Observer:
    """Called at each step of a round. A streamer of `generate()` may be one too, for its own call.

    Attributes:
        on_expansion: takes the rows and the [`Expansion`] that their trees grow from, in a form usable after the call.
            `None` if unused, as making that form may copy what was read.
    """

    on_expansion: Callable[[Sequence[int], Expansion], None] | None = None

    def began(self) -> None:
        pass

    def drafted(self) -> None:
        pass

    def verified(self) -> None:
        """The forward is done and acceptance is decided."""

    def ended(self, done: Round) -> None:
        """All is emitted and kept, and the sessions have observed it."""
