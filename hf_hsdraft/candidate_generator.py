"""The drafting state of one `generate()` call: what the drafter has read, and what it drafted but could not use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator

from .configuration_hsdraft import LIMITS
from .draft_tree import DraftTree, build_beam_trees, merge_trees
from .drafter_files import few
from .modeling_hsdraft import DraftContext, HSDrafter, TargetWeights
from .ngram_cache import MOST_LEADING, MOST_NGRAM_DEPTH, NgramCache
from .sampled_trees import branching_for, build_gumbel_trees, build_stochastic_beam_trees
from .verification import VERIFICATIONS

REUSES = ("none", "ensemble", "resample")
TREE_BUILDERS = ("beam", "gumbel", "stochastic_beam")


@dataclass(frozen=True)
class DraftOptions:
    """Drafting options of one call, read from `drafter.generation_config`.

    Attributes:
        depth: greatest depth of the tree, `num_assistant_tokens`.
        tree_size, beam_width: see `build_beam_trees`; a batch shares `tree_size`.
        threshold: `assistant_confidence_threshold`, the least probability of a drafted path.
        reuse: `"none"`, `"ensemble"` or `"resample"`.
        reuse_weight: weight of the old logits in `"ensemble"`, the new ones weighing 1.
        tree_builder: `"beam"`, `"gumbel"` or `"stochastic_beam"`; the last two draw nodes instead of taking the best.
        verification: `"walk"` or `"rejection"`.
        temperature: of the draws of a sampled tree.
        ngram_length: tokens of the longest leader of `NgramCache`, whose nodes join the tree; 0 leaves them out.
    """

    depth: int
    tree_size: int
    beam_width: int
    threshold: float
    reuse: str
    reuse_weight: float
    tree_builder: str = "beam"
    verification: str = "walk"
    temperature: float = 1.0
    ngram_length: int = 0

    def shared_by(self, rows: int) -> DraftOptions:
        """The options of each row of a batch: the rows share two thirds of `tree_size`, at least two nodes each.

        A batch fills the machine by itself, so a node costs more than it does alone; small trees need no depth either.
        """
        if rows == 1:
            return self
        size = max(2 * self.tree_size // (3 * rows), 2)
        return replace(self, tree_size=size, depth=min(self.depth, (size + 1) // 2))

    def as_chain(self) -> DraftOptions:
        """The same options for a target that reads one path at a time."""
        builder = "stochastic_beam" if self.tree_builder == "gumbel" else self.tree_builder  # both draw one path
        reuse = "none" if self.reuse == "resample" else self.reuse  # that would merge two paths
        return replace(self, beam_width=1, tree_size=max(self.depth, 1), tree_builder=builder, reuse=reuse)

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
            raise ValueError(f"unknown drafting options on drafter.generation_config: {few(unknown)}")

        library = GenerationConfig._get_default_generation_params()

        def option(name: str) -> Any:
            given = getattr(call, name, None)
            values = (None if given == library.get(name) else given, getattr(config, name, None))
            return next((value for value in values if value is not None), getattr(defaults, name))

        sizes = {name: LIMITS[name] for name in ("tree_size", "beam_width")}
        for name, most in {"num_assistant_tokens": limit, **sizes}.items():
            value = option(name)
            if not isinstance(value, int) or not 1 <= value <= most:
                wanted = "1 or more" if name in sizes else f"from 1 to {most}, the steps it was trained for"
                wanted = f"at most {most:,}" if name in sizes and isinstance(value, int) and value > most else wanted
                raise ValueError(f"{name}={value!r} is invalid: expected an integer {wanted}")
        ngram_length = option("ngram_length")
        if not isinstance(ngram_length, int) or not 0 <= ngram_length <= MOST_LEADING:
            raise ValueError(
                f"ngram_length={ngram_length!r} is invalid: expected an integer from 0 (no n-grams) to {MOST_LEADING}"
            )
        threshold, reuse, weight = map(option, ("assistant_confidence_threshold", "reuse", "reuse_weight"))
        if not isinstance(threshold, int | float) or not 0.0 <= threshold < 1.0:
            raise ValueError(f"assistant_confidence_threshold={threshold!r} is invalid: expected a probability below 1")
        if reuse not in REUSES:
            raise ValueError(f"reuse={reuse!r} is invalid: expected one of {', '.join(REUSES)}")
        if not isinstance(weight, int | float) or weight < 0.0:
            raise ValueError(f"reuse_weight={weight!r} is invalid: expected a number of 0 or more")
        builder, verification = option("tree_builder"), option("verification")
        for name, value, allowed in (
            ("tree_builder", builder, TREE_BUILDERS),
            ("verification", verification, VERIFICATIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is invalid: expected one of {', '.join(allowed)}")
        if verification == "rejection" and builder == "beam":
            raise ValueError(
                "verification='rejection' is invalid with tree_builder='beam': its ratio holds for drawn nodes only, "
                "the best nodes of a beam would bias the text; choose tree_builder='gumbel' or 'stochastic_beam'"
            )
        if builder != "beam" and reuse != "none":
            raise ValueError(f"reuse={reuse!r} is invalid with tree_builder={builder!r}: only beams can be merged")
        sampled = call is not None and call.do_sample and isinstance(call.temperature, int | float)
        return cls(
            depth=option("num_assistant_tokens"),
            tree_size=option("tree_size"),
            beam_width=option("beam_width"),
            threshold=threshold,
            reuse=reuse,
            reuse_weight=weight,
            tree_builder=builder,
            verification=verification,
            temperature=call.temperature if sampled else 1.0,  # type: ignore[union-attr]
            ngram_length=ngram_length
            if builder == "beam"
            else 0,  # of drawn nodes only is it known how likely they were
        )


@dataclass(frozen=True)
class Expansion:
    """Token information for the drafts of a batch: called by a tree builder, level by level.

    Attributes:
        hidden: `[B, depth, D]`, the drafted states; logits: `[B, depth, V']`, what the head makes of them.
        since: `[B, 1, S]`, for leftover states (reuse form B) the injector's state before the root: they were drafted
            without the root's token, so it is injected at the first depth too.
        temperature: of the distributions given.
    """

    drafter: HSDrafter
    weights: TargetWeights
    hidden: torch.Tensor
    logits: torch.Tensor
    since: torch.Tensor | None = None
    temperature: float = 1.0

    @property
    def depth(self) -> int:
        return self.hidden.shape[1]

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities `[B, n, V']` of the children at depth `level` of nodes with `tokens` `[B, n]`, and states.

        Args:
            states: of the nodes' parents; `None` for the root, at level 1.
        """
        embeds = self.weights.embed(tokens)
        states = self.drafter.injector.advance(embeds, self.since if level == 1 else states)
        column = slice(level - 1, level)
        logits = self.logits[:, column]
        if level > 1 or self.since is not None:
            logits = logits + self.drafter.injector(self.hidden[:, column], states)
        logits = logits.float()
        return (logits if self.temperature == 1.0 else logits / self.temperature).log_softmax(dim=-1), states


