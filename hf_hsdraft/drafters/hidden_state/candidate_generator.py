"""The drafting state of one `generate()` call: what the drafter has read, and what it drafted but could not use."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ...common.target_weights import TargetWeights
from ...pace.pacing import Pace
from ...trees.draft_tree import DraftTree, build_beam_trees, merge_trees
from ...trees.sampled_trees import branching_for, build_gumbel_trees, build_stochastic_beam_trees
from ...verifiers.foresight import Foresight
from ..draft_options import DraftOptions
from ..ngrams.cacheback import CachebackDrafter
from ..ngrams.ngram_cache import MOST_NGRAM_DEPTH, NgramCache
from .contexts import DraftContext
from .expansion import Expansion
from .modeling_hsdraft import HSDrafter
from .roll_out import RollOut
from .working_weights import WorkingWeights

_MOST_PENDING = 64  # rounds whose taps may wait for the next draft


@dataclass
class _Row:
    """Drafting state of one sequence of the batch.

    Attributes:
        pending: taps, embeddings of the next tokens and positions, waiting to be read.
        root: the last accepted token.
        drafted: `[K, D]` of the last round, g_0 .. g_{K-1}.
        leftover: `[K', D]`, drafted states that still predict positions ahead.
        logits, leftover_logits: `[K, V']` of those, by the head alone.
        leftover_path: tokens accepted since those were drafted, from their root on.
        earlier_path: the same of `drafted`, if it was left over itself.
        ngrams: of the row's text.
        tree: what the drafter made of the last round, before anything joined it or was left out.
    """

    pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    root: int = -1
    drafted: torch.Tensor | None = None
    leftover: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    leftover_logits: torch.Tensor | None = None
    leftover_path: list[int] = field(default_factory=list)
    earlier_path: list[int] = field(default_factory=list)
    ngrams: NgramCache | None = None
    tree: DraftTree | None = None


@dataclass(frozen=True)
class DraftMemory:
    """What a drafter has read of one text, for the next call that goes on from the same cache.

    Attributes:
        drafter: whose memory it is; length: of the text when it was made, the last token included.
        context, pending: what was read, and what was still waiting.
    """

    drafter: Callable[[], HSDrafter | None]  # a weak reference
    length: int
    context: DraftContext
    pending: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]

    def __reduce__(self) -> Any:
        """A cache that is stored forgets what the drafter had read."""
        return _forgotten, ()

    def __deepcopy__(self, memo: Any) -> DraftMemory:
        return self  # nothing in it is ever changed


def _forgotten() -> DraftMemory:
    return DraftMemory(lambda: None, 0, DraftContext(), ())


def _first_probability(tree: DraftTree) -> float:
    """That the next token is in the tree."""
    return min(sum(math.exp(s) for s, depth in zip(tree.scores, tree.depths, strict=True) if depth == 1), 1.0)


class HSCandidateGenerator(CandidateGenerator):
    """Drafts trees (or chains) for the sequences of a batch from the target's hidden states.

    `read` takes what the target accepted, `draft` returns the next trees, `settle` says how much of one was accepted.
    As a `CandidateGenerator` it also drafts chains for transformers' own assisted decoding.

    Args:
        drafter: weights and configuration; not changed.
        weights: what the drafter borrows of the target, see `HSDrafter.borrow`.
        options: `drafter.generation_config`'s by default.
        batch_size: sequences in the batch.
        pace: how much of that to do, round by round; all by default.
        working: what decoding multiplies by; made of drafter and weights by default.
        foresight: of the target's draws. Beams go by it; rejection holds for nodes that were drawn by other numbers.
        roll_out: what reads and rolls; one that grows by default.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: HSDrafter | CachebackDrafter,
        weights: TargetWeights,
        options: DraftOptions | None = None,
        batch_size: int = 1,
        pace: Pace | None = None,
        working: WorkingWeights | None = None,
        foresight: Foresight | None = None,
        roll_out: RollOut | None = None,
    ) -> None:
        self.trained = isinstance(drafter, HSDrafter)  # there is a network that reads the target's hidden states
        self.drafter = cast(HSDrafter, drafter)  # what only such a one has is asked of no other
        self.weights = weights
        self._of_a_call = options or DraftOptions.of(drafter)
        self.options = self._of_a_call.shared_by(batch_size)
        self.model_kwargs_overrides = {"output_hidden_states": list(drafter.config.target_tap_layers)}
        self.drafted_depth = 0  # of the last round
        self.guesses = self.right_guesses = 0  # drafts whose first guess is known to be right or wrong; right ones
        self._pace = pace
        self._foresight = foresight if self.options.tree_builder == "beam" else None
        self._working, self._roll_out = working, None
        if isinstance(drafter, HSDrafter):
            self._device, self._dtype = drafter.device, drafter.dtype
            self._working = working or WorkingWeights.of(drafter, weights.head)
            self._roll_out = roll_out or RollOut(self._working, drafter.config, self._device, self._dtype)
        self._started = False  # in transformers' own assisted decoding
        length = self.options.ngram_length
        frozen = drafter.frozen if isinstance(drafter, CachebackDrafter) else ()
        self._rows = [
            _Row(ngrams=NgramCache(length, frozen, weights.vocab_size) if length else None) for _ in range(batch_size)
        ]

    def share_among(self, rows: int, pace: Pace | None, options: DraftOptions | None = None) -> None:
        """From here on so many rows of the batch share what is verified; the others have ended.

        Args:
            options: of the call from here on; as before by default.
        """
        self._of_a_call = options or self._of_a_call
        self.options, self._pace = self._of_a_call.shared_by(rows), pace

    def memory(self, length: int) -> DraftMemory:
        """What has been read of a single text of `length` tokens."""
        assert self._roll_out is not None
        return DraftMemory(weakref.ref(self.drafter), length, self._roll_out.context, tuple(self._rows[0].pending))

    def resume(self, memory: DraftMemory | None, cached: int) -> None:
        """Goes on from a memory, if it is this drafter's and of a text whose first `cached` tokens are in the cache.

        Of another text it would only cost acceptance, so it is left alone then.
        """
        if memory is None or memory.drafter() is not self.drafter or memory.length != cached + 1:
            return
        states = [state for part in memory.pending for state in part[:2]]
        if all(state.device == self._device and state.dtype == self._dtype for state in states):
            assert self._roll_out is not None
            self._roll_out.resume(memory.context)
            self._rows[0].pending.extend(memory.pending)

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
            row: sequence of the batch.
            embeds: `[n, D]`, embeddings of the x_{i+1}, for prompts that were given so.
        """
        self._rows[row].root = int(next_tokens[-1])
        if not self.trained:
            return
        device, dtype = self._device, self._dtype
        embeds = self.weights.embed(next_tokens) if embeds is None else embeds.to(device, dtype)
        pending = self._rows[row].pending
        pending.append((taps.to(device, dtype), embeds, position_ids.to(device)))
        if len(self._rows) == 1 and len(pending) > _MOST_PENDING:  # nothing was drafted for long
            taps, embeds, positions = (torch.cat(column) for column in zip(*pending[:-1], strict=True))
            assert self._roll_out is not None
            self._roll_out.read(taps, embeds, positions)
            del pending[:-1]

    def remember(self, tokens: Sequence[int], row: int = 0) -> None:
        """Enters further tokens of a text into its n-grams, those of the prompt and of earlier turns among them."""
        ngrams = self._rows[row].ngrams
        if ngrams is not None:
            ngrams.extend(tokens)

    def draft(
        self, max_depths: Mapping[int, int] | None = None, behind: Collection[int] | None = None
    ) -> list[DraftTree]:
        """Drafts the tree that follows the last token given to `read`, for each sequence.

        Args:
            max_depths: for each sequence to draft for, how deep it is of use to draft; 0 gives the root alone. All, as
                deep as the options say, by default.
            behind: the sequences that the batch waits for, by which the pace goes; all by default.

        Returns:
            trees in the order of `max_depths`.
        """
        wanted = dict.fromkeys(range(len(self._rows)), self.options.depth) if max_depths is None else dict(max_depths)
        rows = [row for row, depth in wanted.items() if depth > 0]
        trees = {row: DraftTree.root(self._rows[row].root) for row in wanted}
        grown = {row: self._from_ngrams(row, wanted[row]) for row in rows}
        if self._foresight is not None:
            grown = self._foresight.scored(grown)
        deciding = [row for row in rows if behind is None or row in behind] or rows
        depth = min(max(wanted.values(), default=0), self.options.depth) if self.trained else 0
        if rows and self._pace is not None:
            certain = sum(_first_probability(grown[row]) for row in deciding) / len(deciding)
            depth = min(depth, self._pace.depth(certain))
        reused = self._from_leftover(rows, depth) if depth else None
        self.drafted_depth = 0 if reused is not None else depth
        if reused is not None and self._pace is not None:
            trees[rows[0]] = self._pace.scored(reused)
        elif depth:
            hidden = self._rolled(rows, depth)
            drafted = self._trees(rows, hidden, [min(wanted[row], depth) for row in rows])
            for row, tree in zip(rows, drafted, strict=True):
                self._rows[row].tree = trees[row] = tree
                if self._pace is not None:
                    trees[row] = self._pace.weighed(tree, depth) if row in deciding else self._pace.scored(tree)
        for row in rows:
            trees[row] = self._joined(trees[row], grown[row])
        if rows and self._pace is not None:
            size = self._pace.size([trees[row] for row in deciding])
            trees.update({row: trees[row].first(size) for row in rows})
        return list(trees.values())

    def _from_leftover(self, rows: Sequence[int], depth: int) -> DraftTree | None:
        """Reuse that saves time: a tree of drafted states that were not used up, instead of a roll-out.

        Where they are as confident, as what a roll-out has been worth of late. They have not read the tokens since, the
        injector has; what the trunk should read waits for the next roll-out.
        """
        state = self._rows[rows[0]]
        if self.options.reuse != "skip" or state.leftover is None or self._pace is None or len(self._rows) > 1:
            return None
        assert state.leftover_logits is not None
        hidden, logits = state.leftover[None, :depth], state.leftover_logits[None, :depth]
        expansion = self._expansion(rows, hidden, logits, self._since(state))
        if float(expansion.confidence().cumprod(dim=-1).sum()) < self._pace.worth():
            return None
        [state.tree] = self._grow([state.root], expansion, [expansion.depth])
        state.drafted, state.logits, state.earlier_path = state.leftover, state.leftover_logits, state.leftover_path
        return state.tree

    def _from_ngrams(self, row: int, depth: int) -> DraftTree:
        """What the n-grams of a text propose, as a tree or, where only one path may be, as a chain."""
        ngrams, size = self._rows[row].ngrams, self.options.tree_size
        if ngrams is None or ngrams.last != self._rows[row].root:  # nobody told them the text
            return DraftTree.root(self._rows[row].root)
        depth, threshold = min(depth, MOST_NGRAM_DEPTH), self.options.threshold
        if not self.trained:
            depth = min(depth, self.options.depth)
        if self.options.depth == 0:  # nothing is to be drafted at all, as near the last position of a target
            return DraftTree.root(self._rows[row].root)
        if self.options.beam_width == 1:
            return ngrams.draft(min(size, depth), depth, width=1, threshold=threshold)
        return ngrams.draft(size, depth, threshold=threshold)

    def _joined(self, tree: DraftTree, grown: DraftTree) -> DraftTree:
        """Drafted nodes and those of n-grams in one tree; of two chains the better one."""
        if len(grown) == 1:
            return tree
        if self.options.beam_width == 1:
            return max(tree, grown, key=DraftTree.expected_length)
        return merge_trees(tree, grown, self.options.tree_size)

    def _rolled(self, rows: Sequence[int], depth: int) -> torch.Tensor:
        """Reads what is pending of these rows and rolls on from the last of each: `[B, depth, D]`."""
        parts = [part for row in rows for part in self._rows[row].pending]
        taps, embeds, positions = (torch.cat(column) for column in zip(*parts, strict=True))
        counts = None  # of a single text
        if len(self._rows) > 1:
            counts = {row: sum(len(part[2]) for part in self._rows[row].pending) for row in rows}
        assert self._roll_out is not None
        hidden = self._roll_out(taps, embeds, positions, depth, counts)
        for row, states in zip(rows, hidden, strict=True):
            self._rows[row].pending.clear()
            self._rows[row].drafted = states
        return hidden

    def _trees(self, rows: Sequence[int], hidden: torch.Tensor, depths: Sequence[int]) -> list[DraftTree]:
        assert self._working is not None
        logits = self._working.logits(hidden)
        roots = [self._rows[row].root for row in rows]
        leftovers = [self._rows[row].leftover for row in rows]
        for row in rows:
            self._rows[row].leftover = None
        reuse = self.options.reuse if any(leftover is not None for leftover in leftovers) else "none"
        for row, row_logits in zip(rows, logits, strict=True):
            self._rows[row].logits = row_logits
        if reuse == "ensemble":
            logits = logits.clone()
            for index, (row, leftover) in enumerate(zip(rows, leftovers, strict=True)):
                if leftover is not None:
                    self._ensemble(logits[index], leftover[: logits.shape[1]], self._rows[row])
        trees = self._grow(roots, self._expansion(rows, hidden, logits), depths)
        if reuse == "resample":
            for index, (row, leftover) in enumerate(zip(rows, leftovers, strict=True)):
                if leftover is not None:
                    hidden, since = leftover[None, : depths[index]], self._since(self._rows[row])
                    expansion = self._expansion([row], hidden, None, since)
                    [resampled] = self._grow([roots[index]], expansion, [expansion.depth])
                    trees[index] = merge_trees(trees[index], resampled, self.options.tree_size)
        return trees

    def settle(self, accepted: Sequence[int], row: int = 0, next_token: int | None = None) -> None:
        """Says which drafted tokens were accepted; later hidden states stay predictions of their positions.

        With a tokens accepted and the bonus after them, g_d with d > a still predicts the token at depth index
        d - a - 1 of the next round ("Make Every Draft Count", resampling). Called before the bonus token is read.
        """
        state = self._rows[row]
        if state.tree is not None and next_token is not None:
            self._count_guess(state.tree, [*accepted, next_token][0])
            if self._pace is not None:
                self._pace.learn(state.tree, [*accepted, next_token])
        state.tree = None
        drafted, state.drafted, state.leftover = state.drafted, None, None
        earlier, state.earlier_path = state.earlier_path, []
        if drafted is not None and self.options.reuse != "none" and len(drafted) > len(accepted) + 1:
            state.leftover = drafted[len(accepted) + 1 :]
            state.leftover_logits = None if state.logits is None else state.logits[len(accepted) + 1 :]
            state.leftover_path = [*earlier, state.root, *accepted]

    def _count_guess(self, tree: DraftTree, token: int) -> None:
        first = [node for node, depth in enumerate(tree.depths) if depth == 1]
        if first:
            self.guesses += 1
            self.right_guesses += tree.tokens[max(first, key=lambda node: tree.scores[node])] == token

    def _ensemble(self, logits: torch.Tensor, leftover: torch.Tensor, state: _Row) -> None:
        """Reuse form A: the old round's logits join the new ones `[depth, V']` at the same absolute position."""
        assert self._working is not None
        injector, old = self._working.injector, self._working.logits(leftover)
        # The new state at the first depth has read the root's token; the old one is told it by the injector.
        path = self._advance(torch.tensor([state.root], device=logits.device), self._path_state(state))
        old = torch.cat([old[:1] + injector(leftover[:1], path), old[1:]])
        weight = self.options.reuse_weight
        logits[: len(old)] = (logits[: len(old)] + weight * old) / (1.0 + weight)

    def _path_state(self, state: _Row) -> torch.Tensor | None:
        """The injector's state after the tokens accepted since the leftover states were drafted."""
        path = None
        for token in state.leftover_path:
            path = self._advance(torch.tensor([token], device=self._device), path)
        return path

    def _since(self, state: _Row) -> torch.Tensor | None:
        path = self._path_state(state)
        return None if path is None else path[None]

    def _expansion(
        self,
        rows: Sequence[int],
        hidden: torch.Tensor,
        logits: torch.Tensor | None,
        since: torch.Tensor | None = None,
    ) -> Expansion:
        temperature = 1.0 if self.options.tree_builder == "beam" else self.options.temperature
        assert self._working is not None
        race = None
        if self._foresight is not None:
            race = self._foresight.race(rows, hidden.shape[1], self.weights.vocab_ids)
        return Expansion.of(self._working, self.weights, hidden, logits, since, temperature, race)

    def _grow(self, roots: Sequence[int], expansion: Expansion, depths: Sequence[int]) -> list[DraftTree]:
        options, ids = self.options, self.weights.vocab_ids
        tokens = torch.tensor(roots, device=ids.device)
        if options.tree_builder == "gumbel":
            branching = branching_for(expansion.depth, options.tree_size)
            return build_gumbel_trees(expansion, tokens, ids, branching=branching, max_depths=depths)
        if options.tree_builder == "stochastic_beam":
            width = min(options.beam_width, options.tree_size)
            depth = min(expansion.depth, options.tree_size // width)
            return build_stochastic_beam_trees(expansion, tokens, ids, depth=depth, beam_width=width, max_depths=depths)
        return build_beam_trees(
            expansion.best,
            tokens,
            depth=expansion.depth,
            beam_width=options.beam_width,
            tree_size=options.tree_size,
            threshold=options.threshold,
            max_depths=depths,
        )

    def _advance(self, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        assert self._working is not None
        return self._working.injector.advance(self.weights.embed(tokens), states)

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
        if not self.trained:
            raise ValueError("a CachebackDrafter drafts through generate(assistant_model=...) only")
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
        self.remember(input_ids[0, length - n_last_matches - 1 :].tolist() if self._started else input_ids[0].tolist())
        self._started = True
        [tree] = self.draft()
        best_leaf = max(range(len(tree)), key=lambda node: (tree.depths[node], tree.scores[node]))
        chain = [tree.tokens[node] for node in tree.path(best_leaf)]
        drafted = torch.tensor([chain], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, drafted], dim=-1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: the depth of the draft is set by `num_assistant_tokens`."""
