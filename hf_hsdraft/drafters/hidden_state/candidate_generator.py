"""The session of a hidden-state drafter: what it has read of the texts of a call, and what it drafts next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ...common.target_weights import TargetWeights
from ...common.tuning import TUNING
from ...trees.builder_registry import TREE_BUILDERS
from ...trees.draft_tree import DraftTree, merge_trees
from ...trees.tree_builders import TreeLimits
from ...verifiers.foresight import Foresight
from ..draft_options import DraftOptions
from ..protocol import Accepted, Ask, Session
from .draft_memory import DraftMemory
from .expansion import Expansion
from .network import HSDraftNetwork
from .reuse import Leftover, ensemble, reuse_of
from .roll_out import RollOut
from .target_match import warn_of_poor_guesses
from .working_weights import WorkingWeights

Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # taps, embeddings of the following tokens, and positions


@dataclass
class _Row:
    """Drafting state of one text.

    Attributes:
        pending: pairs that wait to be read by the trunk.
        root: the last accepted token.
        drafted: `[K, D]`, g_0 .. g_{K-1} of the last round.
        leftover: what is left of them.
        tree: the tree of the last round, before anything joined it or was left out.
    """

    pending: list[Pairs] = field(default_factory=list)
    root: int = -1
    drafted: torch.Tensor | None = None
    leftover: Leftover | None = None
    tree: DraftTree | None = None


class HSCandidateGenerator(Session, CandidateGenerator):
    """Drafts trees (or chains) for the texts of a batch from the target's hidden states.

    As a `CandidateGenerator` it also drafts chains for transformers' own assisted decoding, from the target's hidden
    states alone: n-grams and sizes by cost belong to `generate(assistant_model=drafter)`.

    Args:
        drafter: weights and configuration; not changed.
        weights: what the drafter borrows of the target, see `HSDraftNetwork.borrow`.
        options: of the call; `drafter.generation_config`'s by default.
        batch_size: number of texts.
        working: what decoding multiplies by; made of drafter and weights by default.
        foresight: of the target's draws. Beams go by it; rejection holds for nodes that were drawn by other numbers.
        roll_out: what reads and rolls; one that grows by default.
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
        config = drafter.config
        self.drafter, self.weights = drafter, weights
        self.model_kwargs_overrides = {"output_hidden_states": list(config.target_tap_layers)}
        self.kind = config.hidden_size, config.num_hidden_layers, config.draft_vocab_size, drafter.dtype, drafter.device
        self.guesses = self.right_guesses = 0  # drafts whose first guess is known to be right or wrong; right ones
        self._options = options or DraftOptions.of(drafter)
        self._reuse, self._reuse_weight = reuse_of(self._options.own)
        self._working = working or WorkingWeights.of(drafter, weights.head)
        self._target = target
        beam = self._options.tree_builder == "beam"
        fits = foresight is not None and int(weights.vocab_ids.max()) < foresight.vocab_size
        self._foresight = foresight if beam and fits else None
        self._roll_out = roll_out or RollOut(self._working, config, drafter.device, drafter.dtype)
        self._rows = [_Row() for _ in range(batch_size)]
        self._started = False  # in transformers' own assisted decoding

    # What the engine asks for.

    def draft(self, asks: Sequence[Ask] | None = None) -> list[DraftTree]:
        """Drafts the trees that follow the last tokens that were read.

        Args:
            asks: for all texts, as deep as the options say, by default.
        """
        if asks is None:
            rows = len(self._rows)
            options = self._options.shared_by(rows)
            asks = [Ask(row, each.root, options.depth, options.tree_size, rows) for row, each in enumerate(self._rows)]
        trees = {ask.row: DraftTree.root(ask.root) for ask in asks}
        wanted = [ask for ask in asks if ask.depth > 0]
        if wanted:
            options = self._options
            if wanted[0].chain and options.beam_width > 1:  # the target has turned out to read no trees
                options = options.as_chain()
            options = options.shared_by(wanted[0].sharing)
            depth = min(max(ask.depth for ask in wanted), options.depth)
            hidden = self._rolled([ask.row for ask in wanted], depth)
            drafted = self._trees(wanted, hidden, [min(ask.depth, depth) for ask in wanted], options)
            for ask, tree in zip(wanted, drafted, strict=True):
                self._rows[ask.row].tree = trees[ask.row] = tree
        return list(trees.values())

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self.settle(each.tokens[:-1], each.row, each.tokens[-1])
            embeds = each.embeds
            if embeds is not None:
                last = self.weights.embed(each.following[-1:])
                embeds = torch.cat([embeds.to(last.device, last.dtype), last])
            self.read(each.taps, each.following, each.positions, each.row, embeds)

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._rows))).difference(rows):
            self._rows[row] = _Row()

    def memory(self, length: int) -> DraftMemory | None:
        if len(self._rows) > 1:
            return None
        return DraftMemory.of(self.drafter, length, self._roll_out.context, self._rows[0].pending)

    def resume(self, memory: Any, cached: int) -> None:
        """Goes on from a memory of the same text; that of another one would cost acceptance, so it is left alone."""
        if isinstance(memory, DraftMemory) and memory.fits(self.drafter, cached + 1):
            self._roll_out.resume(memory.context)
            self._rows[0].pending.extend(memory.pending)

    def end(self) -> None:
        if self._target is not None:
            warn_of_poor_guesses(self._target, self.drafter, self.guesses, self.right_guesses)

    # What drafting goes by.

    def read(
        self,
        taps: torch.Tensor,
        next_tokens: torch.Tensor,
        position_ids: torch.Tensor,
        row: int = 0,
        embeds: torch.Tensor | None = None,
    ) -> None:
        """Queues accepted pairs for the trunk; they are read by the next `draft` in one forward.

        Args:
            taps: `[n, taps * D]`, h_i of the accepted positions i.
            next_tokens: `[n]`, the accepted tokens x_{i+1}; with `embeds`, at least the last.
            position_ids: `[n]`, the positions i.
            row: index of the text.
            embeds: `[n, D]`, embeddings of the x_{i+1}, for prompts that were given so.
        """
        device, dtype = self.drafter.device, self.drafter.dtype
        self._rows[row].root = int(next_tokens[-1])
        embeds = self.weights.embed(next_tokens) if embeds is None else embeds.to(device, dtype)
        pending = self._rows[row].pending
        pending.append((taps.to(device, dtype), embeds, position_ids.to(device)))
        if len(self._rows) == 1 and len(pending) > TUNING.most_pending:  # nothing was drafted for long
            self._roll_out.read(*_joined(pending[:-1]))
            del pending[:-1]

    def settle(self, accepted: Sequence[int], row: int = 0, next_token: int | None = None) -> None:
        """Says which drafted tokens were accepted. Called before the bonus token is read.

        Args:
            next_token: the bonus token.
        """
        state = self._rows[row]
        if state.tree is not None and next_token is not None:
            self._count_guess(state.tree, [*accepted, next_token][0])
        state.leftover = None
        if self._reuse != "none":
            state.leftover = Leftover.of(state.drafted, state.root, accepted)
        state.tree = state.drafted = None

    def _count_guess(self, tree: DraftTree, token: int) -> None:
        first = [node for node, depth in enumerate(tree.depths) if depth == 1]
        if first:
            self.guesses += 1
            self.right_guesses += tree.tokens[max(first, key=lambda node: tree.scores[node])] == token

    def _rolled(self, rows: Sequence[int], depth: int) -> torch.Tensor:
        """Reads what is pending of these rows and rolls on from the last of each: `[B, depth, D]`."""
        pairs = _joined([part for row in rows for part in self._rows[row].pending])
        counts = None  # of a single text
        if len(self._rows) > 1:
            counts = {row: sum(len(part[2]) for part in self._rows[row].pending) for row in rows}
        hidden = self._roll_out(*pairs, depth, counts)
        for row, states in zip(rows, hidden, strict=True):
            self._rows[row].pending.clear()
            self._rows[row].drafted = states
        return hidden

    def _trees(
        self, asks: Sequence[Ask], hidden: torch.Tensor, depths: Sequence[int], options: DraftOptions
    ) -> list[DraftTree]:
        """The trees of drafted states `[B, depth, D]`, with what is left of the last round."""
        logits = self._working.logits(hidden)
        left = {place: each for place, ask in enumerate(asks) if (each := self._rows[ask.row].leftover) is not None}
        if left and self._reuse == "ensemble":
            logits, working = logits.clone(), self._working
            for place, leftover in left.items():
                root, weight = asks[place].root, self._reuse_weight
                ensemble(logits[place], leftover, root, weight, working.logits, working.injector, self._advance)
        trees = self._grown(asks, self._expansion(asks, hidden, logits, options), depths, options)
        if self._reuse == "resample":
            for place, leftover in left.items():
                one, since = [asks[place]], leftover.since(self._advance)[None]
                expansion = self._expansion(one, leftover.hidden[None, : depths[place]], None, options, since)
                [resampled] = self._grown(one, expansion, [expansion.depth], options)
                if asks[place].chain:
                    trees[place] = max(trees[place], resampled, key=DraftTree.expected_length)
                else:
                    trees[place] = merge_trees(trees[place], resampled, options.tree_size)
        return trees

    def _advance(self, token: int, state: torch.Tensor | None) -> torch.Tensor:
        """The injector's state `[1, S]` after a token."""
        embeds = self.weights.embed(torch.tensor([token], device=self.drafter.device))
        return self._working.injector.advance(embeds, state)

    def _expansion(
        self,
        asks: Sequence[Ask],
        hidden: torch.Tensor,
        logits: torch.Tensor | None,
        options: DraftOptions,
        since: torch.Tensor | None = None,
    ) -> Expansion:
        temperature = 1.0 if options.tree_builder == "beam" else options.temperature
        race = None
        if self._foresight is not None:
            race = self._foresight.race([ask.row for ask in asks], hidden.shape[1], self.weights.vocab_ids)
        return Expansion.of(self._working, self.weights, hidden, logits, since, temperature, race)

    def _grown(
        self, asks: Sequence[Ask], expansion: Expansion, depths: Sequence[int], options: DraftOptions
    ) -> list[DraftTree]:
        ids = self.weights.vocab_ids
        tokens = torch.tensor([ask.root for ask in asks], device=ids.device)
        limits = TreeLimits(options.tree_size, options.beam_width, options.threshold, depths)
        return TREE_BUILDERS[options.tree_builder](expansion, tokens, ids, limits)

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
        self._started = True
        [tree] = self.draft()
        best_leaf = max(range(len(tree)), key=lambda node: (tree.depths[node], tree.scores[node]))
        chain = [tree.tokens[node] for node in tree.path(best_leaf)]
        drafted = torch.tensor([chain], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, drafted], dim=-1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: the depth of the draft is set by `num_assistant_tokens`."""


def _joined(parts: Sequence[Pairs]) -> Pairs:
    taps, embeds, positions = (torch.cat(column) for column in zip(*parts, strict=True))
    return taps, embeds, positions
