"""Heads that tell the slots of a block the tokens before them (DSpark, DFlash2, Domino, XPress); see `TokenHead`.

Letters in the shapes: N nodes or slots, D hidden size, r rank, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import Transform, best_of
from ...drafters.base.target_weights import TokenHead


class BlockHead(TokenHead):
    """Base of the heads of a block; parameters have the names of the speculators package."""

    reads_embeds = False  # whether `advance` gets the target's embeddings `[..., D]` in place of tokens
    needs_hidden = False  # whether a node's state depends on the drafted state that proposed it
    free_depths = 0  # number of depths, from the first on, without a bias
    columns: int | None = None  # of the target's vocabulary, which rows may be padded beyond; set by `borrow`

    def advance(
        self, inputs: torch.Tensor, states: torch.Tensor | None, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As in `TokenHead`; `hidden` `[N, D]` are the drafted states that proposed the tokens, if needed and known."""
        raise NotImplementedError

    @property
    def rows(self) -> torch.Tensor:
        """`[V', r]`, weight of the last product."""
        raise NotImplementedError

    def up(self, code: torch.Tensor) -> torch.Tensor:
        return F.linear(code, self.rows[: self.columns])

    def among(self, columns: torch.Tensor) -> Transform:
        rows = self.rows[columns].mT
        return lambda code: code @ rows

    def seen(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what this head reads of all slots `[B, slots, D]` of a block, by slot."""
        return hidden

    def keep_candidates(self, logits: torch.Tensor) -> torch.Tensor:
        """Sets the logits `[..., V']` of tokens that this head never chooses to minus infinity."""
        return logits


class MarkovHead(BlockHead):
    """The bias W2 w(x) of the previous token ("vanilla"); w(x) is a row of W1, `[V, r]`."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    @property
    def rows(self) -> torch.Tensor:
        return self.markov_w2.weight

    def advance(self, inputs: torch.Tensor, states: torch.Tensor | None, hidden: Any = None) -> torch.Tensor:
        return self.markov_w1(inputs)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., :0]

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return states

    def of_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Returns w(x) `[..., r]` of the nodes' tokens from their states."""
        return states[..., -self.markov_w1.embedding_dim :]


class GatedMarkovHead(MarkovHead):
    """The bias W2 (sigmoid(Wg [h ; w(x)] + b) * w(x)), h the slot."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, hidden_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.gate_proj.weight[:, : hidden.shape[-1]], self.gate_proj.bias)

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        of_tokens = F.linear(states, self.gate_proj.weight[:, -states.shape[-1] :])
        return (projected + of_tokens).sigmoid() * states


class RecurrentMarkovHead(MarkovHead):
    """The bias W2 tanh(out) of a recurrence over the path ("rnn").

    With [gate ; candidate ; out] = W [s ; w(x) ; h] + b, the next s mixes s and tanh(candidate) by sigmoid(gate). `out`
    uses the previous s. A node's state holds s and w(x).
    """

    needs_hidden = True

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, hidden_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def advance(self, inputs: torch.Tensor, states: torch.Tensor | None, hidden: Any = None) -> torch.Tensor:
        row = self.markov_w1(inputs)
        if states is None or hidden is None:
            return torch.cat([torch.zeros_like(row), row], dim=-1)
        gate, candidate, _ = self._joined(self.project(hidden), states)
        before = states.chunk(2, dim=-1)[0].to(candidate.dtype)  # float32 in mixed precision
        return torch.cat([torch.lerp(candidate.tanh(), before, gate.sigmoid()), row], dim=-1)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.joint_proj.weight[:, -hidden.shape[-1] :], self.joint_proj.bias)

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self._joined(projected, states)[2].tanh()

    def _joined(self, projected: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        of_states = F.linear(states, self.joint_proj.weight[:, : states.shape[-1]])
        return (projected + of_states).chunk(3, dim=-1)


class CandidateSelector(BlockHead):
    """The choice among a slot's best tokens by the previous token (DFlash2).

    The bias of token c is the sum over the rank of A[x] * (P h) * B[c], x the previous token and h the slot. Only the
    `top_k` best tokens of a slot by its logits can be chosen.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    @property
    def rows(self) -> torch.Tensor:
        return self.successor_codebook

    def advance(self, inputs: torch.Tensor, states: torch.Tensor | None, hidden: Any = None) -> torch.Tensor:
        return F.embedding(inputs, self.predecessor_codebook)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.hidden_projection(hidden)

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return projected * states

    def keep_candidates(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(~best_of(logits, self.top_k), -torch.inf)


class DominoHead(BlockHead):
    """A bias by a recurrent network over the path (Domino): W2 SiLU(W1 [h ; s]), h the slot.

    s is the state of a GRU that has read the embeddings of the accepted token and of the path. The first `free_depths`
    depths have no bias.
    """

    reads_embeds = True

    def __init__(self, hidden_size: int, gru_size: int, rank: int, draft_vocab_size: int, free_depths: int) -> None:
        super().__init__()
        self.free_depths = free_depths
        self.prefix_gru = nn.GRU(hidden_size, gru_size, bias=False)
        first, last = nn.Linear(hidden_size + gru_size, rank, bias=False), nn.Linear(rank, draft_vocab_size, bias=False)
        self.embed_proj = nn.ModuleDict({"0": first, "2": last})  # named as in files

    @property
    def rows(self) -> torch.Tensor:
        return self._weight("2")

    def _weight(self, part: str) -> torch.Tensor:
        return cast(nn.Linear, self.embed_proj[part]).weight

    def advance(self, inputs: torch.Tensor, states: torch.Tensor | None, hidden: Any = None) -> torch.Tensor:
        of_inputs, of_states = self.prefix_gru.parameters()
        embeds = inputs.to(of_inputs.dtype)
        before = embeds.new_zeros(*embeds.shape[:-1], self.prefix_gru.hidden_size) if states is None else states
        return torch.gru_cell(embeds.flatten(0, -2), before.flatten(0, -2), of_inputs, of_states).view(before.shape)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._weight("0")[:, : hidden.shape[-1]])

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return F.silu(projected + F.linear(states, self._weight("0")[:, -states.shape[-1] :]))


