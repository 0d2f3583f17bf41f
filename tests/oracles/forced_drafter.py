"""A drafter whose rounds accept as many drafted tokens as a pattern says, for targets whose texts are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call, Drafter, Session, WrappedDrafter


@torch.no_grad()
def let_count(target: Any) -> Any:
    """Returns a Llama with other weights, by which token x is followed by token x + 1, and the last one by 0.

    Every product keeps its shape. An output row is the embedding of the token before, and the layers add less than
    embeddings hold. Queries and keys have a common part, and positions turn them quickly, so that the last tokens are
    attended to: a target that attends evenly could not be told from one that ignores masks. Embeddings and output rows
    must not be tied.
    """
    embeddings, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    width, size, depth = embeddings.shape[1], target.config.head_dim, len(target.model.layers)
    embeddings.normal_()
    head.copy_(embeddings.roll(1, 0)).mul_(width**-0.5)
    common = torch.randn_like(embeddings[0])
    embeddings.mul_(0.8).add_(0.6 * common)
    target.model.rotary_emb.inv_freq.copy_(torch.logspace(0.0, -1.0, size // 2))
    for layer in target.model.layers:
        attention, feed = layer.self_attn, layer.mlp
        for module in (attention.v_proj, feed.gate_proj, feed.up_proj):
            module.weight.normal_(std=width**-0.5)
        keys = attention.k_proj.weight.normal_(std=0.3 * width**-0.5).view(-1, 1, size, width)
        keys.add_(torch.randn_like(keys[..., :1]) * common * (4.0 * size**-0.25 / width))
        attention.q_proj.weight.view(len(keys), -1, size, width).copy_(keys)
        for module, share in ((attention.o_proj, 1.0), (feed.down_proj, 0.3)):
            module.weight.normal_(std=share * (depth * module.in_features) ** -0.5)
    return target


def pattern(rate: float, depth: int, rounds: int = 16) -> list[int]:
    """Returns how many drafted tokens each of some rounds accepts, up to `depth`; a share of `rate ** d` accepts d.

    So a token is accepted with probability `rate` if those before it are. The order is random, and always the same.
    """
    places = [(index + 0.5) / rounds for index in range(rounds)]
    lengths = [sum(place < rate**d for d in range(1, depth + 1)) for place in places]
    random.Random(0).shuffle(lengths)
    return lengths


class ForcedDrafter(WrappedDrafter):
    """A drafter for targets that count, whose rounds have as many right tokens as given.

    The drafter does all its work. Then the nodes of its trees get other tokens: a path of the wanted length has the
    right ones, and all other nodes have wrong ones. The target's own rule accepts that path. `accepted` are the numbers
    of drafted tokens to accept, round by round, over and over; each row of a batch begins at another place.
    """

    def __init__(self, drafter: Drafter, accepted: Sequence[int]) -> None:
        super().__init__(drafter)
        self._accepted = accepted

    def session(self, call: Call) -> Session:
        return _ForcedSession(super().session(call), self._accepted, call.target.get_input_embeddings().num_embeddings)


class _ForcedSession(Session):
    """Drafts as another session, with other tokens."""

    def __init__(self, session: Session, accepted: Sequence[int], vocab_size: int) -> None:
        self.free, self.kind = session.free, session.kind
        self._session, self._accepted, self._vocab_size = session, accepted, vocab_size
        self._round = -1  # the first news are the prompts'

    @property
    def follow(self) -> Any:  # type: ignore[override]
        return self._session.follow

    @property
    def followed(self) -> float:  # type: ignore[override]
        return self._session.followed

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [self._forced(tree, ask) for tree, ask in zip(self._session.draft(asks), asks, strict=True)]

    def _forced(self, tree: DraftTree, ask: Ask) -> DraftTree:
        wanted = self._accepted[(self._round + 7 * ask.row) % len(self._accepted)]
        return _along(tree, min(wanted, ask.depth, len(tree) - 1), ask.depth, ask.chain, self._vocab_size)

    def observe(self, news: Sequence[Accepted]) -> None:
        self._round += 1
        self._session.observe(news)

    def keep(self, rows: Sequence[int]) -> None:
        self._session.keep(rows)

    def end(self) -> None:
        self._session.end()


def _along(tree: DraftTree, length: int, depth: int, chain: bool, vocab_size: int) -> DraftTree:
    """Returns a tree of the same size: a path of `length` right tokens, and wrong siblings of it, down to `depth`.

    As in drafted trees, the path's nodes are not neighbours, so that a commit has to move them; in a chain they are.
    """
    size = max(tree.depths) + 1 if chain else len(tree)
    path = range(0, size, 1 if chain else max((size - 1) // max(length, 1), 1))[1 : length + 1]
    tokens, parents, depths, tip = [tree.tokens[0]], [-1], [0], 0
    for node in range(1, size):
        step = 1 if node in path else 1 + node
        parent = tip if depths[tip] < depth else parents[tip]
        tokens.append((tokens[parent] + step) % vocab_size)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tip = node if chain or node in path else tip
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(-float(each) for each in depths))
