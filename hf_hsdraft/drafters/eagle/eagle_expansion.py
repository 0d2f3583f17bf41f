"""Which tokens may follow the nodes of a draft tree, by the states of an EAGLE-3 drafter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...common.target_weights import TargetWeights
from ...common.tuning import TUNING
from ...trees.tree_builders import Expansion
from ...verifiers.foresight import Race
from .eagle_network import EagleNetwork
from .eagle_texts import DraftedRows


@dataclass(frozen=True)
class Odds:
    """Log-probabilities of drafted tokens, by logits.

    Attributes:
        temperature: of the distributions given.
        race: where the target's draws are foreseen; probabilities are those of winning it then.
    """

    temperature: float = 1.0
    race: Race | None = None

    def __call__(self, level: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities of the tokens at depth `level`, by logits `[B, n, V']`."""
        if self.race is not None:
            return self.race(level, logits)
        logits = logits if self.temperature == 1.0 else logits.float() / self.temperature
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    def among(self, columns: torch.Tensor) -> Odds:
        """Returns the same for some columns `[B, C]` of each row."""
        return self if self.race is None else Odds(self.temperature, self.race.among(columns))


class LogitsExpansion(Expansion):
    """Children by draft logits.

    Args:
        depth: greatest depth of a child.
        odds: makes log-probabilities of logits.
    """

    def __init__(self, depth: int, odds: Odds) -> None:
        self.depth, self._odds = depth, odds

    def logits(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the logits `[B, n, V']` of the children and the nodes' states, by the arguments of an `Expansion`."""
        raise NotImplementedError

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, states = self.logits(level, tokens, states)
        return self._odds(level, logits), states

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As every `Expansion`; a race is run among the likely tokens of each text alone, as it sorts them."""
        logits, states = self.logits(level, tokens, states)
        odds, columns = self._odds, None
        if odds.race is not None and logits.shape[-1] >= 2 * TUNING.likely_columns:
            columns = logits.amax(dim=1).topk(TUNING.likely_columns, sorted=False).indices
            logits = logits.gather(-1, columns[:, None].expand(-1, logits.shape[1], -1))
            odds = odds.among(columns)
        totals = scores[..., None] + odds(level, logits)
        values, places = totals.flatten(1).topk(min(count, totals[0].numel()))
        width = totals.shape[-1]
        found = places % width
        return values, found if columns is None else columns.gather(1, found), places // width, states


class EagleExpansion(LogitsExpansion):
    """Runs the drafter on the nodes that a builder expands, level by level. A node's state is the number of its row.

    Args:
        network: of the drafter.
        weights: what it borrows of the target.
        drafted: the rows of this round.
        depth, odds: see `LogitsExpansion`.
    """

    def __init__(
        self, network: EagleNetwork, weights: TargetWeights, drafted: DraftedRows, depth: int, odds: Odds
    ) -> None:
        super().__init__(depth, odds)
        self._network, self._weights, self._drafted = network, weights, drafted

    def logits(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        network, drafted = self._network, self._drafted
        if states is None:  # the root's row is that of the last accepted pair
            return network.logits(drafted.states), torch.zeros_like(tokens)[..., None]
        parents = states[..., 0]
        width = drafted.states.shape[-1]
        above = drafted.states.gather(1, parents[..., None].expand(-1, -1, width))
        depths = torch.full_like(tokens[0], level - 1)
        embeds = self._weights.embed(tokens)
        numbers = drafted.extend(network.fed_back(above), embeds, parents, depths, causal=False)
        return network.logits(drafted.states[:, -tokens.shape[1] :]), numbers[..., None]


class ParallelExpansion(LogitsExpansion):
    """All depths by one forward over rows of the mask token (P-EAGLE): no node knows its path.

    Args:
        network, weights, drafted, depth, odds: see `EagleExpansion`.
    """

    def __init__(
        self, network: EagleNetwork, weights: TargetWeights, drafted: DraftedRows, depth: int, odds: Odds
    ) -> None:
        super().__init__(depth, odds)
        root = drafted.states
        if depth > 1:
            batch, _, width = root.shape
            depths = torch.arange(1, depth, device=root.device)
            tokens = torch.full_like(depths, network.config.mask_token_id or 0)
            embeds = weights.embed(tokens).expand(batch, -1, -1)
            states = network.mask_states().expand(batch, depth - 1, width)
            drafted.extend(states, embeds, torch.zeros_like(depths).expand(batch, -1), depths, causal=True)
        self._logits = network.logits(drafted.states)

    def logits(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._logits[:, level - 1 : level], None
