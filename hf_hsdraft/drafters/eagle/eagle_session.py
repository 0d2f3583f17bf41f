"""The session of an EAGLE-3 drafter: what it has read of the texts of a call, and the trees that it drafts next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.draft_tree import DraftTree
from ...trees.best_first import best_first_trees
from ...trees.builder_registry import TREE_BUILDERS
from ...trees.tree_builders import Expansion, TreeBuilder, TreeLimits
from ...verify.foresight import Foresight
from ..base.draft_memory import DraftMemory
from ..base.draft_options import DraftOptions
from ..base.parallel_expansion import ParallelExpansion
from ..base.protocol import Accepted, Ask, Session
from ..base.target_weights import TargetWeights
from .eagle_expansion import EagleExpansion, parallel_logits
from .eagle_network import EagleNetwork
from .eagle_texts import DraftedRows, EagleTexts
from .feedback_trial import FeedbackTrial, can_be_tried


class EagleSession(Session):
    """Drafts trees (or chains) for the texts of a batch.

    Args:
        network: weights and configuration; not changed.
        weights: what the drafter borrows of the target.
        options: of the call.
        count: number of texts.
        foresight: of the target's draws. Beams go by it; rejection holds for nodes that were drawn by other numbers.

    Attributes:
        texts: what has been read.
        expansion_class: what runs the drafter on nodes.
    """

    expansion_class: type[EagleExpansion] = EagleExpansion

    def __init__(
        self,
        network: EagleNetwork,
        weights: TargetWeights,
        options: DraftOptions,
        count: int = 1,
        foresight: Foresight | None = None,
    ) -> None:
        config = network.config
        parallel = config.mask_token_id is not None
        sizes = config.layer, config.num_hidden_layers, config.draft_vocab_size
        self.kind = *sizes, parallel, network.dtype, network.device
        self._network, self._weights, self._options = network, weights, options
        fits = foresight is not None and int(weights.vocab_ids.max()) < foresight.vocab_size
        self._foresight = foresight if not options.drawn and fits else None
        self.texts = EagleTexts(network, count)
        self._trial = None if not can_be_tried(config) else FeedbackTrial(network, weights)

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees = {ask.row: DraftTree.root(ask.root) for ask in asks}
        wanted = [ask for ask in asks if ask.depth > 0]
        if wanted:
            trees.update(zip((ask.row for ask in wanted), self._trees(wanted), strict=True))
        return list(trees.values())

    def _trees(self, asks: Sequence[Ask]) -> list[DraftTree]:
        options, depth = self._options, max(ask.depth for ask in asks)
        rows = [ask.row for ask in asks]
        self.texts.read(rows)
        if self._trial is not None:
            self._trial.decide()
        ids = self._weights.vocab_ids
        expansion = self.expansion(rows, depth, options.draw_temperature)
        roots = torch.tensor([ask.root for ask in asks], device=ids.device)
        depths = [ask.depth for ask in asks]
        limits = TreeLimits(asks[0].size, asks[0].width, options.threshold, depths)
        build: TreeBuilder = TREE_BUILDERS[options.tree_builder]
        if options.tree_builder == "beam" and not asks[0].chain and isinstance(expansion, ParallelExpansion):
            build = best_first_trees  # no node knows its path, so the best tree is found exactly
        return build(expansion, roots, ids, limits)

    def expansion(self, rows: Sequence[int], depth: int, temperature: float) -> Expansion:
        """Returns the children of the nodes of some texts' trees.

        Args:
            rows: the texts.
            depth: greatest depth.
            temperature: of the distributions.
        """
        network, weights, mask = self._network, self._weights, self._network.config.mask_token_id
        race = None if self._foresight is None else self._foresight.race(rows, depth, weights.vocab_ids)
        drafted = DraftedRows(network, self.texts, rows)
        if mask is None:
            return self.expansion_class(network, weights, drafted, depth, temperature, race)
        logits = parallel_logits(network, weights, drafted, mask, depth)
        return ParallelExpansion(logits, temperature=temperature, race=race)

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self._add(each)

    def _add(self, news: Accepted) -> None:
        last = self._weights.embed(news.following[-1:])
        if news.embeds is None:
            embeds, count = self._weights.embed(news.following), len(news.positions)
        elif news.embeds.shape[-1] == last.shape[-1]:
            embeds, count = torch.cat([news.embeds.to(last.device, last.dtype), last]), len(news.positions)
        else:  # the drafter's embedding has another width, and which tokens these are is not known
            embeds, count = last, 1
        taps, positions = news.taps[-count:], news.positions[-count:]
        self.texts.add(news.row, taps, embeds, positions)
        if self._trial is not None and news.row == 0 and len(news.following) >= count:
            self._trial.add(taps, embeds, positions, news.following[-count:])

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self.texts.texts))).difference(rows):
            self.texts.forget(row)

    def memory(self, length: int) -> DraftMemory | None:
        if len(self.texts.texts) > 1:
            return None
        text = self.texts.texts[0]
        return DraftMemory.of(self._network, length, self.texts.context.copy_of(0), text.pending)

    def resume(self, memory: Any, cached: int) -> None:
        """Goes on from a memory of the same text; that of another one would cost acceptance, so it is left alone."""
        if isinstance(memory, DraftMemory) and memory.fits(self._network, cached + 1):
            self.texts.context = memory.context.copy_of(0)
            self.texts.texts[0].pending.extend(memory.pending)
