"""Session of a language model that drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...core.draft_tree import DraftTree, Expansion
from ...core.tensors import device_of, on_device
from ...runtime.tree_reading import AttentionKind
from ...verify.foresight import Race
from ..base.draft_options import DraftOptions
from ..base.protocol import Accepted, Ask, Call
from ..base.tree_session import CacheMemory, ParallelExpansion, TreeSession, log_probs_of
from .lm_texts import LMTexts, groups_of_rows, kind_of


@dataclass(frozen=True)
class LMExpansion(Expansion):
    """The model's distribution after each node, one forward per depth. A node's state is its path."""

    texts: LMTexts  # have read the accepted tokens, including the roots
    first: torch.Tensor  # `[B, 1, V]`, logits after the roots
    depth: int  # greatest depth of a child
    vocab_size: int  # only this many first columns of the logits may be drafted
    temperature: float = 1.0  # of the returned distributions
    race: Race | None = None  # with foreseen target draws; probabilities are then those of winning the race

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities `[B, n, V']` of the nodes' children, and the nodes' paths `[B, n, level - 1]`.

        `states` `[B, n, level - 2]` are the paths of the nodes' parents; None at level 1.
        """
        if states is None:
            self.texts.forget()  # evaluated again
            logits, paths = self.first, tokens[..., None][..., :0]
        else:
            logits, paths = self.texts.read_nodes(tokens, states)
        return log_probs_of(level, logits[..., : self.vocab_size].float(), self.temperature, self.race), paths


@dataclass(frozen=True)
class LMMemory(CacheMemory):
    """What a language model has read. Copy `texts` before use."""

    texts: LMTexts | None = None


@dataclass
class _Text:
    """A row of the call."""

    tokens: list[int] = field(default_factory=list)  # all known tokens, including the root
    lost: bool = False  # holds a token that the model does not know; nothing more is drafted for it


