"""The drafting state of one `generate()` call: what the drafter has read, and what it drafted but could not use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator

from .draft_tree import DraftTree, build_beam_tree, merge_trees
from .modeling_hsdraft import DraftContext, HSDrafter, TargetWeights

REUSES = ("none", "ensemble", "resample")


@dataclass(frozen=True)
class DraftOptions:
    """Drafting options of one call, read from `drafter.generation_config`.

    Attributes:
        depth: greatest depth of the tree, `num_assistant_tokens`.
        tree_size, beam_width: see `build_beam_tree`.
        threshold: `assistant_confidence_threshold`, the least probability of a drafted path.
        reuse: `"none"`, `"ensemble"` or `"resample"`.
        reuse_weight: weight of the old logits in `"ensemble"`, the new ones weighing 1.
    """

    depth: int
    tree_size: int
    beam_width: int
    threshold: float
    reuse: str
    reuse_weight: float

    @classmethod
    def of(cls, drafter: HSDrafter, call: GenerationConfig | None = None) -> DraftOptions:
        """Reads and checks the options.

        Args:
            call: generation configuration of the call. What it sets goes before what the drafter says; transformers has
                filled in its own defaults by then, and those count as not set.

        Raises:
            ValueError: an option is unknown or out of range; the message names it and what would be right.
        """
        config = drafter.generation_config
        limit = drafter.config.num_draft_steps
        defaults = drafter.default_generation_config()
        known = {*vars(defaults), "transformers_version"}
        unknown = sorted(name for name in vars(config) if name not in known and not name.startswith("_"))
        if unknown:
            raise ValueError(f"unknown drafting options on drafter.generation_config: {', '.join(unknown)}")

        library = GenerationConfig._get_default_generation_params()

        def option(name: str) -> Any:
            given = getattr(call, name, None)
            values = (None if given == library.get(name) else given, getattr(config, name, None))
            return next((value for value in values if value is not None), getattr(defaults, name))

        for name, most in (("num_assistant_tokens", limit), ("tree_size", None), ("beam_width", None)):
            value = option(name)
            if not isinstance(value, int) or value < 1 or (most is not None and value > most):
                wanted = "an integer of 1 or more" if most is None else f"1 to {most}, the steps it was trained for"
                raise ValueError(f"{name}={value!r} is invalid: expected {wanted}")
        threshold, reuse, weight = map(option, ("assistant_confidence_threshold", "reuse", "reuse_weight"))
        if not isinstance(threshold, int | float) or not 0.0 <= threshold < 1.0:
            raise ValueError(f"assistant_confidence_threshold={threshold!r} is invalid: expected a probability below 1")
        if reuse not in REUSES:
            raise ValueError(f"reuse={reuse!r} is invalid: expected one of {', '.join(REUSES)}")
        if not isinstance(weight, int | float) or weight < 0.0:
            raise ValueError(f"reuse_weight={weight!r} is invalid: expected a number of 0 or more")
        return cls(
            depth=option("num_assistant_tokens"),
            tree_size=option("tree_size"),
            beam_width=option("beam_width"),
            threshold=threshold,
            reuse=reuse,
            reuse_weight=weight,
        )


@dataclass(frozen=True)
class Expansion:
    """Token information for one draft: called by a tree builder, level by level.

    Attributes:
        hidden: `[depth, D]`, the drafted states; logits: `[depth, V']`, what the head makes of them.
        since: for leftover states (reuse form B), the injector's state before the root: they were drafted without the
            root's token, so it is injected at the first depth too.
    """

    drafter: HSDrafter
    weights: TargetWeights
    hidden: torch.Tensor
    logits: torch.Tensor
    since: torch.Tensor | None = None

    @property
    def depth(self) -> int:
        return len(self.hidden)

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities `[N, V']` of the children at depth `level` of nodes with `tokens` `[N]`, and their states.

        Args:
            states: of the nodes' parents; `None` for the root, at level 1.
        """
        embeds = self.weights.embed(tokens)
        states = self.drafter.injector.advance(embeds, self.since if level == 1 else states)
        row = slice(level - 1, level)
        logits = self.logits[row]
        if level > 1 or self.since is not None:
            logits = logits + self.drafter.injector(self.hidden[row], states)
        return logits.float().log_softmax(dim=-1), states


