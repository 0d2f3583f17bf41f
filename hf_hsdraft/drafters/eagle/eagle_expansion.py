"""Which tokens may follow the nodes of a draft tree, by the states of an EAGLE-3 drafter."""

from __future__ import annotations

import torch

from ...core.tuning import TUNING
from ...trees.tree_builders import Expansion
from ...verify.foresight import Race
from ..base.target_weights import TargetWeights
from .eagle_network import EagleNetwork
from .eagle_texts import DraftedRows


class EagleExpansion(Expansion):
    """Runs the drafter on the nodes that a builder expands, level by level. A node's state is the number of its row.

    Args:
        network: of the drafter.
        weights: what it borrows of the target.
        drafted: the rows of this round.
        depth: greatest depth of a child.
        temperature: of the distributions given.
        race: where the target's draws are foreseen; probabilities are those of winning it then.
    """

    def __init__(
        self,
        network: EagleNetwork,
        weights: TargetWeights,
        drafted: DraftedRows,
        depth: int,
        temperature: float = 1.0,
        race: Race | None = None,
    ) -> None:
        self._network, self._weights, self._drafted = network, weights, drafted
        self.depth, self._temperature, self._race = depth, temperature, race

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, numbers = self.logits(level, tokens, states)
        return self._log_probs(level, logits, self._race), numbers

    def best(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As every `Expansion`; a race is run among the likely tokens of each text alone, as it sorts them."""
        logits, numbers = self.logits(level, tokens, states)
        race, columns = self._race, None
        if race is not None and logits.shape[-1] >= 2 * TUNING.likely_columns:
            columns = logits.amax(dim=1).topk(TUNING.likely_columns, sorted=False).indices
            logits = logits.gather(-1, columns[:, None].expand(-1, logits.shape[1], -1))
            race = race.among(columns)
        totals = scores[..., None] + self._log_probs(level, logits, race)
        values, places = totals.flatten(1).topk(min(count, totals[0].numel()))
        parents, found = places // totals.shape[-1], places % totals.shape[-1]
        return values, found if columns is None else columns.gather(1, found), parents, numbers

    def logits(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits `[B, n, V']` of all children and the numbers `[B, n, 1]` of the nodes' rows.

        Args:
            level, tokens, states: see `Expansion`. The root's row is that of the last accepted pair.
        """
        network, drafted = self._network, self._drafted
        if states is None:
            return network.logits(drafted.states), torch.zeros_like(tokens)[..., None]
        parents = states[..., 0]
        above = drafted.states.gather(1, parents[..., None].expand(-1, -1, drafted.states.shape[-1]))
        depths = torch.full_like(tokens[0], level - 1)
        numbers = drafted.extend(network.fed_back(above), self._weights.embed(tokens), parents, depths)
        return network.logits(drafted.states[:, -tokens.shape[1] :]), numbers[..., None]

    def _log_probs(self, level: int, logits: torch.Tensor, race: Race | None) -> torch.Tensor:
        if race is not None:
            return race(level, logits)
        logits = logits if self._temperature == 1.0 else logits.float() / self._temperature
        return logits.log_softmax(dim=-1, dtype=torch.float32)


def parallel_logits(
    network: EagleNetwork, weights: TargetWeights, drafted: DraftedRows, mask: int, depth: int
) -> torch.Tensor:
    """Returns the logits `[B, depth, V']` of all depths by one forward over rows of the mask token (P-EAGLE).

    Args:
        network, weights, drafted: see `EagleExpansion`.
        mask: the mask token.
        depth: number of depths. The last accepted pair gives the first one.
    """
    root = drafted.states
    if depth > 1:
        depths = torch.arange(1, depth, device=root.device)
        embeds = weights.embed(torch.full_like(depths, mask)).expand(len(root), -1, -1)
        parents = torch.zeros_like(depths).expand(len(root), -1)
        drafted.extend(network.mask_states().expand_as(embeds), embeds, parents, depths, causal=True)
    return network.logits(drafted.states)
