"""Token information: what the tokens of a path tell about the token that follows it, as a logit bias of low rank.

An injector's *state* is what it knows of a path after reading its last token.

So drafted states that were not used can be used again ("Make Every Draft Count", resampling). With a tokens accepted
and the bonus token after them, g_d with d > a is still a prediction: of the token at depth index d - a - 1 of the next
round. It was drafted without the tokens accepted since, so the injector is told them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import RMSNorm, best_of, biased
from .configuration_hsdraft import HSDraftConfig


class Injector(nn.Module):
    """What all injectors share.

    Attributes:
        up: from a node's code `[..., rank]` to the logit bias `[..., V']`.
    """

    up: Any

    def advance(self, embeds: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """States `[N, ...]` after the tokens with embeddings `embeds` `[N, D]`; `states=None` starts a path."""
        raise NotImplementedError

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is needed of drafted states `[..., D]`, whatever the path; computed once for all nodes of a depth."""
        raise NotImplementedError

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The bias before its last product, `[N, rank]`, of nodes in `states` `[N, ...]`."""
        raise NotImplementedError

    def reach(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Where the bias changes draft logits `[..., V']`: `[..., V']`, bool; `None` for everywhere.

        Args:
            logits: of some drafted states, as the head makes them.
        """
        return None

    def told(self, logits: torch.Tensor, hidden: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The logits `[N, V']` of drafted states `hidden` `[N, D]`, told of the paths in `states` `[N, ...]`."""
        return biased(logits, self(hidden, states), self.reach(logits))

    def forward(self, hidden: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logit bias `[N, V']` for the children of nodes in `states`, drafted from `hidden` `[N or 1, D]`."""
        return self.up(self.code(self.project(hidden), states))


class LowRankInjector(Injector):
    """Token information as a low-rank logit bias, W2 W1 e(parent) ("Make Every Draft Count", token injection)."""

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.target_hidden_size, config.rms_norm_eps)
        self.down = nn.Linear(config.target_hidden_size, config.injector_rank, bias=False)
        self.up = nn.Linear(config.injector_rank, config.draft_vocab_size, bias=False)

    def advance(self, embeds: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.down(self.norm(embeds))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return states


class PathInjector(Injector):
    """Token information through a gated network on hidden state, parent token and the path from the root.

    A small recurrent state reads the path's tokens; a gated layer combines it with the drafted hidden state and the
    parent's embedding. What comes out is a rank-r logit bias, so a node costs as little as in `LowRankInjector`.
    """

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        size = config.injector_hidden_size
        self.token_norm = RMSNorm(config.target_hidden_size, config.rms_norm_eps)
        self.token_proj = nn.Linear(config.target_hidden_size, size, bias=False)
        self.update = nn.Linear(2 * size, 2 * size)
        self.hidden_proj = nn.Linear(config.hidden_size, 4 * size, bias=False)
        self.state_proj = nn.Linear(2 * size, 4 * size, bias=False)
        self.down = nn.Linear(2 * size, config.injector_rank, bias=False)
        self.up = nn.Linear(config.injector_rank, config.draft_vocab_size, bias=False)

    def advance(self, embeds: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        tokens = self.token_proj(self.token_norm(embeds))
        size = tokens.shape[-1]
        path = torch.zeros_like(tokens) if states is None else states[..., size:]
        gate, candidate = self.update(torch.cat([tokens, path], dim=-1)).chunk(2, dim=-1)
        path = torch.lerp(path, candidate.tanh(), gate.sigmoid())
        return torch.cat([tokens, path], dim=-1)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.hidden_proj(hidden)

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        gate, value = (projected + self.state_proj(states)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class SelectorInjector(LowRankInjector):
    """Token information for the best candidates of a depth alone, by pairs of tokens (DFlash2, candidate selector).

    With A = W1 e(parent), the bias of candidate c is the sum of A * (P g) * B[c] over the rank, g the drafted state. In
    DFlash2 A is a table of the vocabulary, and only candidates can be chosen. Here the embedding takes the place of the
    table, and other tokens keep their own logits, so that any divergence from the target is finite.
    """

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_proj = nn.Linear(config.hidden_size, config.injector_rank, bias=False)
        self.top_k = min(config.injector_top_k, config.draft_vocab_size)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.hidden_proj(self.hidden_norm(hidden))

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return projected * states

    def reach(self, logits: torch.Tensor) -> torch.Tensor | None:
        return best_of(logits, self.top_k)


INJECTORS: dict[str, type[Injector]] = {
    "low_rank": LowRankInjector,
    "path": PathInjector,
    "selector": SelectorInjector,
}


# Maps a token and the injector's state before it (`None` at the start of a path) to the state after it.
Advance = Callable[[int, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Leftover:
    """Drafted states that still predict positions ahead, of one text.

    Attributes:
        hidden: `[K', D]`, g_{a+1} .. g_{K-1}.
        path: the tokens that were accepted since these states were drafted, from their root on.
    """

    hidden: torch.Tensor
    path: tuple[int, ...]

    @classmethod
    def of(cls, drafted: torch.Tensor | None, root: int, accepted: Sequence[int]) -> Leftover | None:
        """What is left of states `[K, D]` drafted from `root`, of which `accepted` tokens were right."""
        if drafted is None or len(drafted) <= len(accepted) + 1:
            return None
        return cls(drafted[len(accepted) + 1 :], (root, *accepted))

    def since(self, advance: Advance) -> torch.Tensor:
        """The injector's state after the path, `[1, S]`."""
        state = None
        for token in self.path:
            state = advance(token, state)
        assert state is not None
        return state


def ensemble(
    logits: torch.Tensor,
    leftover: Leftover,
    root: int,
    weight: float,
    head: Callable[[torch.Tensor], torch.Tensor],
    injector: Injector,
    advance: Advance,
) -> None:
    """Form A: the old logits join the new ones `[depth, V']`, in place, each at its own position of the text.

    Args:
        root: the last accepted token. The new state at the first depth has read it; the old one is told it.
        weight: of the old logits, the new ones weighing 1.
        head: maps drafted states to draft logits.
        injector: of the drafter.
    """
    hidden = leftover.hidden[: len(logits)]
    old = head(hidden)
    told = injector.told(old[:1], hidden[:1], advance(root, leftover.since(advance)))
    old = torch.cat([told, old[1:]])
    logits[: len(old)] = (logits[: len(old)] + weight * old) / (1.0 + weight)