@dataclass
class _Row:
    """Drafting state of one sequence of the batch.

    Attributes:
        pending: taps, embeddings of the next tokens and positions, waiting to be read.
        root: the last accepted token.
        drafted: `[K, D]` of the last round, g_0 .. g_{K-1}.
        leftover: `[K', D]`, drafted states that still predict positions ahead.
        leftover_path: tokens accepted since those were drafted, from their root on.
        ngrams: of the row's text.
    """

    pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    root: int = -1
    drafted: torch.Tensor | None = None
    leftover: torch.Tensor | None = None
    leftover_path: list[int] = field(default_factory=list)
    ngrams: NgramCache | None = None


@dataclass(frozen=True)
class DraftMemory:
    """What a drafter has read of one text, for the next call that goes on from the same cache.

    Attributes:
        drafter: whose memory it is; length: of the text when it was made, the last token included.
        context, pending: what was read, and what was still waiting.
    """

    drafter: Callable[[], HSDrafter | None]  # a weak reference
    length: int
    context: DraftContext | None
    pending: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]

    def __reduce__(self) -> Any:
        """A cache that is stored forgets what the drafter had read."""
        return _forgotten, ()

    def __deepcopy__(self, memo: Any) -> DraftMemory:
        return self  # nothing in it is ever changed


def _forgotten() -> DraftMemory:
    return DraftMemory(lambda: None, 0, None, ())