class RefinerHead(BlockHead):
    """The bias W2 (c + MLP(c)) by all slots and tokens up to a slot (XPress).

    Of slot j, x_j mixes the slot, the mean of all slots and the token before it; c_k = x_k + sum over j <= k of
    L[k, j] * x_j, by channel. In the fill-in layout the first slot is the anchor's, before which is the text's last but
    one token. A node's state holds the sum for each slot of the x_j known, and its token's row.
    """

    needs_hidden = True

    def __init__(
        self, vocab_size: int, draft_vocab_size: int, hidden_size: int, slots: int, rank: int, ratio: int
    ) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(hidden_size, rank, bias=False)
        self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, slots, slots))
        self.mlp_gate = nn.Linear(rank, ratio * rank, bias=False)
        self.mlp_up = nn.Linear(rank, ratio * rank, bias=False)
        self.mlp_down = nn.Linear(ratio * rank, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size, bias=False)

    @property
    def rows(self) -> torch.Tensor:
        return self.readout.weight

    def seen(self, hidden: torch.Tensor) -> torch.Tensor:
        """Slots, their mean, and the number of each as a row of the identity."""
        numbers = torch.eye(hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        return torch.cat(
            [hidden, hidden.mean(dim=1, keepdim=True).expand_as(hidden), numbers.expand(len(hidden), -1, -1)], dim=-1
        )

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        width, rank = self.down_h.in_features, self.in_proj.out_features
        parts = torch.cat([self.down_h(hidden[..., :width]), self.down_g(hidden[..., width : 2 * width])], dim=-1)
        return torch.cat([F.linear(parts, self.in_proj.weight[:, : 2 * rank]), hidden[..., 2 * width :]], dim=-1)

    def advance(self, inputs: torch.Tensor, states: torch.Tensor | None, hidden: Any = None) -> torch.Tensor:
        row = self.token_embed(inputs)
        if states is None or hidden is None:
            slots = self.mix_l.shape[1]
            return (
                torch.cat([row.new_zeros(*row.shape[:-1], slots * row.shape[-1]), row], -1)
                if states is None
                else states
            )
        x, number, sums = self._read(self.project(hidden), states)
        sums = sums + torch.einsum("ckj,...j,...c->...kc", self.mix_l, number, x)
        return torch.cat([sums.flatten(-2).expand(*row.shape[:-1], -1), row], dim=-1)

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        x, number, sums = self._read(projected, states)
        c = x * (1.0 + number @ self.mix_l.diagonal(dim1=1, dim2=2).mT) + torch.einsum("...k,...kc->...c", number, sums)
        return c + self.mlp_down(F.silu(self.mlp_gate(c)) * self.mlp_up(c))

    def _read(self, projected: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns x of the slot after each node, the slot's number as a row of the identity, and the sums by slot."""
        rank, slots = self.in_proj.out_features, self.mix_l.shape[1]
        x = projected[..., :rank] + F.linear(states[..., -rank:], self.in_proj.weight[:, 2 * rank :])
        return x, projected[..., rank:], states[..., :-rank].unflatten(-1, (slots, rank))


class ConfidenceHead(nn.Module):
    """The chance that a slot's draft is accepted, sigmoid(w [h ; w(x)] + b), h the slot and x the token before.

    It is trained towards 1 - ||p - q||_1 / 2, p and q the drafter's and the target's distributions (DSpark). Some
    heads read the slot alone.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Returns log-probabilities `[B, n]` of slots `[B, n or 1, D]`, after tokens with rows `[B, n, r]`."""
        weight, width = self.proj.weight[0], hidden.shape[-1]
        logits = hidden @ weight[:width] + self.proj.bias
        return F.logsigmoid(logits if rows is None else logits + rows @ weight[width:])


MARKOV_HEADS: dict[str, Callable[[int, int, int, int], MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}