class CausalLMSession(TreeSession):
    """Drafts trees, or chains, token by token with a language model.

    Args:
        vocab_size: number of tokens that both model and target know.
        kinds: attention types whose masks the model respects; if empty, it drafts only chains, one row at a time.
    """

    def __init__(self, model: Any, call: Call, vocab_size: int, kinds: Sequence[AttentionKind]) -> None:
        super().__init__(call.options, torch.arange(vocab_size, device=device_of(model)), call.foresight)
        self._model, self._vocab_size = model, vocab_size
        self.kind = kind_of(model)
        self._texts = [_Text() for _ in range(call.rows)]
        self._kinds = kinds
        self._groups = [self._begin(group) for group in groups_of_rows(call.rows, kinds)]
        self._resumed: LMMemory | None = None

    def _begin(self, rows: Sequence[int]) -> LMTexts:
        return LMTexts(self._model, rows, self._kinds, self._most_drafted)

    @property
    def _most_drafted(self) -> int:
        """Most drafted tokens of a row in the model's cache."""
        return max(self._options.depth * self._options.beam_width, self._options.tree_size)

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: DraftTree.root(ask.root) for ask in asks}
        wanted = {ask.row: ask for ask in asks if ask.depth > 0 and self._knows(ask)}
        for texts in self._groups:
            texts.take_back([self._texts[row].tokens for row in texts.rows], [1] * len(texts.rows))
            depths = self._depths(texts, wanted)
            if depths:
                trees.update(self._of_group(texts, depths, next(iter(wanted.values()))))
        return list(trees.values())

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            text = self._texts[each.row]
            new = [*each.earlier, *each.tokens]
            text.tokens += new
            text.lost |= not all(0 <= token < self._vocab_size for token in new)
        memory, self._resumed = self._resumed, None
        if memory is not None and memory.texts is not None:
            [tokens] = memory.texts.tokens
            if self._texts[0].tokens[: len(tokens)] == tokens:
                self._groups = [memory.texts.copied()]

    def keep(self, rows: Sequence[int]) -> None:
        for texts in self._groups:
            texts.keep(rows)
        self._groups = [texts for texts in self._groups if texts.rows]

    def memory(self, length: int) -> LMMemory | None:
        if len(self._texts) > 1 or not self._groups or self._texts[0].lost:
            return None
        return LMMemory(self._groups[0])

    def resume(self, memory: Any, cached: int) -> None:
        """Continues from a memory, once the sequence is known to begin as the one that was read."""
        texts = memory.texts if isinstance(memory, LMMemory) else None
        alike = [type(texts)] == [type(group) for group in self._groups]  # only if it was read in the same way
        if alike and texts is not None and texts.fits(self._model, self._most_drafted):
            self._resumed = memory

    def _knows(self, ask: Ask) -> bool:
        text = self._texts[ask.row]
        return not text.lost and bool(text.tokens) and text.tokens[-1] == ask.root

    def _depths(self, texts: LMTexts, wanted: dict[int, Ask]) -> dict[int, int]:
        """Draft depth of each row: as wanted, limited by the model's positions."""
        depths = {}
        for place, row in enumerate(texts.rows):
            if row in wanted:
                unread = len(self._texts[row].tokens) - texts.kept[place]
                depth = min(wanted[row].depth, texts.room(place) - unread + 1)
                if depth > 0:
                    depths[row] = depth
        return depths

    def _of_group(self, texts: LMTexts, depths: dict[int, int], ask: Ask) -> dict[int, DraftTree]:
        """The trees of some rows of a group; the others are in each forward too, without new tokens or a tree."""
        options = self.options_for(ask, trees=bool(self._kinds))
        tokens = [
            self._texts[row].tokens[kept:] if row in depths else []
            for row, kept in zip(texts.rows, texts.kept, strict=True)
        ]
        depth = max(depths.values())
        all_asks = [Ask(row, self._texts[row].tokens[-1], depths.get(row, depth), 0) for row in texts.rows]
        first = texts.read(tokens)
        try:
            self._vocab_ids = self._vocab_ids.to(first.device)  # the last device of a split model
            race, size = self.race(texts.rows, depth), self._vocab_size
            expansion = LMExpansion(texts, first, depth, size, options.temperature, race)
            trees = self.grown(all_asks, expansion, options)
        finally:
            texts.forget()
        return {row: tree for row, tree in zip(texts.rows, trees, strict=True) if row in depths}

    def repeatable(self, asks: Sequence[Ask], expansion: LMExpansion, options: DraftOptions) -> Expansion:
        return replace(expansion, texts=expansion.texts.copied())  # drafts are dropped after each round


class ParallelLMSession(CausalLMSession):
    """Drafts all depths in one forward: behind a text stands a mask token for each further depth ("PARD", section 3).

    Nothing depends on the path, so trees cost no forwards, whatever masks the model respects.
    """

    def __init__(self, model: Any, call: Call, vocab_size: int, kinds: Sequence[AttentionKind], mask: int) -> None:
        super().__init__(model, call, vocab_size, kinds)
        self._mask = mask

    def _of_group(self, texts: LMTexts, depths: dict[int, int], ask: Ask) -> dict[int, DraftTree]:
        options, depth = self.options_for(ask), max(depths.values())
        known, each = [self._texts[row].tokens for row in texts.rows], [depths.get(row, 0) for row in texts.rows]
        inputs = [
            [*text[kept:], *[self._mask] * (count - 1)] if count else []
            for text, kept, count in zip(known, texts.kept, each, strict=True)
        ]
        logits = texts.read(inputs, depth)[..., : self._vocab_size].float()
        texts.take_back(known, [0] * len(known))  # the masks
        # A row's outputs are the last ones, as many as its depth.
        columns = [[min(depth - count + index, depth - 1) for index in range(depth)] for count in each]
        places = on_device(columns, logits.device)[..., None].expand(-1, -1, logits.shape[-1])
        self._vocab_ids = self._vocab_ids.to(logits.device)
        race = self.race(texts.rows, depth)
        expansion = ParallelExpansion(logits.gather(1, places), temperature=options.temperature, race=race)
        all_asks = [Ask(row, self._texts[row].tokens[-1], depths.get(row, depth), 0) for row in texts.rows]
        trees = self.grown(all_asks, expansion, options)
        return {row: tree for row, tree in zip(texts.rows, trees, strict=True) if row in depths}

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> Expansion:
        return TreeSession.repeatable(self, asks, expansion, options)
