"""Session of a FlashMap drafter."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import batched_attention, on_device
from ...drafters.base.protocol import Ask, Call
from ...drafters.base.reading_session import ParallelSession
from ...drafters.base.target_weights import TargetWeights
from .network import FlashMapNetwork, Look, embedded
from .options import FLOW_STEPS


class FlashMapSession(ParallelSession):
    """Drafts trees (or chains) for a batch, a block of each row from the same noise.

    The noise is drawn once, by a fixed seed, so it depends on no random number of the call. Given the noise, the slots
    of a block are independent, and their probabilities are known.
    """

    def __init__(self, drafter: FlashMapNetwork, weights: TargetWeights, embedding: Any, call: Call) -> None:
        super().__init__(drafter, weights, call, drafter.config.num_hidden_layers)
        config = drafter.config
        steps = self._options.own.get(FLOW_STEPS.name)
        self._embed = drafter.borrow(embedding, None, scaled=False).embed
        self._times = list(itertools.pairwise(config.times(steps)))
        self._jumps = [drafter.jump(*times) for times in self._times]
        self._noise, self._first = self._begin(embedding)
        self._slots = torch.arange(1, config.block_size + 1, device=drafter.device)
        self.kind = config.sizes, config.num_hidden_layers, config.block_size, len(self._times), drafter.dtype

    def _begin(self, embedding: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Returns the noise `[K, V]`, and sums of embeddings `[1, K, E]` by it and `[1, 1, E]` by equal weights.

        They read the whole embedding, so they are kept until it changes.
        """
        config, place = self.drafter.config, (self.drafter.dtype, self.drafter.device)
        weight = getattr(embedding, "weight", embedding)  # a module of the user's own may have none
        plain = type(weight) in (torch.Tensor, nn.Parameter) and not (weight.is_meta or weight.is_inference())
        form = (weight.data_ptr(), weight._version, config.block_size, *place) if plain else None
        made = _begun.get(embedding)
        if form is None or made is None or made[0]() is not weight or made[1] != form:
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(config.block_size, config.vocab_size, generator=generator).to(self.drafter.device)
            even = noise.new_full((1, config.vocab_size), 1.0 / config.vocab_size)
            with torch.inference_mode(False), torch.no_grad():
                sums = embedded(torch.cat([noise, even]), self._embed)[None].split([config.block_size, 1], dim=1)
            made = _begun[embedding] = weakref.ref(weight), form, noise, sums
        return made[2], made[3]

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, None]:
        assert self.weights.head is not None
        return F.linear(hidden[:, :depth], self.weights.head), None

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Returns all slots of a block, whatever the depth: they see each other."""
        rows, drafter = [ask.row for ask in asks], self.drafter
        self.read_pending(rows)
        anchors = self.anchors(rows)
        look, positions = self._look(rows, asks, anchors), anchors + self._slots
        noise, even = self._first
        inputs, state = drafter.inputs(even, noise, *self._times[0]).expand(len(rows), -1, -1), self._noise
        for index, (start, end) in enumerate(self._times):
            hidden = drafter.run(inputs, self._jumps[index], positions, look)
            if end < 1:
                likely = self.predicted(hidden, len(self._slots))[0].float().softmax(dim=-1)
                state = ((1 - end) * state + (end - start) * likely) / (1 - start)
                inputs = self._inputs(state, *self._times[index + 1])
        return hidden

    def _inputs(self, state: torch.Tensor, start: float, end: float) -> torch.Tensor:
        """Returns inputs `[B, K, E]` of a later jump from a state `[B, K, V]`."""
        likely = (state * (start / max(1 - start, 1e-3) ** 2)).softmax(dim=-1)
        return self.drafter.inputs(embedded(likely, self._embed), embedded(state, self._embed), start, end)

    def _look(self, rows: Sequence[int], asks: Sequence[Ask], anchors: torch.Tensor) -> Look:
        """Returns the attention to the accepted positions and to the anchors, whose positions are `[B, 1]`."""
        drafter, context = self.drafter, self._context
        embeds = self.weights.embed(on_device([[ask.root] for ask in asks], drafter.device))
        states, rope = drafter.read_anchors(embeds), drafter.rotary(anchors, embeds.dtype)
        seen = context.seen(rows, anchors)
        mask = None if seen is None else F.pad(seen, (0, 1), value=True).expand(-1, len(self._slots), -1)

        def look(index: int, queries: torch.Tensor) -> torch.Tensor:
            own = drafter.context_keys(index, states, rope)
            sides = zip(context.view(index, rows), own, strict=True)
            keys, values = (torch.cat([before, each.transpose(1, 2)], dim=2) for before, each in sides)
            return batched_attention(queries, keys, values, mask)

        return look


# By embedding: what the noise and sums were made of, and these
_begun: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, torch.Tensor, Sequence[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
