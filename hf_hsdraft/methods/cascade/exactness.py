"""What `hsdraft exactness` tests of cascades: a middle model passes on what it accepts of another drafter's drafts."""

from __future__ import annotations

import torch

from ...bench.exactness import DRAFTED, DRAWN_DRAFTS, ROOT, Table
from ...core.draft_tree import DraftTree
from .held_chain import Choice, HeldChain

_CHOICE = Choice(1.0, DRAFTED)


def cascaded(table: Table) -> DraftTree:
    """Returns the chain of two tokens that the table's drafter holds, in the place of a middle model.

    The level below drafts without looking at it, as n-grams do: always the next higher token.
    """
    held, depth = HeldChain(), 2
    while len(held.tokens) < depth:
        tokens = [*held.tokens[-1:], *([] if held.tokens else [ROOT])]
        tokens += [(tokens[0] + each) % DRAFTED for each in range(1, depth - len(held.tokens))]
        places = range(len(tokens))
        draft = DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(places), (0.0,) * len(tokens))
        logits = torch.stack([table.drafts[len(held.tokens) + place][tokens[place]] for place in places])
        held.add(draft, logits, _CHOICE)
    return held.tree(ROOT, _CHOICE)


DRAWN_DRAFTS["cascade"] = cascaded
