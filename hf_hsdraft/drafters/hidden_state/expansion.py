"""Token information for drafted hidden states: which tokens may follow the nodes of a tree, and how likely."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ...common.target_weights import TargetWeights
from ...common.tensors import Transform
from ...common.tuning import TUNING
from ...trees.tree_builders import Expansion as TreeExpansion
from ...verifiers.foresight import Race
from .working_weights import WorkingWeights


@dataclass(frozen=True)
class Expansion(TreeExpansion):
    """Token information for the drafts of a batch: called by a tree builder, level by level.

    Attributes:
        working, weights: of the drafter and of its target.
        logits: `[B, depth, V']`, what the head makes of the drafted states.
        projected: `[B, depth, ...]`, what the injector makes of them.
        since: `[B, 1, S]`, for leftover states (reuse form B) the injector's state before the root: they were drafted
            without the root's token, so it is injected at the first depth too.
        temperature: of the distributions given.
        race: where the target's draws are foreseen; probabilities are those of winning it then.
    """

    working: WorkingWeights
    weights: TargetWeights
    logits: torch.Tensor
    projected: torch.Tensor
    since: torch.Tensor | None = None
    temperature: float = 1.0
    race: Race | None = None

    @classmethod
    def of(
        cls,
        working: WorkingWeights,
        weights: TargetWeights,
        hidden: torch.Tensor,
        logits: torch.Tensor | None = None,
        since: torch.Tensor | None = None,
        temperature: float = 1.0,
        race: Race | None = None,
    ) -> Expansion:
        """Of drafted states `[B, depth, D]`; `logits` where they are not what the head alone makes of them."""
        logits = working.logits(hidden) if logits is None else logits
        return cls(working, weights, logits, working.injector.project(hidden), since, temperature, race)

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.logits.shape[1]

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities `[B, n, V']` of the children at depth `level` of nodes with `tokens` `[B, n]`, and states.

        Args:
            states: of the nodes' parents; `None` for the root, at level 1.
        """
        code, states = self._code(level, tokens, states)
        logits = self.logits[:, level - 1 : level]
        if code is not None:
            logits = logits + self.working.injector.up(code)
        return self._log_probs(level, logits, self.race), states

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The `count` most probable children of all the nodes, see `Expansion` in `trees/tree_builders.py`.

        Of a single text only the likely part of the vocabulary is looked at.
        """
        code, states = self._code(level, tokens, states)
        columns, up, logits, race = self._likely
        logits = logits[:, level - 1 : level]
        if code is not None:
            logits = logits + up(code)
        if race is not None and race.vocab_ids.dim() > 1:  # of each row its own part
            columns = self._columns
            logits = logits.gather(-1, columns[:, None].expand(-1, logits.shape[1], -1))
        totals = self._log_probs(level, logits, race) + scores[..., None]
        values, places = totals.flatten(1).topk(min(count, totals[0].numel()))
        parents, found = places // totals.shape[-1], places % totals.shape[-1]
        if columns is not None:
            found = columns.expand(len(found), -1).gather(1, found)
        return values, found, parents, states

    def _log_probs(self, level: int, logits: torch.Tensor, race: Race | None) -> torch.Tensor:
        if race is not None:
            return race(level, logits)
        logits = logits if self.temperature == 1.0 else logits.float() / self.temperature
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    @cached_property
    def _likely(self) -> tuple[torch.Tensor | None, Transform, torch.Tensor, Race | None]:
        """Likely columns, the injector's last product for them, their logits `[B, depth, C]`, and the race among them.

        The columns are `[1, C]`; `None` for all.

        For a single text the tokens that are likely at any depth before the path's tokens are known: those seldom lift
        one from further below, and most of the work of a level is left out. Texts of a batch share no such part; the
        race is run among each one's own.
        """
        up = self.working.injector.up
        if self.logits.shape[-1] < 2 * TUNING.likely_columns:
            return None, up, self.logits, self.race
        of_outputs = getattr(up, "of", None)  # a product may be able to make some of its outputs alone
        if len(self.logits) > 1 or of_outputs is None:
            return None, up, self.logits, None if self.race is None else self.race.among(self._columns)
        [columns] = self._columns
        race = None if self.race is None else self.race.among(columns)
        return self._columns, of_outputs(columns), self.logits.index_select(-1, columns), race

    @cached_property
    def _columns(self) -> torch.Tensor:
        """`[B, C]`, the likely columns of each row."""
        most = min(TUNING.likely_columns, self.logits.shape[-1])
        return self.logits.amax(dim=1).topk(most, sorted=False).indices

    def _code(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The injector's code `[B, n, rank]`, if there is anything to inject at this level, and its new states."""
        injector = self.working.injector
        states = injector.advance(self.weights.embed(tokens), self.since if level == 1 else states)
        if level == 1 and self.since is None:
            return None, states
        return injector.code(self.projected[:, level - 1 : level], states), states
