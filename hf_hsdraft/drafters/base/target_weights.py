"""What a drafter borrows from its target, and bases of networks that read its hidden states and tokens.

Letters in the shapes: T positions, D hidden size, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, is_accelerate_available

from ...core.kept import kept_with
from ...core.tensors import RMSNorm, Transform, device_of, is_unhooked


@dataclass(frozen=True)
class TargetWeights:
    """What a drafter borrows from its target instead of storing it."""

    embed: Callable[[torch.Tensor], torch.Tensor]  # maps token ids `[...]` to the target's input embeddings `[..., D]`
    # `[V', D]`, the target's output rows of the draft vocabulary; None if the drafter has its own, or they are left out
    head: torch.Tensor | None
    vocab_ids: torch.Tensor  # `[V']`, int64, token id of each row
    table: torch.Tensor | None = None  # `[V, D]`, where `embed` only looks its rows up


def borrow(
    embedding: nn.Module,
    output_head: nn.Module | None,
    vocab_ids: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    scaled: bool = True,
) -> TargetWeights:
    """Collects the target's embedding and its output rows of `vocab_ids` `[V']`, int64.

    With the full vocabulary, rows are only copied to another `device` or `dtype`, those of the drafter. No
    `output_head` leaves its rows out. Embeddings include the target's scaling unless `scaled` is False.
    """
    vocab_ids = vocab_ids.to(device)
    head = None
    if output_head is not None:
        head = _output_rows(output_head, embedding, vocab_ids).to(device, dtype)
    weight = getattr(embedding, "weight", None)  # a module of the user's own may have none
    table = weight.detach() if isinstance(weight, torch.Tensor) else None  # the target is never trained
    place = device_of(embedding) if table is None else table.device
    is_table = isinstance(embedding, nn.Embedding) and embedding.max_norm is None
    is_table &= not scaled or (type(embedding) is nn.Embedding and is_unhooked(embedding))
    if is_table and table is not None:

        def look_up(tokens: torch.Tensor) -> torch.Tensor:
            if place.type == "meta" and is_accelerate_available():  # offloaded by accelerate
                from accelerate.utils import align_module_device

                with align_module_device(embedding):
                    brought: Any = embedding.weight
                    return F.embedding(tokens.to(brought.device), brought.detach())
            return F.embedding(tokens, table)

    else:
        factor = 1.0 if scaled else getattr(embedding, "embed_scale", 1.0)

        def look_up(tokens: torch.Tensor) -> torch.Tensor:
            return embedding(tokens).detach() / factor

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens if place.type == "meta" else tokens.to(place)  # accelerate's hook moves them
        return look_up(tokens).to(device, dtype)

    is_same = is_table and type(table) is torch.Tensor and (table.device, table.dtype) == (device, dtype)
    return TargetWeights(embed, head, vocab_ids, table if is_same else None)


def _output_rows(output_head: nn.Module, embedding: nn.Module, vocab_ids: torch.Tensor) -> torch.Tensor:
    """Returns the rows `[V', D]`, also of offloaded or quantised layers."""
    weight = getattr(output_head, "weight", None)
    if is_accelerate_available() and isinstance(weight, torch.Tensor) and weight.device.type == "meta":
        from accelerate.utils import align_module_device

        with align_module_device(output_head):
            return _output_rows(output_head, embedding, vocab_ids)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point():
        if torch.equal(vocab_ids, torch.arange(len(weight), device=vocab_ids.device)):
            return weight.detach()
        return weight.detach()[vocab_ids.to(weight.device)]
    # Packed weights have an unknown layout, so recover rows by multiplying, and cache them: it is slow.
    last: dict[str, tuple[torch.Tensor, torch.Tensor]] = kept_with(output_head, "rows", dict)
    kept = last.get("ids and rows")
    if kept is None or not torch.equal(kept[0], vocab_ids.cpu()):
        place = device_of(embedding)
        with torch.no_grad():
            sample = embedding(torch.zeros(1, dtype=torch.int64, device=place))
        size = sample.shape[-1]
        inputs = torch.cat([torch.eye(size), torch.zeros(1, size)]).to(sample)
        with torch.inference_mode(False), torch.no_grad():
            columns = output_head(inputs)[:, vocab_ids.to(place)]
        kept = last["ids and rows"] = vocab_ids.cpu(), (columns[:-1] - columns[-1:]).T.contiguous()
    return kept[1]


@torch.no_grad()
def initialise(module: nn.Module, std: float) -> None:
    """Initialises a product or embedding normally distributed, a norm as 1; other modules not at all."""
    if isinstance(module, RMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class StateNetwork(PreTrainedModel):
    """Fuses hidden states of a target, and predicts tokens by the target's output rows or its own.

    Subclasses add their parts, including `norm` before the head, in order of computation, and call `post_init` last.
    """

    norm: RMSNorm

    def add_fusion(self, reads_tokens: bool) -> None:
        """Adds the modules that fuse a position's hidden states; `reads_tokens` includes the next token's embedding."""
        config = self.config
        size, taps = config.target_hidden_size, len(config.target_tap_layers)
        self.tap_norms = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for _ in range(taps))
        self.token_norm = RMSNorm(size, config.rms_norm_eps) if reads_tokens else None
        self.fuse = nn.Linear((taps + int(reads_tokens)) * size, config.hidden_size, bias=False)

    def add_head(self) -> None:
        """Adds output rows, unless the target's are used."""
        config = self.config
        trained = config.head == "trained"
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if trained else None

    def _init_weights(self, module: nn.Module) -> None:
        initialise(module, self.config.initializer_range)

    def fuse_inputs(self, taps: torch.Tensor, embeds: torch.Tensor | None) -> torch.Tensor:
        """Fuses positions i to `[T, D]`, from taps h_i `[T, taps * D]` and, if read, embeddings of x_{i+1} `[T, D]`."""
        parts = [norm(tap) for norm, tap in zip(self.tap_norms, taps.chunk(len(self.tap_norms), dim=-1), strict=True)]
        if self.token_norm is not None:
            parts.append(self.token_norm(embeds))
        return self.fuse(torch.cat(parts, dim=-1))

    def logits(self, hidden: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Returns draft logits `[..., V']` of drafted states `[..., D]`, before any token information."""
        if self.lm_head is not None:
            return self.lm_head(self.norm(hidden))
        assert weights.head is not None
        return F.linear(self.norm(hidden), weights.head)

    def draft_vocab_ids(self) -> torch.Tensor:
        """`[V']`, int64, token id of each row of the head."""
        ids = self.config.draft_vocab_ids
        return torch.arange(self.config.draft_vocab_size) if ids is None else torch.tensor(ids)

    def borrow(self, embedding: Any, output_head: Any, with_head: bool = True) -> TargetWeights:
        """Collects the target's embedding and output rows; `with_head=False` leaves out the rows, which are copied."""
        head = output_head if self.lm_head is None and with_head else None
        return borrow(embedding, head, self.draft_vocab_ids(), self.device, self.dtype)


class TokenHead(nn.Module):
    """Base of networks that tell drafted depths the tokens before them, by a logit bias of low rank.

    Depths that are drafted at once know no token before them. A node's *state* summarises its path, and its *code* is
    the bias of its children before the last product, `up`. Letters: N nodes, S state size, r rank, C columns.
    """

    up: Any  # maps codes `[..., r]` to biases `[..., V']`

    def advance(self, inputs: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Returns states `[N, S]` after tokens of embeddings `[N, D]`, from those before them; None starts a path."""
        raise NotImplementedError

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what depends on drafted states `[..., D]` only; computed once for all nodes of a depth."""
        raise NotImplementedError

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Returns codes `[N, r]` of nodes in `states` `[N, S]`; `projected` is of their children's drafted state."""
        raise NotImplementedError

    def among(self, columns: torch.Tensor) -> Transform | None:
        """Returns `up` for `columns` `[B, C]`, int64, of the draft vocabulary only; None if it must compute all."""
        return None

    def forward(self, hidden: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logit bias `[N, V']` for the children of nodes in `states`, drafted from `hidden` `[N or 1, D]`."""
        return self.up(self.code(self.project(hidden), states))


@dataclass
class DrafterOutput(ModelOutput):
    """Output of a drafter's forward."""

    loss: Any = None  # result of the drafter's `loss_function`, if labels were given
    # K tensors of drafted states, `[S, D]` and then `[num_rolled, D]`. Depth d predicts the token at start + 2 + d.
    hidden_states: tuple[torch.Tensor, ...] | None = None