class HSCandidateGenerator(CandidateGenerator):
    """Drafts trees (or chains) for the sequences of a batch from the target's hidden states.

    `read` takes what the target accepted, `draft` returns the next trees, `settle` says how much of one was accepted.
    As a `CandidateGenerator` it also drafts chains for transformers' own assisted decoding.

    Args:
        drafter: weights and configuration; not changed.
        weights: what the drafter borrows of the target, see `HSDrafter.borrow`.
        options: `drafter.generation_config`'s by default.
        batch_size: sequences in the batch.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: HSDrafter,
        weights: TargetWeights,
        options: DraftOptions | None = None,
        batch_size: int = 1,
    ) -> None:
        self.drafter = drafter
        self.weights = weights
        self.options = (options or DraftOptions.of(drafter)).shared_by(batch_size)
        self.model_kwargs_overrides = {"output_hidden_states": list(drafter.config.target_tap_layers)}
        self._context: DraftContext | None = None
        self._started = False  # in transformers' own assisted decoding
        length = self.options.ngram_length
        self._rows = [_Row(ngrams=NgramCache(length) if length else None) for _ in range(batch_size)]

    def memory(self, length: int) -> DraftMemory:
        """What has been read of a single text of `length` tokens."""
        return DraftMemory(weakref.ref(self.drafter), length, self._context, tuple(self._rows[0].pending))

    def resume(self, memory: DraftMemory | None, cached: int) -> None:
        """Goes on from a memory, if it is this drafter's and of a text whose first `cached` tokens are in the cache.

        Of another text it would only cost acceptance, so it is left alone then.
        """
        if memory is None or memory.drafter() is not self.drafter or memory.length != cached + 1:
            return
        states = [state for part in memory.pending for state in part[:2]]
        if all(state.device == self.drafter.device and state.dtype == self.drafter.dtype for state in states):
            self._context = memory.context
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
        device, dtype = self.drafter.device, self.drafter.dtype
        embeds = self.weights.embed(next_tokens) if embeds is None else embeds.to(device, dtype)
        self._rows[row].pending.append((taps.to(device, dtype), embeds, position_ids.to(device)))
        self._rows[row].root = int(next_tokens[-1])

    def remember(self, tokens: Sequence[int], row: int = 0) -> None:
        """Enters further tokens of a text into its n-grams, those of the prompt and of earlier turns among them."""
        ngrams = self._rows[row].ngrams
        if ngrams is not None:
            ngrams.extend(tokens)

    def draft(self, max_depths: Mapping[int, int] | None = None) -> list[DraftTree]:
        """Drafts the tree that follows the last token given to `read`, for each sequence.

        Args:
            max_depths: for each sequence to draft for, how deep it is of use to draft; 0 gives the root alone. All, as
                deep as the options say, by default.

        Returns:
            trees in the order of `max_depths`.
        """
        wanted = dict.fromkeys(range(len(self._rows)), self.options.depth) if max_depths is None else dict(max_depths)
        depths = {row: min(depth, self.options.depth) for row, depth in wanted.items()}
        rows = [row for row, depth in depths.items() if depth > 0]
        trees = {row: DraftTree.root(self._rows[row].root) for row in depths}
        if rows:
            depth = max(depths.values())
            hidden = self._rolled(rows, depth)
            logits = self.drafter.logits(hidden, self.weights)
            trees |= zip(rows, self._trees(rows, hidden, logits, [depths[row] for row in rows]), strict=True)
            for row in rows:
                trees[row] = self._with_ngrams(trees[row], row, wanted[row])
        return list(trees.values())

    def _with_ngrams(self, tree: DraftTree, row: int, depth: int) -> DraftTree:
        """A tree joined by what the n-grams of the text know; of two chains, the better one."""
        ngrams, size = self._rows[row].ngrams, self.options.tree_size
        if ngrams is None or ngrams.last != tree.tokens[0]:  # nobody told them the text
            return tree
        if self.options.beam_width == 1:
            chain = ngrams.draft(min(size, depth), min(size, depth), width=1, threshold=self.options.threshold)
            return max(tree, chain, key=DraftTree.expected_length)
        grown = ngrams.draft(size, min(depth, MOST_NGRAM_DEPTH), threshold=self.options.threshold)
        return merge_trees(tree, grown, size)

    def _rolled(self, rows: Sequence[int], depth: int) -> torch.Tensor:
        """Reads what is pending of these rows and rolls on from the last of each: `[B, depth, D]`."""
        parts = [part for row in rows for part in self._rows[row].pending]
        taps, embeds, positions = (torch.cat(column) for column in zip(*parts, strict=True))
        starts = documents = None
        if len(self._rows) > 1:
            lengths = torch.tensor([sum(len(part[2]) for part in self._rows[row].pending) for row in rows])
            starts = (lengths.cumsum(0) - 1).to(taps.device)
            documents = torch.tensor(rows).repeat_interleave(lengths).to(taps.device)
        output = self.drafter(taps, embeds, positions, starts, documents, context=self._context, num_draft_steps=depth)
        self._context = output.context
        hidden = torch.stack(output.hidden_states, dim=1)
        for row, states in zip(rows, hidden, strict=True):
            self._rows[row].pending.clear()
            self._rows[row].drafted = states
        return hidden

    def _trees(
        self, rows: Sequence[int], hidden: torch.Tensor, logits: torch.Tensor, depths: Sequence[int]
    ) -> list[DraftTree]:
        roots = [self._rows[row].root for row in rows]
        leftovers = [self._rows[row].leftover for row in rows]
        for row in rows:
            self._rows[row].leftover = None
        reuse = self.options.reuse if any(leftover is not None for leftover in leftovers) else "none"
        if reuse == "ensemble":
            logits = logits.clone()
            for index, (row, leftover) in enumerate(zip(rows, leftovers, strict=True)):
                if leftover is not None:
                    self._ensemble(logits[index], leftover[: logits.shape[1]], self._rows[row])
        trees = self._grow(roots, self._expansion(hidden, logits), depths)
        if reuse == "resample":
            for index, (row, leftover) in enumerate(zip(rows, leftovers, strict=True)):
                if leftover is not None:
                    old = leftover[None, : depths[index]]
                    expansion = self._expansion(
                        old, self.drafter.logits(old, self.weights), self._since(self._rows[row])
                    )
                    [resampled] = self._grow([roots[index]], expansion, [expansion.depth])
                    trees[index] = merge_trees(trees[index], resampled, self.options.tree_size)
        return trees

    def settle(self, accepted: Sequence[int], row: int = 0) -> None:
        """Says which drafted tokens were accepted; later hidden states stay predictions of their positions.

        With a tokens accepted and the bonus after them, g_d with d > a still predicts the token at depth index
        d - a - 1 of the next round ("Make Every Draft Count", resampling). Called before the bonus token is read.
        """
        state = self._rows[row]
        drafted, state.drafted, state.leftover = state.drafted, None, None
        if drafted is not None and self.options.reuse != "none" and len(drafted) > len(accepted) + 1:
            state.leftover = drafted[len(accepted) + 1 :]
            state.leftover_path = [state.root, *accepted]

    def _ensemble(self, logits: torch.Tensor, leftover: torch.Tensor, state: _Row) -> None:
        """Reuse form A: the old round's logits join the new ones `[depth, V']` at the same absolute position."""
        old = self.drafter.logits(leftover, self.weights)
        # The new state at the first depth has read the root's token; the old one is told it by the injector.
        path = self._advance(torch.tensor([state.root], device=logits.device), self._path_state(state))
        old = torch.cat([old[:1] + self.drafter.injector(leftover[:1], path), old[1:]])
        weight = self.options.reuse_weight
        logits[: len(old)] = (logits[: len(old)] + weight * old) / (1.0 + weight)

    def _path_state(self, state: _Row) -> torch.Tensor | None:
        """The injector's state after the tokens accepted since the leftover states were drafted."""
        path = None
        for token in state.leftover_path:
            path = self._advance(torch.tensor([token], device=self.drafter.device), path)
        return path

    def _since(self, state: _Row) -> torch.Tensor | None:
        path = self._path_state(state)
        return None if path is None else path[None]

    def _expansion(self, hidden: torch.Tensor, logits: torch.Tensor, since: torch.Tensor | None = None) -> Expansion:
        temperature = 1.0 if self.options.tree_builder == "beam" else self.options.temperature
        return Expansion(self.drafter, self.weights, hidden, logits, since, temperature)

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
            expansion,
            tokens,
            ids,
            depth=expansion.depth,
            beam_width=options.beam_width,
            tree_size=options.tree_size,
            threshold=options.threshold,
            max_depths=depths,
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
