"""What tests of sessions need: prompts of different lengths, and news of a text as an engine tells them."""

from __future__ import annotations

import torch
from oracles.plain_texts import padded as padded

from hf_hsdraft.core import kept
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.drafters.base.tree_session import ParallelExpansion
from hf_hsdraft.drafters.hidden_state.draft_session import HSDraftSession, bias_of


def forget(name: str) -> None:
    """Forgets what calls have learnt of all objects, as a new process has."""
    for records in kept._records.values():
        records.pop(name, None)


def expansion_of(working, weights, hidden: torch.Tensor, **further) -> ParallelExpansion:
    """Expands drafted states `[B, depth, D]` of a hidden-state drafter."""
    logits = working.logits(hidden)
    return ParallelExpansion(logits, bias_of(working, weights, hidden, logits), **further)


def borrow(drafter, target):
    return drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())


def news(drafter, target, text: list[int], start: int, end: int, row: int = 0) -> Accepted:
    """What a session is told of positions `start` to `end` of a text."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap][0] for tap in drafter.taps_of(target)], dim=-1)
    tokens = torch.tensor(text)
    return Accepted(
        row=row,
        tokens=text[start + 1 : end + 1],
        taps=taps[start:end],
        positions=torch.arange(start, end),
        following=tokens[start + 1 : end + 1],
    )


def pairs_of(drafter, length: int, seed: int = 0, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random hidden states, embeddings and positions of a text, as a hidden-state drafter reads them."""
    generator, size = torch.Generator().manual_seed(seed), drafter.config.target_hidden_size
    taps = torch.randn(length, size * len(drafter.config.target_tap_layers), generator=generator)
    return taps, torch.randn(length, size, generator=generator), torch.arange(first, first + length)


def hidden_session(drafter, weights, rows: int = 1) -> HSDraftSession:
    """A session of no call, by the drafter's modules as they are."""
    return HSDraftSession(drafter, weights, Call(None, rows, DraftOptions.of(drafter)))


def accept(session, taps, following, positions, accepted=(), row: int = 0) -> None:
    """Lets a session observe pairs, after which the tokens `accepted` and the last of `following` are new."""
    session.observe([Accepted(row, [*accepted, int(following[-1])], taps, positions, following)])


def drafted_by(session: HSDraftSession) -> list[DraftTree]:
    """The trees after the last tokens that a session has read, as deep as its options say."""
    options = session._options.shared_by(len(session._rows))
    asks = [
        Ask(row, each.root, options.depth, options.tree_size, options.beam_width)
        for row, each in enumerate(session._rows)
    ]
    return session.draft(asks)
