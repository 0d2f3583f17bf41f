"""Whose tokens the chains of a training step follow; all but the text's are methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.methods import Registry
from ...drafters.base.target_weights import TargetWeights
from .loss import ChainLabels, Chains, Pack, sample_chains, true_labels


@dataclass(frozen=True)
class PolicyStep:
    """A training step before its chains are chosen.

    Attributes:
        args: the training arguments.
        seeds: seed of each conversation of the pack.
        rows_per_chunk: number of predictions whose logits may be computed at a time.
    """

    drafter: Any
    target: Any
    weights: TargetWeights
    pack: Pack
    args: Any
    seeds: Sequence[int]
    rows_per_chunk: int

    def sampled(self, starts: torch.Tensor | None = None) -> tuple[Chains, ChainLabels]:
        """Draws chains, see `sample_chains`, and labels them by the text."""
        per_conversation, rolled = self.args.chains_per_conversation, self.args.rolled_fraction
        chains = sample_chains(self.pack, per_conversation, rolled, self.seeds, pad_to_multiple_of=32, starts=starts)
        return chains, true_labels(self.pack, chains, self.drafter.num_draft_steps)


class DataPolicy:
    """Chains that follow the text (`"teacher"`), and the interface of the policies of methods."""

    def check(self, args: Any) -> None:
        """Raises a ValueError for training arguments that do not go with this policy."""

    def chains(self, step: PolicyStep) -> tuple[Chains, ChainLabels]:
        """Returns the chains of a step and their labels."""
        return step.sampled()


DATA_POLICIES: Registry[DataPolicy] = Registry("data_policy", {"teacher": DataPolicy()})
