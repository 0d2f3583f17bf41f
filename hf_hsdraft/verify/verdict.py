"""Verification: what a rule sees of a draft tree's nodes, its verdict, and the rule that is exact for any tree."""

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
    """What the target says about the nodes of one text's draft tree."""

    logits: torch.Tensor  # `[nodes, V]`, unprocessed; a rule uses them only where `processed` is False
    scores: ScoresAt  # at a node, after all processors of the call
    ends: EndsText  # whether the text ends with a token
    draw: Draw | None = None  # `None` for greedy decoding
    processed: bool = True  # whether processors change the scores or the call returns them
    taps: torch.Tensor | None = None  # `[nodes, taps * D]`, hidden states in the order of the rule's `taps`
    choices: Sequence[int] | None = None  # token of the greatest logit of each node, where it has been read already


@dataclass(frozen=True)
class Verdict:
    """What verification decided."""

    path: list[int]  # accepted nodes, without the root; may be empty
    next_token: int  # the target's choice after the path, the bonus token
    finished: bool  # whether the text ends with `next_token`
    num_drafted: int  # emitted tokens that the tree held: the path, and `next_token` if a drafted token ends the text
    relaxed: tuple[int, ...] = ()  # nodes among these that a lossy rule accepted in place of the target's token

    def cut(self, tree: DraftTree, length: int) -> Verdict:
        """Returns the verdict for a path of at most `length` nodes. What follows is decided again later."""
        if len(self.path) <= length:
            return self
        following, kept = tree.tokens[self.path[length]], self.path[: length + 1]
        relaxed = tuple(node for node in self.relaxed if node in kept)
        return Verdict(self.path[:length], following, False, length + 1, relaxed)


class Verifier:
    """A rule that accepts a path of a draft tree."""

    exact: bool = False  # whether the text has the target's distribution; a lossy rule is never a default
    taps: Sequence[int] = ()  # indices of the target's hidden states that the rule reads
    own_choices: bool = False  # whether greedy texts follow the target's own choices
    own_draws: bool = False  # whether each token is one draw from the target's distribution, which can be foreseen
    drawn_nodes: bool = False  # whether the drafter has to draw the nodes: a beam's would bias the text
    looks_ahead: bool = False  # whether it may drop scores it asked for; processors must keep no state then
    own_options: Sequence[Option] = ()  # `judge` finds their values as attributes of these names
    file: str = ""  # name of the file beside a drafter's weights with what the rule has learned

    def with_options(self, values: Mapping[str, Any]) -> Verifier:
        """Returns the rule for a call, with its own options taken from `values`."""
        if not self.own_options:
            return self
        rule = copy.copy(self)
        vars(rule).update({option.name: values[option.name] for option in self.own_options})
        return rule

    def learned(self, folder: Path | None) -> Verifier:
        """Returns the rule with what it has learned; raises a ValueError if the folder lacks a file it needs."""
        return self

    def described(self, folder: Path) -> list[str]:
        """Returns a card's Markdown paragraphs about the rule's file in a drafter's folder."""
        return []

    def check(self, width: int, layers: int, name: str = "") -> None:
        """Raises a ValueError for a target of another hidden size or number of layers; may warn of another name."""

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        """Returns the verdict about a tree. Its only side effect may be to draw random numbers."""
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
    """Draws a token from `[1, V]` or `[V]` with the device's generator, as plain decoding does."""
    return int(torch.multinomial(probabilities, num_samples=1))


class OwnChoice(Verifier):
    """Chooses at each node the token that plain decoding would choose there.

    The drafted children do not affect the choice: they only decide how far one forward reaches. So sampling consumes
    the same random numbers as plain decoding: one draw for each token, and none after the last one.
    """

    exact = True
    own_choices = True
    own_draws = True

    def judge(self, tree: DraftTree, nodes: Nodes) -> Verdict:
        return walk(tree, own_choice(nodes), nodes.ends)


def _reads_are_free(values: torch.Tensor) -> bool:
    return values.device.type == "cpu"


def own_choice(nodes: Nodes) -> ChooseToken:
    """Returns the function that chooses the target's own token at a node."""
    if nodes.draw is None and not nodes.processed:
        # `max` takes the first of equal logits, as `argmax` does, and is faster on CPUs.
        if nodes.choices is None and _reads_are_free(nodes.logits):  # only of the nodes on the way
            return lambda node, tokens: int(nodes.logits[node].max(dim=-1).indices)
        choices = nodes.logits.max(dim=-1).indices.tolist() if nodes.choices is None else nodes.choices
        return lambda node, tokens: choices[node]

    def choose(node: int, tokens: list[int]) -> int:
        scores = nodes.scores(node, tokens)
        return int(scores.argmax(dim=-1)) if nodes.draw is None else nodes.draw(scores.softmax(dim=-1))

    return choose
