"""Verification: what a rule knows of a draft tree's nodes, what it decides, and the rule that is exact for any tree.

Most rules choose the next token at a node. `walk` then follows the choices for as long as they were drafted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.draft_tree import DraftTree
from ..core.options import Option

# Takes a node and the drafted tokens of its path, without the root's. Returns the next token of the text there.
ChooseToken = Callable[[int, list[int]], int]

# Takes the same. Returns the target's scores [1, V] there, after all processors. A second call returns the same scores.
ScoresAt = Callable[[int, list[int]], torch.Tensor]

# Takes probabilities [1, V]. Returns a token drawn from them.
Draw = Callable[[torch.Tensor], int]

# Takes the nodes accepted so far, and the tokens chosen at the root and at these nodes. Returns whether the text ends
# with the last token.
EndsText = Callable[[list[int], list[int]], bool]


@dataclass(frozen=True)
class Nodes:
    """What the target says about the nodes of one text's draft tree.

    Attributes:
        logits: `[nodes, V]`, logits of the target, unprocessed. A rule goes by them only where `processed` is False.
        scores: returns the scores at a node, after all processors of the call.
        ends: returns whether the text ends with a token.
        draw: draws a token from probabilities; `None` where the most probable token is taken.
        processed: whether `scores` have to be asked, because processors change them or the call returns them.
        taps: `[nodes, taps * D]`, the hidden states that the rule reads, in the order of its `taps`.
    """

    logits: torch.Tensor
    scores: ScoresAt
    ends: EndsText
    draw: Draw | None = None
    processed: bool = True
    taps: torch.Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What verification decided.

    Attributes:
        path: indices of the accepted nodes, without the root; may be empty.
        next_token: the token that the target chose after the path, the bonus token.
        finished: whether the text ends with `next_token`.
        num_drafted: number of emitted tokens that the tree held: those of the path, and `next_token` where the text
            ends with a drafted token.
        relaxed: indices of the nodes among these that a lossy rule accepted in place of the target's own token.
    """

    path: list[int]
    next_token: int
    finished: bool
    num_drafted: int
    relaxed: tuple[int, ...] = ()

    def cut(self, tree: DraftTree, length: int) -> Verdict:
        """Returns the same verdict for a path of at most `length` nodes. What follows is decided anew later."""
        if len(self.path) <= length:
            return self
        following, kept = tree.tokens[self.path[length]], self.path[: length + 1]
        relaxed = tuple(node for node in self.relaxed if node in kept)
        return Verdict(self.path[:length], following, False, length + 1, relaxed)


class Verifier:
    """A rule that accepts a path of a draft tree. Derived classes say what differs from the defaults here.

    Attributes:
        exact: whether the emitted text has the target's own distribution. A rule without it is lossy: it is never a
            default, and the call's statistics say so.
        taps: indices of the target's hidden states that the rule reads.
        own_draws: whether each token is one draw from the target's own distribution. Such draws can be foreseen.
        drawn_nodes: whether the drafter has to draw the nodes. The best nodes of a beam would bias the text.
        looks_ahead: whether the rule asks for scores of nodes that it may drop then. Logits processors must not
            remember that they were asked.
        own_options: options that this rule has for itself. `judge` finds their values as attributes of their names.
        file: name of the file beside a drafter's weights that holds what the rule has learned; empty for none.
        questions: digests of the questions that it has learned from.
    """

    exact: bool = False
    taps: Sequence[int] = ()
    own_draws: bool = False
    drawn_nodes: bool = False
    looks_ahead: bool = False
    own_options: Sequence[Option] = ()
    file: str = ""

    @property
    def questions(self) -> Sequence[str]:
        return ()

    def with_options(self, values: Mapping[str, Any]) -> Verifier:
        """Returns the rule for a call, with values of its own options among those given."""
        if not self.own_options:
            return self
        rule = copy.copy(self)
        vars(rule).update({option.name: values[option.name] for option in self.own_options})
        return rule

    def learned(self, folder: Path | None) -> Verifier:
        """Returns the rule with what it has learned.

        Args:
            folder: the drafter's; `None` for a drafter that was not loaded from one.

        Raises:
            ValueError: the rule needs a file that is not there.
        """
        return self

    def described(self, folder: Path) -> list[str]:
        """Returns what a card says of the rule's file in a drafter's folder, in paragraphs of Markdown."""
        return []

    def check(self, width: int, layers: int, name: str = "") -> None:
        """Raises a ValueError for a target that the rule was not trained for. May warn of one with another name.

        Args:
            width: size of the target's hidden states.
            layers: number of its layers.
            name: its name, as it may be published; empty if it has none.
        """

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        """Returns the verdict about a tree. It changes nothing, except that it may draw random numbers."""
        raise NotImplementedError


def walk(tree: DraftTree, choose: ChooseToken, ends: EndsText) -> Verdict:
    """Follows the chosen tokens through the tree for as long as they were drafted."""
    children = tree.children()
    path: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        token = choose(node, tokens)
        following = children[node].get(token)
        tokens.append(token)
        finished = ends(path, tokens)
        if following is None or finished:
            return Verdict(path, token, finished, len(path) + (following is not None))
        path.append(following)
        node = following


def draw_token(probabilities: torch.Tensor) -> int:
    """Draws a token from `[1, V]` or `[V]` by the device's own generator, as plain decoding does."""
    return int(torch.multinomial(probabilities, num_samples=1))


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
