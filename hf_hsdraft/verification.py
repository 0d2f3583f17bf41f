"""Rules that accept a path of a draft tree. The walk is exact: it emits what the target alone would have emitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .draft_tree import DraftTree

# Given a node and the tokens drafted on the way to it (the root's excluded), the target's own next token there.
ChooseToken = Callable[[int, list[int]], int]

# Given the tokens chosen since the root: does the text end with the last of them?
EndsText = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Verdict:
    """What verification decided.

    Attributes:
        path: accepted node indices, the root excluded; may be empty.
        next_token: the token the target chose after the path, the bonus token.
        finished: the text ends with it.
        num_drafted: emitted tokens that the tree held: the path's, and the last token of a text if it was drafted.
    """

    path: list[int]
    next_token: int
    finished: bool
    num_drafted: int


def walk(tree: DraftTree, choose: ChooseToken, ends: EndsText) -> Verdict:
    """Follows the target's own choices through the tree for as long as they are drafted. Exact.

    The target's token is chosen at each node as plain decoding would choose it, greedily or by sampling, without a look
    at the drafted children; they only decide how far one forward pass reaches. So the emitted text has the target's
    distribution whatever the tree holds, and sampling consumes random numbers exactly as plain decoding does: one draw
    a token, none after the text's last one.
    """
    children = tree.children()
    path: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        token = choose(node, tokens)
        following = children[node].get(token)
        tokens.append(token)
        finished = ends(tokens)
        if following is None or finished:
            return Verdict(path, token, finished, len(path) + (following is not None))
        path.append(following)
        node = following


def greedy_choice(logits: torch.Tensor) -> ChooseToken:
    """The most probable token of each node, for `logits` `[nodes, V]` that need no processing."""
    choices = logits.max(dim=-1).indices.tolist()  # the first of equals, as argmax, and faster on CPUs
    return lambda node, tokens: choices[node]


def processed_choice(
    logits: torch.Tensor,
    prefix: torch.Tensor,
    process: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    do_sample: bool,
    on_scores: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> ChooseToken:
    """The target's choice after the user's logits processors, each node with its own path.

    Args:
        logits: `[nodes, V]`, raw.
        prefix: `[1, length]`, the accepted text up to and with the root.
        process: the `LogitsProcessorList` of the call.
        do_sample: draw from the processed distribution instead of taking its mode.
        on_scores: called with the raw and the processed row `[1, V]` of each node visited.
    """

    def choose(node: int, tokens: list[int]) -> int:
        drafted = torch.tensor([tokens], dtype=prefix.dtype, device=prefix.device)
        raw = logits[node : node + 1].to(prefix.device, torch.float32, copy=True)
        scores = process(torch.cat([prefix, drafted], dim=-1), raw.clone()).to(prefix.device)
        if on_scores is not None:
            on_scores(raw, scores)
        if do_sample:
            return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))
        return int(scores.argmax(dim=-1))

    return choose
