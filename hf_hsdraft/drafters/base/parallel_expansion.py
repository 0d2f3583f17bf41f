"""Expansion of tree nodes for drafters that draft all depths at once.

The logits of all depths exist before the tree is built; the tokens of a path only add a low-rank bias. So a node costs
a few small products, whatever the size of the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ...core.tensors import Transform, biased
from ...core.tuning import TUNING
from ...trees.tree_builders import Expansion
from ...verify.foresight import Race
from .refiners import Refinement


class TokenBias:
    """Low-rank logit bias that the tokens of a path add.

    The *code* of a node is its bias before the last product. Tree builders only gather node states.
    Letters in the shapes: B sequences, n nodes each, S state size, r rank, V' draft vocabulary, C columns.
    """

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Returns the states `[B, n, S]` of nodes with `tokens` `[B, n]`, int64, whose children are at depth `level`.

        `states` `[B, n, S]` are those of their parents; None at level 1, where the nodes are roots.
        """
        raise NotImplementedError

    def code(self, level: int, states: torch.Tensor) -> torch.Tensor | None:
        """Returns the codes `[B, n, r]` of nodes with `states` `[B, n, S]`; None if this level has no bias."""
        raise NotImplementedError

    def up(self, code: torch.Tensor) -> torch.Tensor:
        """Maps codes `[B, n, r]` to biases `[B, n, V']`."""
        raise NotImplementedError

    def among(self, columns: torch.Tensor) -> Transform | None:
        """Returns `up` for `columns` `[B, C]`, int64, of the draft vocabulary only; None if it must compute all."""
        return None


@dataclass(frozen=True)
class _Part:
    """The part of the vocabulary that a beam considers.

    Attributes:
        columns: `[B, C]`, int64; None for all.
        up: maps codes to biases of these columns.
        logits: `[B, depth, C]`.
        reach: `[B, depth, C]`, where the bias applies; None for everywhere.
        refined_up: the refinement's last product for these columns.
    """

    columns: torch.Tensor | None
    up: Transform | None
    logits: torch.Tensor
    race: Race | None
    reach: torch.Tensor | None
    refined_up: Transform | None


@dataclass(frozen=True)
class ParallelExpansion(Expansion):
    """Expands the nodes of a batch, level by level.

    Attributes:
        logits: `[B, depth, V']`, before any token of the path is known.
        bias: of the path's tokens; without it, nodes have no states.
        temperature: of the returned distributions.
        race: with foreseen target draws; probabilities are then those of winning the race.
        reach: `[B, depth, V']`, bool, where the bias applies; None for everywhere.
    """

    logits: torch.Tensor
    bias: TokenBias | None = None
    temperature: float = 1.0
    race: Race | None = None
    reach: torch.Tensor | None = None
    refinement: Refinement | None = None

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.logits.shape[1]

    @property
    def has_states(self) -> bool:  # type: ignore[override]
        return self.bias is not None or self.refinement is not None

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, states = self._known(self._whole, level, tokens, states)
        return self._log_probs(level, logits, self.race), states

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As in `Expansion`; with a large vocabulary, among the columns of `_part` only."""
        columns, race = self._part.columns, self._part.race
        logits, states = self._known(self._part, level, tokens, states)
        if race is not None and columns is None and race.vocab_ids.dim() > 1:  # each row has its part
            columns = self._columns
            logits = logits.gather(-1, columns[:, None].expand(-1, logits.shape[1], -1))
        totals = self._log_probs(level, logits, race) + scores[..., None]
        values, places = totals.flatten(1).topk(min(count, totals[0].numel()))
        parents, found = places // totals.shape[-1], places % totals.shape[-1]
        return values, found if columns is None else columns.gather(1, found), parents, states

    def _known(
        self, part: _Part, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the logits of the children given their paths, and the nodes' states, refinement states first."""
        if self.refinement is None:
            return self._drafted(part, level, tokens, states)
        size, own, model_states = self.refinement.state_size, None, None
        if states is not None:
            model_states, own = states[..., :size], states[..., size:]
        logits, own = self._drafted(part, level, tokens, own)
        model_states = self.refinement.advance(tokens, model_states)
        assert part.refined_up is not None
        logits = self.refinement(level, logits, model_states, part.refined_up)
        return logits, model_states if own is None else torch.cat([model_states, own], dim=-1)

    def _drafted(
        self, part: _Part, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_known`, without the refinement."""
        logits = part.logits[:, level - 1 : level]
        if self.bias is None:
            return logits, None
        states = self.bias.advance(level, tokens, states)
        code = self.bias.code(level, states)
        if code is not None:
            assert part.up is not None
            reach = None if part.reach is None else part.reach[:, level - 1 : level]
            logits = biased(logits, part.up(code), reach)
        return logits, states

    def _log_probs(self, level: int, logits: torch.Tensor, race: Race | None) -> torch.Tensor:
        if race is not None:
            return race(level, logits)
        logits = logits if self.temperature == 1.0 else logits.float() / self.temperature
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    @cached_property
    def _whole(self) -> _Part:
        up = None if self.bias is None else self.bias.up
        refined_up = None if self.refinement is None else self.refinement.among(None)
        return _Part(None, up, self.logits, self.race, self.reach, refined_up)

    @cached_property
    def _part(self) -> _Part:
        """The columns that are likely at any depth before the path's tokens are known.

        A path's tokens seldom raise a token from below these, so this skips most of a level's work. If the bias needs
        all columns, all are kept, but the race runs among the likely ones.
        """
        bias, race = self.bias, self.race
        if self.logits.shape[-1] < 2 * TUNING.likely_columns:
            return self._whole
        up = None if bias is None else bias.among(self._columns)
        if bias is not None and up is None:
            return replace(self._whole, race=None if race is None else race.among(self._columns))
        columns = self._columns[:, None].expand(-1, self.depth, -1)
        race = None if race is None else race.among(self._columns)
        reach = None if self.reach is None else self.reach.gather(-1, columns)
        refined_up = None if self.refinement is None else self.refinement.among(self._columns)
        return _Part(self._columns, up, self.logits.gather(-1, columns), race, reach, refined_up)

    @cached_property
    def _columns(self) -> torch.Tensor:
        """`[B, C]`, the likely columns of each row."""
        most = min(TUNING.likely_columns, self.logits.shape[-1])
        return self.logits.amax(dim=1).topk(most, sorted=False).indices
