"""A tiny neural n-gram model of a target's text, which refines drafts of independent depths.

It reads the last few tokens through the embedding borrowed from the target, and predicts the next one within the draft
vocabulary by low-rank logits. By default a node costs products of D by 96, 288 by 384, 192 by 64, and 64 by the
columns that are looked at.

Letters in the shapes: D width of the target's embedding, r rank, V' draft vocabulary, S size of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import RMSNorm

_EPS = 1e-6


@dataclass(frozen=True)
class PathLMSizes:
    """Sizes of the model.

    Attributes:
        embedding_size, draft_vocab_size, rank: D, V', r.
        length: number of tokens that it looks back.
        width: what is kept of each of these tokens.
        inner_size: size of the layer that combines them.
    """

    embedding_size: int
    draft_vocab_size: int
    length: int = 3
    width: int = 96
    inner_size: int = 192
    rank: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**22:
                raise ValueError(f"{name}={value!r} is invalid in a refiner's sizes: expected an integer of 1 or more")

    @property
    def state_size(self) -> int:
        return self.length * self.width


class PathLM(nn.Module):
    """A neural n-gram model over the draft vocabulary.

    A *state* holds what is kept of the last tokens, newest first. Tokens before the beginning of a text are zeros.
    """

    def __init__(self, sizes: PathLMSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm = RMSNorm(sizes.embedding_size, _EPS)
        self.read = nn.Linear(sizes.embedding_size, sizes.width, bias=False)
        self.mix = nn.Linear(sizes.state_size, 2 * sizes.inner_size)
        self.down = nn.Linear(sizes.inner_size, sizes.rank, bias=False)
        self.up = nn.Linear(sizes.rank, sizes.draft_vocab_size)

    def advance(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Returns the states `[..., S]` after one more token, from its embedding `[..., D]` and the states before."""
        token = self.read(self.norm(embeds))
        return torch.cat([token, states[..., : -self.sizes.width]], dim=-1)

    def after(self, embeds: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Returns the states `[..., S]` after the last tokens of texts, given as embeddings `[..., length, D]`, newest
        last.

        `known`, bool `[..., length]`, is False before the beginning of a text.
        """
        tokens = self.read(self.norm(embeds)) * known[..., None]
        return tokens.flip(-2).flatten(-2)

    def code(self, states: torch.Tensor) -> torch.Tensor:
        """Returns what the last product multiplies, `[..., r]`, after states `[..., S]`."""
        gate, value = self.mix(states).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the logits `[..., V']` of the next token after states `[..., S]`."""
        return self.up(self.code(states))
