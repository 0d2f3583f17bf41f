"""Chains that leave their texts, read as branches of these in one forward of a language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Branches:
    """The rows of a forward over T tokens of texts and, behind them, k further tokens of each of S chains.

    A token of a chain sees its text up to the chain, and the chain.
    """

    seen: torch.Tensor  # `[N, N]`, bool, with N = T + S * k, True where a row may look at a column
    positions: torch.Tensor  # `[N]`, int64, position of each row in its text
    chain: torch.Tensor  # `[N]`, int64, the chain that a row belongs to; -1 for a token of a text

    @classmethod
    def of(cls, position_ids: torch.Tensor, document_ids: torch.Tensor, starts: torch.Tensor, count: int) -> Branches:
        """Makes the rows.

        Args:
            position_ids: `[T]`, int64, position of each token in its text.
            document_ids: `[T]`, int64, the text of each token.
            starts: `[S]`, int64, position i of each chain in the pack. Its first further token follows x_{i+1}.
            count: number k of further tokens of a chain.
        """
        every = torch.arange(len(position_ids), device=starts.device)
        text = (every[None] <= every[:, None]) & (document_ids[None] == document_ids[:, None])
        prefix = (every[None] <= starts[:, None] + 1) & (document_ids[None] == document_ids[starts, None])
        chain = torch.arange(len(starts), device=starts.device).repeat_interleave(count)
        depth = torch.arange(count, device=starts.device).repeat(len(starts))
        own = (chain[None] == chain[:, None]) & (depth[None] <= depth[:, None])
        seen = torch.cat(
            [torch.cat([text, text.new_zeros(len(every), len(chain))], dim=1), torch.cat([prefix[chain], own], dim=1)]
        )
        positions = torch.cat([position_ids, position_ids[starts][chain] + 2 + depth])
        return cls(seen, positions, torch.cat([torch.full_like(every, -1), chain]))
