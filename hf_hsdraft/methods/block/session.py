"""Session of a block drafter, and the attention of a block's slots to the text before it and to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...core.options import Option
from ...core.tensors import Transform, batched_attention
from ...drafters.base.protocol import Accepted, Ask, Call
from ...drafters.base.target_weights import TargetWeights
from ...drafters.base.tree_session import Confidence, TokenBias
from ..published.context import ParallelContextSession
from ..published.target_sizes import FLAG
from .configuration import Sight
from .heads import BlockHead

KeysAndValues = tuple[torch.Tensor, torch.Tensor]

_BLOCKS_AT_ONCE = 64  # in training; limits the work on masked pairs of blocks


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None, sinks: Any = None
) -> torch.Tensor:
    """As `batched_attention`, but a head may look at nothing instead, with score `sinks` `[heads]` before softmax."""
    if sinks is None:
        return batched_attention(queries, keys, values, seen)
    (batch, rows, heads, _), (kv_heads, length) = queries.shape, keys.shape[1:3]
    scores = queries.new_zeros(batch, heads, rows, length + 1)
    if seen is not None:
        scores[..., :-1].masked_fill_(~seen[:, None], -torch.inf)
    scores[..., -1] = sinks.to(scores.dtype)[:, None]
    keys, values = (F.pad(x, (0, 0, 0, 1)).repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    return F.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, scores).transpose(1, 2).flatten(2)


def own_mask(sight: Sight, slots: int, device: torch.device) -> torch.Tensor:
    """Returns `[slots, slots]`, True where the row's slot sees the column's."""
    place = torch.arange(slots, device=device)
    ahead = place[None, :] - place[:, None]
    mask = ahead <= 0 if sight.causal else torch.ones_like(ahead, dtype=torch.bool)
    return mask if sight.reach is None or sight.of_anchor else mask & (ahead.abs() <= sight.reach)


def farthest(sight: Sight, positions: torch.Tensor) -> torch.Tensor:
    """Returns `[B, slots]`, the position from which each slot counts its reach."""
    return positions[:, :1].expand_as(positions) if sight.of_anchor else positions


def training_attention(
    context: Sequence[KeysAndValues],  # keys and values `[T, kv_heads, head_dim]` of each layer
    sights: Sequence[Sight],
    position_ids: torch.Tensor,  # `[T]`, of the context
    document_ids: torch.Tensor | None,  # `[T]`, of the context
    starts: torch.Tensor,  # `[S]`, index of the last context position that each block sees
    positions: torch.Tensor,  # `[S, slots]`, of the slots
    sinks: Sequence[Any],  # scores `[heads]` of each layer, or None
) -> Callable[..., torch.Tensor]:
    """Returns the attention of many blocks to one packed context, see `BlockDrafter.forward`."""
    blocks, slots = positions.shape
    indices = torch.arange(len(position_ids), device=positions.device)
    before = indices[None] <= starts[:, None]
    if document_ids is not None:
        before = before & (document_ids[None] == document_ids[starts, None])

    masks: dict[tuple[Sight, int], torch.Tensor] = {}

    def seen(sight: Sight, begin: int) -> torch.Tensor:
        if (sight, begin) not in masks:
            masks[sight, begin] = made(sight, slice(begin, begin + _BLOCKS_AT_ONCE))
        return masks[sight, begin]

    def made(sight: Sight, part: slice) -> torch.Tensor:
        count = len(range(*part.indices(blocks)))
        mask = before[part, None].expand(-1, slots, -1)
        if sight.reach is not None:
            mask = mask & (farthest(sight, positions[part])[..., None] - position_ids <= sight.reach)
        blockwise = torch.block_diag(*[own_mask(sight, slots, positions.device)] * count)
        return torch.cat([mask.flatten(0, 1), blockwise], dim=1)[None]

    def attend(index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
        mixed = []
        for begin in range(0, blocks, _BLOCKS_AT_ONCE):
            part = slice(begin, begin + _BLOCKS_AT_ONCE)
            sides = [
                torch.cat([shared, own[part].flatten(0, 1)]).transpose(0, 1)[None]
                for shared, own in zip(context[index], (keys, values), strict=True)
            ]
            of_block = queries[part].flatten(0, 1)[None]
            of_part = attention(of_block, sides[0], sides[1], seen(sights[index], begin), sinks[index])
            mixed.append(of_part[0].unflatten(0, (-1, slots)))
        return torch.cat(mixed)

    return attend


CONFIDENCE = Option(
    "use_confidence_head",
    True,
    FLAG,
    "Whether a confidence head decides with the drafter's probabilities which nodes are drafted.",
)


class BlockBias(TokenBias):
    """As `TokenBias`, of all slots `[B, slots, D]` of a block; that of the first depth has the number `first`."""

    def __init__(
        self, head: BlockHead, embed: Transform, slots: torch.Tensor, first: int = 0, since: torch.Tensor | None = None
    ) -> None:
        super().__init__(head, embed, slots, since)
        self.projected, self.free_depths = self.projected[:, first:], head.free_depths
        self._block_head, self._slots, self._first = head, slots, first

    def advance(self, level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        head, slot = self._block_head, self._first + level - 2  # of these nodes; at the root, before the first
        inputs = self._embed(tokens) if head.reads_embeds else tokens
        hidden = self._slots[:, slot : slot + 1] if head.needs_hidden and slot >= 0 else None
        if level == 1:
            states = head.advance(inputs, self._since)
            if hidden is None:
                return states
        return head.advance(inputs, states, hidden)


class BlockSession(ParallelContextSession):
    """Drafts trees (or chains) for a batch, a block of each row in one forward."""

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        config, sizes = drafter.config, drafter.config.sizes
        layers = config.num_hidden_layers
        super().__init__(drafter, weights, call, layers)
        extra = *config.ranks, config.markov_head_type, config.gru_size, config.conv_kernel_size
        ends = len(config.target_tap_layers), config.draft_vocab_size, config.has_own_head
        self.kind = sizes, layers, config.block_size, *ends, *extra, drafter.dtype, drafter.device
        learned = config.learned_mask  # that the target has no embedding of
        self._mask = weights.embed(torch.tensor(0 if learned else config.mask_token_id, device=drafter.device))
        self._slots = torch.arange(config.block_size, device=drafter.device)
        self._before: dict[int, list[int]] = {}  # the last two tokens of each row, for heads that read the first slot
        self._asked: Sequence[Ask] = ()  # those that are drafted for

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        drafter, first, head = self.drafter, self.drafter.config.first_slot, self.drafter.token_head
        logits = drafter.logits(hidden[:, first : first + depth], self.weights)
        if head is None:
            return logits, None
        return head.keep_candidates(logits), BlockBias(
            head, self.weights.embed, head.seen(hidden), first, self._since()
        )

    def observe(self, news: Sequence[Accepted]) -> None:
        super().observe(news)
        if self.drafter.refiner_head is not None:
            for each in news:
                self._before[each.row] = [*self._before.get(each.row, ()), *each.earlier, *each.tokens][-2:]

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._before = {row: known for row, known in self._before.items() if row in rows}

    def _since(self) -> torch.Tensor | None:
        """The head's states `[B, 1, S]` before the roots: of the token before the anchor, or else of the anchor."""
        head = self.drafter.refiner_head
        if head is None or self.drafter.config.first_slot == 0:
            return None
        tokens = [self._before.get(ask.row, [ask.root])[0] for ask in self._asked]
        return head.advance(torch.tensor(tokens, device=self.drafter.device)[:, None], None)

    def confidence(self, hidden: torch.Tensor) -> Confidence | None:
        head, first, tokens = self.drafter.confidence_head, self.drafter.config.first_slot, self.drafter.markov_head
        if head is None or not self._options.own.get(CONFIDENCE.name, CONFIDENCE.default):
            return None

        def of_level(level: int, states: torch.Tensor | None) -> torch.Tensor:
            slot = hidden[:, first + level - 1 : first + level]
            reads_tokens = self.drafter.config.confidence_head == "markov"
            return head(slot, tokens.of_tokens(states) if reads_tokens else None)

        return of_level

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Returns all slots of a block, whatever the depth: they see each other."""
        drafter, context, rows = self.drafter, self._context, [ask.row for ask in asks]
        self.read_pending(rows)
        self._asked = asks
        positions = self.anchors(rows) + self._slots
        anchors = self.weights.embed(torch.tensor([ask.root for ask in asks], device=drafter.device))
        masks: dict[Sight, torch.Tensor | None] = {}

        def attend(index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
            sight = drafter.config.sights[index]
            if sight not in masks:
                masks[sight] = self._seen(sight, rows, positions)
            sides = zip(context.view(index, rows), (keys, values), strict=True)
            all_keys, all_values = (torch.cat([before, own.transpose(1, 2)], dim=2) for before, own in sides)
            return attention(queries, all_keys, all_values, masks[sight], drafter.sinks[index])

        return drafter.run(drafter.block_embeds(anchors, self._mask), positions, attend)

    def _seen(self, sight: Sight, rows: Sequence[int], positions: torch.Tensor) -> torch.Tensor | None:
        """`[B, slots, P]`, True where a slot may look; P counts the context positions, then the slots."""
        window = None if sight.reach is None else sight.reach + 1
        context = self._context.seen(rows, farthest(sight, positions), window)
        (batch, slots), reach = positions.shape, None if sight.of_anchor else sight.reach
        if context is None:
            if not sight.causal and (reach is None or reach >= slots - 1):  # a slot sees all
                return None
            length = max(self._context.lengths[row] for row in rows)
            context = torch.ones(batch, slots, length, dtype=torch.bool, device=positions.device)
        return torch.cat([context, own_mask(sight, slots, positions.device).expand(batch, -1, -1)], dim=2)