class HSCandidateGenerator(CandidateGenerator):
    """Drafts trees (or chains) for one sequence from the target's hidden states.

    `read` takes what the target accepted, `draft` returns the next tree, `settle` says how much of it was accepted.
    As a `CandidateGenerator` it also drafts chains for transformers' own assisted decoding.

    Args:
        drafter: weights and configuration; not changed.
        weights: what the drafter borrows of the target, see `HSDrafter.borrow`.
        options: `drafter.generation_config`'s by default.
    """

    requires_model_outputs = True

    def __init__(self, drafter: HSDrafter, weights: TargetWeights, options: DraftOptions | None = None) -> None:
        self.drafter = drafter
        self.weights = weights
        self.options = options or DraftOptions.of(drafter)
        self.model_kwargs_overrides = {"output_hidden_states": list(drafter.config.target_tap_layers)}
        self._context: DraftContext | None = None
        self._pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._root = -1  # token the last tree grew from
        self._drafted: torch.Tensor | None = None  # [K, D] of the last round, g_0 .. g_{K-1}
        self._leftover: torch.Tensor | None = None  # [K', D], still predictions of the positions ahead
        self._leftover_path: list[int] = []  # tokens accepted since those were drafted, from their root on

    def read(self, taps: torch.Tensor, next_tokens: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Queues accepted pairs for the trunk; they are read by the next `draft` in one forward.

        Args:
            taps: `[n, taps * D]`, h_i of the accepted positions i.
            next_tokens: `[n]`, the accepted tokens x_{i+1}.
            position_ids: `[n]`, the positions i.
        """
        device, dtype = self.drafter.device, self.drafter.dtype
        self._pending.append((taps.to(device, dtype), next_tokens.to(device), position_ids.to(device)))

    def draft(self, max_depth: int | None = None) -> DraftTree:
        """Drafts the tree that follows the last token given to `read`.

        Args:
            max_depth: no use in drafting deeper than this; 0 gives the root alone.
        """
        taps, tokens, positions = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
        root = int(tokens[-1])
        depth = self.options.depth if max_depth is None else min(self.options.depth, max_depth)
        if depth < 1:
            return DraftTree.root(root)
        self._pending.clear()
        output = self.drafter(taps, self.weights.embed(tokens), positions, context=self._context, num_draft_steps=depth)
        self._context = output.context
        hidden = torch.cat(output.hidden_states)
        self._root, self._drafted = root, hidden
        logits = self.drafter.logits(hidden, self.weights)
        leftover, self._leftover = self._leftover, None
        if leftover is None or self.options.reuse == "none":
            return self._grow(root, self._expansion(hidden, logits))
        leftover = leftover[:depth]
        old_logits = self.drafter.logits(leftover, self.weights)
        if self.options.reuse == "ensemble":
            return self._grow(root, self._expansion(hidden, self._ensemble(logits, leftover, old_logits, root)))
        resampled = self._grow(root, self._expansion(leftover, old_logits, since=self._path_state()))
        return merge_trees(self._grow(root, self._expansion(hidden, logits)), resampled, self.options.tree_size)

    def settle(self, accepted: Sequence[int]) -> None:
        """Says which drafted tokens were accepted; later hidden states stay predictions of their positions.

        With a tokens accepted and the bonus after them, g_d with d > a still predicts the token at depth index
        d - a - 1 of the next round ("Make Every Draft Count", resampling).
        """
        drafted, self._drafted = self._drafted, None
        self._leftover = None
        if drafted is not None and self.options.reuse != "none" and len(drafted) > len(accepted) + 1:
            self._leftover = drafted[len(accepted) + 1 :]
            self._leftover_path = [self._root, *accepted]

    def _ensemble(
        self, logits: torch.Tensor, leftover: torch.Tensor, old_logits: torch.Tensor, root: int
    ) -> torch.Tensor:
        """Reuse form A: the old round's logits join the new ones at the same absolute position."""
        # The new state at the first depth has read the root's token; the old one is told it by the injector.
        state = self._advance(torch.tensor([root], device=logits.device), self._path_state())
        first = old_logits[:1] + self.drafter.injector(leftover[:1], state)
        old_logits = torch.cat([first, old_logits[1:]])
        weight, shared = self.options.reuse_weight, len(old_logits)
        joined = (logits[:shared] + weight * old_logits) / (1.0 + weight)
        return torch.cat([joined, logits[shared:]])

    def _path_state(self) -> torch.Tensor | None:
        """The injector's state after the tokens accepted since the leftover states were drafted."""
        state = None
        for token in self._leftover_path:
            state = self._advance(torch.tensor([token], device=self.drafter.device), state)
        return state

    def _expansion(self, hidden: torch.Tensor, logits: torch.Tensor, since: torch.Tensor | None = None) -> Expansion:
        return Expansion(self.drafter, self.weights, hidden, logits, since)

    def _grow(self, root: int, expansion: Expansion) -> DraftTree:
        return build_beam_tree(
            expansion,
            root,
            self.weights.vocab_ids,
            depth=expansion.depth,
            beam_width=self.options.beam_width,
            tree_size=self.options.tree_size,
            threshold=self.options.threshold,
        )

    def _advance(self, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.drafter.injector.advance(self.weights.embed(tokens), states)

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
        rows = len(taps) if self._context is None else n_last_matches + 1
        mask = (model_kwargs or {}).get("attention_mask")
        attended = torch.ones(length - 1) if mask is None else mask[0, : length - 1].cpu()
        positions = attended.long().cumsum(0)[-rows:] - 1
        real = torch.nonzero(attended[-rows:]).flatten()
        self.settle(input_ids[0, length - 1 - n_last_matches : length - 1].tolist())
        self.read(taps[real], input_ids[0, length - rows :][real], positions[real])
        tree = self.draft()
        best_leaf = max(range(len(tree)), key=lambda node: (tree.depths[node], tree.scores[node]))
        chain = [tree.tokens[node] for node in tree.path(best_leaf)]
        drafted = torch.tensor([chain], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, drafted], dim=-1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: the depth of the draft is set by `num_assistant_tokens`."""
