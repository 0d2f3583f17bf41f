"""Drafts from frames with a blank, as in speech recognition (CTC; "CTC drafter", section 3).

The drafter has K frames. Each predicts a token or nothing, the *blank*. To collapse the frames, a token repeated in
consecutive frames counts once, then blanks are dropped. So a token need not be at the depth of its frame.

Many sequences of frames collapse to the same text. The tree to verify is the trie of these texts: depths, and with
them the positions at which the target reads the nodes, are those after the collapse. The probability of a node is the
sum over all sequences of frames whose text begins with the node's path. No sequence is enumerated: the probability
that the first t frames say a path follows from that of its parent, as in prefix search ("Connectionist Temporal
Classification", section 3.2). So the sums are over all sequences, not only over those of each frame's best tokens.

Letters in the shapes: B texts, n nodes of each, K frames, V' draft vocabulary, C columns of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ...core.draft_tree import Expansion
from ...core.tuning import LIKELY_COLUMNS
from ...verify.foresight import Race

_LEAST = -60.0  # log-probability of a frame's symbol, below which differences mean nothing


@dataclass(frozen=True)
class CollapsedFrames(Expansion):
    """Predictions for the children of nodes, from collapsed frames; called level by level by a tree builder.

    The state of a node, `[2 K + 1]`, says how its path can have been said. Entry t of K holds the log-probability that
    the first t frames say exactly the path, given that the text begins with the path. The next K entries hold the same
    for the case that the last of these frames is a blank. The last entry is the node's column.

    If `normalised`, the probabilities of a node's children sum to 1, as sampled nodes need. Otherwise the remainder is
    the probability that the frames say nothing more.
    """

    frames: torch.Tensor  # `[B, K, V' + 1]`, float32, log-probabilities of each frame; the blank is the last column
    vocab_ids: torch.Tensor  # `[V']`, int64, the token id of each column, ascending
    depth: int  # greatest depth of a child, at most K
    normalised: bool = False
    temperature: float = 1.0  # of normalised distributions
    race: Race | None = None  # where the target's draws are foreseen; probabilities are then those of winning it

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        states = self.advance(level, tokens, states)
        return self._log_probs(level, self.children(states), self.race), states

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the `count` best children, see `Expansion`; of large vocabularies among likely tokens only."""
        columns = self._columns
        if columns is None:
            return super().best(level, tokens, states, scores, count)
        states = self.advance(level, tokens, states)
        race = None if self.race is None else self.race.among(columns)
        totals = self._log_probs(level, self.children(states, columns), race) + scores[..., None]
        values, places = totals.flatten(1).topk(min(count, totals[0].numel()))
        width = totals.shape[-1]
        return values, columns.gather(1, places % width), places // width, states

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Returns the states `[B, n, 2 K + 1]` of nodes with tokens `[B, n]` whose children are at depth `level`.

        `states` are those of their parents; `None` at level 1, where the node is the root.
        """
        blanks = self._frames[..., -1].double()
        silent = blanks.cumsum(dim=-1)[:, None]  # nothing but blanks
        if states is None:
            none = torch.nn.functional.pad(silent[..., :-1], (1, 0))
            return torch.cat([none, none, torch.full_like(none[..., :1], -1)], dim=-1).float()
        columns = self._columns_of(tokens)
        said, after_blank, last = _parts(states)
        # Frames that say the token; one that repeats its parent's needs a blank between.
        own = self._said(columns).double()
        first = own + torch.where((columns == last)[..., None], after_blank, said).double()
        first = first - _finite(first.logsumexp(dim=-1, keepdim=True))
        held = own.cumsum(dim=-1)
        token = held + (first - held).logcumsumexp(dim=-1)
        blank = silent + _later((token - silent).logcumsumexp(dim=-1))
        said = _later(torch.logaddexp(token, blank))
        return torch.cat([said, _later(blank), columns[..., None].double()], dim=-1).float()

    def children(self, states: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """Returns log-probabilities `[B, n, V']` that a node's path is followed by each token.

        With `columns`, int64 `[B, C]`, returns those of these columns only, `[B, n, C]`.
        """
        said, after_blank, last = _parts(states)
        frames = self._probabilities
        if columns is not None:
            frames = frames.gather(-1, columns[:, None].expand(-1, frames.shape[1], -1))
        greatest = _finite(said.amax(dim=-1, keepdim=True))
        found = ((said - greatest).exp() @ frames).log() + greatest
        again = (self._said(last.clamp(min=0)) + after_blank).logsumexp(dim=-1, keepdim=True)
        every = torch.arange(found.shape[-1], device=found.device) if columns is None else columns[:, None]
        return torch.where(every == last[..., None], again, found)

    def _log_probs(self, level: int, children: torch.Tensor, race: Race | None) -> torch.Tensor:
        if race is not None:
            won = race(level, children) + children.logsumexp(dim=-1, keepdim=True)
            return won.masked_fill(won.isnan(), -torch.inf)  # of a node without children
        if not self.normalised:
            return children
        children = (children / self.temperature).log_softmax(dim=-1)
        return children.masked_fill(children.isnan(), -torch.inf)

    @cached_property
    def _frames(self) -> torch.Tensor:
        return self.frames.float().clamp(min=_LEAST)

    @cached_property
    def _probabilities(self) -> torch.Tensor:
        """`[B, K, V']`, of the tokens."""
        return self._frames[..., :-1].exp()

    @cached_property
    def _columns(self) -> torch.Tensor | None:
        """`[B, C]`, the columns that frames say most often; `None` for a small vocabulary."""
        size = self.frames.shape[-1] - 1
        if size < 2 * LIKELY_COLUMNS:
            return None
        return self._probabilities.sum(dim=1).topk(LIKELY_COLUMNS, sorted=False).indices

    def _columns_of(self, tokens: torch.Tensor) -> torch.Tensor:
        size = len(self.vocab_ids)
        places = torch.searchsorted(self.vocab_ids, tokens.contiguous()).clamp(max=size - 1)
        return torch.where(self.vocab_ids[places] == tokens, places, size + 1)

    def _said(self, columns: torch.Tensor) -> torch.Tensor:
        """Returns the log-probability `[B, n, K]` of the tokens in columns `[B, n]` at each frame."""
        known = columns < self.frames.shape[-1]
        batch = torch.arange(len(columns), device=columns.device)[:, None]
        said = self._frames.transpose(1, 2)[batch, columns.masked_fill(~known, 0)]
        return said.masked_fill(~known[..., None], _LEAST)


def _parts(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits states into two of `[B, n, K]`, and columns `[B, n]`."""
    frames = states.shape[-1] // 2
    return states[..., :frames], states[..., frames:-1], states[..., -1].long()


def _later(x: torch.Tensor) -> torch.Tensor:
    """Shifts `[..., K]` by one frame."""
    return torch.nn.functional.pad(x[..., :-1], (1, 0), value=-torch.inf)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Replaces infinite entries by 0, since they cannot be subtracted from."""
    return x.masked_fill(x.isinf(), 0.0)
