"""Base of the networks that tell drafted depths the tokens before them: a logit bias of low rank.

Depths that are drafted at once know no token before them. A node's *state* summarises its path, and its *code* is the
bias of its children before the last product, `up`.

Letters in the shapes: N nodes, S state size, D hidden size, r rank, V' draft vocabulary, C columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.tensors import Transform


class TokenHead(nn.Module):
    """Base of token heads."""

    reads_embeds = False  # whether `advance` gets the target's embeddings `[..., D]` in place of tokens
    needs_hidden = False  # whether a node's state depends on the drafted state that proposed it
    free_depths = 0  # number of depths, from the first on, without a bias
    up: Any  # maps codes `[..., r]` to biases `[..., V']`

    def advance(
        self, inputs: torch.Tensor, states: torch.Tensor | None, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns states `[N, S]` after tokens `[N]`, int64, from those before them; None starts a path.

        `hidden` `[N, D]` are the drafted states that proposed the tokens, if needed and known.
        """
        raise NotImplementedError

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what depends on drafted states `[..., D]` only; computed once for all nodes of a depth."""
        raise NotImplementedError

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Returns codes `[N, r]` of nodes in `states` `[N, S]`; `projected` is of their children's drafted state."""
        raise NotImplementedError

    def among(self, columns: torch.Tensor) -> Transform | None:
        """Returns `up` for `columns` `[B, C]`, int64, of the draft vocabulary only; None if it must compute all."""
        return None

    def forward(self, hidden: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logit bias `[N, V']` for the children of nodes in `states`, drafted from `hidden` `[N or 1, D]`."""
        return self.up(self.code(self.project(hidden), states))
