"""The session of a hidden-state drafter as the package runs it, and as transformers' own assisted decoding takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ...core.draft_tree import DraftTree
from ...verify.foresight import Foresight
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask
from ..base.target_weights import TargetWeights
from .draft_session import HSDraftSession
from .network import HSDraftNetwork
from .quick_weights import QuickWeights
from .roll_out import RollOut
from .target_match import warn_of_poor_guesses
from .working_weights import WorkingWeights


class HSCandidateGenerator(HSDraftSession, CandidateGenerator):
    """Drafts trees (or chains) for the texts of a batch from the target's hidden states.

    As a `CandidateGenerator` it also drafts chains for transformers' own assisted decoding, from the target's hidden
    states alone: n-grams and sizes by cost belong to `generate(assistant_model=drafter)`.

    Args:
        drafter, weights, options, batch_size, working, foresight, roll_out: see [`HSDraftSession`]; by default it
            multiplies by [`QuickWeights`].
        target: whose hidden states these are; told of drafts that do poorly when the call ends.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: HSDraftNetwork,
        weights: TargetWeights,
        options: DraftOptions | None = None,
        *,
        batch_size: int = 1,
        working: WorkingWeights | None = None,
        foresight: Foresight | None = None,
        roll_out: RollOut | None = None,
        target: Any = None,
    ) -> None:
        working = working or QuickWeights.of(drafter, weights.head)
        super().__init__(
            drafter,
            weights,
            options,
            batch_size=batch_size,
            working=working,
            foresight=foresight,
            roll_out=roll_out,
        )
        self.model_kwargs_overrides = {"output_hidden_states": list(drafter.config.target_tap_layers)}
        self.guesses = self.right_guesses = 0  # drafts whose first guess is known to be right or wrong; right ones
        self._drafted: dict[int, DraftTree] = {}  # of the last round, by text
        self._target = target
        self._started = False  # in transformers' own assisted decoding

    def draft(self, asks: Sequence[Ask] | None = None) -> list[DraftTree]:
        """Drafts the trees that follow the last tokens that were read.

        Args:
            asks: for all texts, as deep as the options say, by default.
        """
        if asks is None:
            rows = len(self._rows)
            options = self._options.shared_by(rows)
            sizes = options.depth, options.tree_size, options.beam_width
            asks = [Ask(row, each.root, *sizes) for row, each in enumerate(self._rows)]
        trees = super().draft(asks)
        self._drafted = {ask.row: tree for ask, tree in zip(asks, trees, strict=True)}
        return trees

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            if each.row in self._drafted:
                self._count_guess(self._drafted[each.row], each.tokens[0])
        self._drafted = {}
        super().observe(news)

    def end(self) -> None:
        if self._target is not None:
            warn_of_poor_guesses(self._target, self.drafter, self.guesses, self.right_guesses)

    def _count_guess(self, tree: DraftTree, token: int) -> None:
        first = [node for node, depth in enumerate(tree.depths) if depth == 1]
        if first:
            self.guesses += 1
            self.right_guesses += tree.tokens[max(first, key=lambda node: tree.scores[node])] == token

    # transformers' contract, for its own `_assisted_decoding`: a chain, verified against the target's own choices.

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates for transformers' assisted decoding: `input_ids` `[1, length]` and a drafted chain after it.

        Returns:
            ids `[1, length + drafted]` and `None`: without draft logits the target's own choices are compared, which is
            exact both greedily and sampling.
        """
        if is_first_iteration:
            return input_ids, None
        states = model_outputs.hidden_states
        taps = torch.cat([states[layer][0] for layer in self.drafter.config.target_tap_layers], dim=-1)
        length = input_ids.shape[1]
        # The first forward read the prompt, or the part of it that was not cached; later ones a chain.
        rows = n_last_matches + 1 if self._started else len(taps)
        mask = (model_kwargs or {}).get("attention_mask")
        attended = torch.ones(length - 1) if mask is None else mask[0, : length - 1].cpu()
        positions = attended.long().cumsum(0)[-rows:] - 1
        real = torch.nonzero(attended[-rows:]).flatten()
        self.settle(input_ids[0, length - 1 - n_last_matches : length - 1].tolist())
        self.read(taps[real], input_ids[0, length - rows :][real], positions[real])
        if self._refiner is not None:
            text = [*input_ids[0, : length - 1][attended.bool()].tolist(), int(input_ids[0, -1])]
            self._refiner.observe(0, text[-rows:] if self._started else text)
        self._started = True
        [tree] = self.draft()
        best_leaf = max(range(len(tree)), key=lambda node: (tree.depths[node], tree.scores[node]))
        chain = [tree.tokens[node] for node in tree.path(best_leaf)]
        drafted = torch.tensor([chain], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, drafted], dim=-1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: the depth of the draft is set by `num_assistant_tokens`."""
