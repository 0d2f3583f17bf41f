"""The drafter: a trunk that rolls hidden states forward, an injector for token information, a compressed head.

Nothing here has a batch axis. Training packs several documents into one row and rolls many chains at once; decoding is
the case of one document and one chain. Decoding a single text takes another way through the same parameters, `RollOut`
by `WorkingWeights`; `hsdraft check` compares what comes of it, but for the rounding to 8 bits, with training.

Letters in the shapes: T context positions, P positions already cached, S chains, K draft steps, D hidden size,
V' draft vocabulary, N nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig
from transformers.utils import ModelOutput, is_accelerate_available

from ...common.norms import RMSNorm
from ...common.target_weights import TargetWeights
from ...common.tensors import is_unhooked
from ...repository.pretrained_drafter import PretrainedDrafter
from ..draft_options import DraftOptions, default_options
from .configuration_hsdraft import HSDraftConfig
from .injectors import INJECTORS

_LARGE_MASK = 2**22  # rows times context positions, from which on attention goes by blocks of rows
_BLOCK = 256  # rows

Rope = tuple[torch.Tensor, torch.Tensor]
KeyValues = tuple[torch.Tensor, torch.Tensor]


@dataclass
class DraftContext:
    """Keys and values of the accepted positions, one pair a trunk layer, each `[kv_heads, P, head_dim]`.

    `document_ids` `[P]` says which sequence of a batch a position belongs to; `None` if there is only one.
    `position_ids` `[P]` are kept for trunks with a sliding window.
    """

    layers: list[KeyValues] = field(default_factory=list)
    document_ids: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0

    def within(self, window: int | None) -> DraftContext:
        """What later positions of each sequence can still see, through a window of so many positions."""
        if window is None or self.document_ids is None or self.position_ids is None:
            return self
        documents = self.document_ids
        last = self.position_ids.new_full((int(documents.max()) + 1,), -1)
        last = last.scatter_reduce(0, documents, self.position_ids, "amax")
        kept = (last[documents] - self.position_ids < window).nonzero().flatten()
        if len(kept) == self.length:
            return self
        layers = [(keys[:, kept], values[:, kept]) for keys, values in self.layers]
        return DraftContext(layers, documents[kept], self.position_ids[kept])


@dataclass
class HSDrafterOutput(ModelOutput):
    """Output of [`HSDrafter.forward`].

    Attributes:
        hidden_states: K tensors `[S, D]`: g_0 .. g_{K-1} of each chain; g_d predicts the token at start + 2 + d.
        context: the context cache with the new positions appended.
        loss: what the drafter's `loss_function` made of the labels, if there were any.
    """

    loss: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    context: DraftContext | None = None


def rotary_frequencies(config: HSDraftConfig, device: torch.device) -> torch.Tensor:
    """`[head_dim / 2]`, float32."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    return config.rope_theta**-exponents


def rotary_embedding(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Rope:
    """Cosines and sines `[..., head_dim]` of integer `positions` `[...]`."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class HSDraftAttention(nn.Module):
    """Grouped-query attention of chains over a shared context and over their own drafted positions."""

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        query_size = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def key_values(self, x: torch.Tensor, rope: Rope) -> KeyValues:
        """`[n, D]` to keys and values `[kv_heads, n, head_dim]`."""
        shape = (x.shape[0], self.kv_heads, self.head_dim)
        keys = rotate(self.k_proj(x).view(shape).transpose(0, 1), rope)
        return keys, self.v_proj(x).view(shape).transpose(0, 1)

    def forward(
        self, x: torch.Tensor, rope: Rope, context: KeyValues, mask: torch.Tensor | None, own: KeyValues | None = None
    ) -> torch.Tensor:
        """Attends from each row of `x` `[S, D]` to the context and, if given, to that chain's own positions.

        Args:
            context: keys and values `[kv_heads, P, head_dim]`, shared by all rows.
            mask: `[S, P]`, bool, True where a row may look; `None` for everywhere.
            own: keys and values `[kv_heads, S, steps, head_dim]`, private to each row.
        """
        rows = x.shape[0]
        queries = self.q_proj(x).view(rows, self.kv_heads, self.groups, self.head_dim).permute(1, 0, 2, 3)
        queries = rotate(queries, (rope[0][:, None], rope[1][:, None])) * self.head_dim**-0.5
        if own is None and mask is not None and mask.numel() > _LARGE_MASK:
            mixed = torch.cat([self._mix(*part) for part in _in_blocks(queries, context, mask)], dim=1)
        else:
            mixed = self._mix(queries, context, mask, own)
        return self.o_proj(mixed.permute(1, 0, 2, 3).reshape(rows, -1))

    def _mix(
        self, queries: torch.Tensor, context: KeyValues, mask: torch.Tensor | None, own: KeyValues | None = None
    ) -> torch.Tensor:
        """What queries `[kv_heads, S, groups, head_dim]` take from the values, in the same shape."""
        rows = queries.shape[1]
        flat = queries.reshape(self.kv_heads, rows * self.groups, self.head_dim)
        scores = (flat @ context[0].transpose(1, 2)).view(self.kv_heads, rows, self.groups, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
        if own is not None:
            scores = torch.cat([scores, queries @ own[0].transpose(2, 3)], dim=-1)
        weights = scores.float().softmax(dim=-1).to(context[1].dtype)
        length = context[0].shape[1]
        shared = weights[..., :length].reshape(self.kv_heads, rows * self.groups, length) @ context[1]
        mixed = shared.view(self.kv_heads, rows, self.groups, self.head_dim)
        return mixed if own is None else mixed + weights[..., length:] @ own[1]


def _in_blocks(
    queries: torch.Tensor, context: KeyValues, mask: torch.Tensor
) -> Iterator[tuple[torch.Tensor, KeyValues, torch.Tensor]]:
    """Parts of the rows, each with the context that any of them sees: no score is made of texts with one another."""
    for first in range(0, len(mask), _BLOCK):
        seen = mask[first : first + _BLOCK]
        columns = seen.any(dim=0).nonzero().flatten()
        keys, values = (states.index_select(1, columns) for states in context)
        yield queries[:, first : first + _BLOCK], (keys, values), seen[:, columns]


class HSDraftLayer(nn.Module):
    """A pre-norm transformer layer with SwiGLU, usable on context positions and on chains."""

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = HSDraftAttention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))

    def read(
        self, x: torch.Tensor, rows: torch.Tensor, rope: Rope, past: KeyValues | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, KeyValues]:
        """Appends all of `x` `[T, D]` to the context and returns the output at `rows` `[R]` only."""
        hidden = self.input_norm(x)
        context = self.attention.key_values(hidden, rope)
        if past is not None:
            context = (torch.cat([past[0], context[0]], dim=1), torch.cat([past[1], context[1]], dim=1))
        mixed = self.attention(hidden[rows], (rope[0][rows], rope[1][rows]), context, mask)
        return self._feed_forward(x[rows] + mixed), context

    def roll(
        self, x: torch.Tensor, rope: Rope, context: KeyValues, mask: torch.Tensor | None, own: KeyValues | None
    ) -> tuple[torch.Tensor, KeyValues]:
        """One draft step of all chains: `x` `[S, D]` joins its chain's own positions, then attends."""
        hidden = self.input_norm(x)
        keys, values = (states.unsqueeze(2) for states in self.attention.key_values(hidden, rope))
        if own is not None:
            keys, values = torch.cat([own[0], keys], dim=2), torch.cat([own[1], values], dim=2)
        mixed = self.attention(hidden, rope, context, mask, (keys, values))
        return self._feed_forward(x + mixed), (keys, values)


class HSDrafter(PretrainedDrafter):
    """A hidden-state drafter ("Make Every Draft Count", system Lyanna).

    Holds weights, configuration and, in `generation_config`, the drafting options; never the state of a call, so one
    drafter may serve several threads. Options, by the library's names where those exist:

    - `num_assistant_tokens`: depth of the draft, at most `num_draft_steps`;
    - `tree_size`, `beam_width`: nodes in all and nodes expanded per depth; a width of 1 drafts a chain;
    - `assistant_confidence_threshold`: nodes whose path is less probable than this are not drafted (0 keeps all);
    - `reuse`: what becomes of rejected drafts, `"none"`, `"ensemble"`, `"resample"`, or `"skip"`, which drafts from
      them alone, without a roll-out, where they are confident enough (single texts);
    - `reuse_weight`: weight of the old logits in `"ensemble"`;
    - `ngram_length`: nodes out of the text itself join the tree, found by leaders of up to so many tokens; 0 for none;
    - `tree_sizing`: `"cost"` drafts and verifies what pays here, up to the sizes above, `"fixed"` always all of it;
    - `node_cost`, `depth_cost`: what a verified node and a drafted depth cost, in forwards of one token; measured in
      the first rounds if not given;
    - `packed_weights`: whether rounds on a CPU multiply by copies of the target's weights that are laid out for it; by
      default once a call has saved the time for that, if they take no more than 2 GiB;
    - `tree_builder`: `"beam"`, or `"gumbel"` and `"stochastic_beam"`, which draw nodes instead of taking the best;
    - `verification`: `"walk"`, or `"rejection"` for drawn nodes, which accepts more at high temperature.
    """

    config_class = HSDraftConfig
    config: HSDraftConfig
    auto_map: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hsdraft.HSDraftConfig",
        "AutoModel": "hub_entry.HSDrafter",
    }
    base_model_prefix = ""
    main_input_name = "taps"
    _no_split_modules = ["HSDraftLayer"]  # noqa: RUF012

    def __init__(self, config: HSDraftConfig) -> None:
        config.check()  # fields may have been set since it was built
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.tap_norms = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.target_tap_layers)
        self.token_norm = RMSNorm(config.target_hidden_size, eps)
        sources = len(config.target_tap_layers) + 1
        self.fuse = nn.Linear(sources * config.target_hidden_size, size, bias=False)
        self.roll_norm = RMSNorm(size, eps)
        self.roll_proj = nn.Linear(size, size, bias=False)
        self.layers = nn.ModuleList(HSDraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.injector = INJECTORS[config.injector](config)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.head == "trained" else None
        self.generation_config = self.default_generation_config()
        self.post_init()

    def check_options(self) -> None:
        DraftOptions.of(self)

    def default_generation_config(self) -> GenerationConfig:
        """The drafting options of a drafter that was saved without any."""
        config = self.config
        return default_options(config.num_draft_steps, config.tree_size, config.beam_width)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def fuse_inputs(self, taps: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Trunk inputs `[T, D]` of the pairs (h_i, e(x_{i+1})): taps `[T, taps * D]` and embeddings `[T, D]`."""
        parts = [norm(tap) for norm, tap in zip(self.tap_norms, taps.chunk(len(self.tap_norms), dim=-1), strict=True)]
        return self.fuse(torch.cat([*parts, self.token_norm(embeds)], dim=-1))

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        context: DraftContext | None = None,
        num_draft_steps: int | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> HSDrafterOutput:
        """Reads accepted positions, then rolls hidden states forward without tokens (Lyanna, drafting phase).

        Args:
            taps: `[T, taps * D]`, the target's hidden states h_i at the tapped layers, side by side.
            embeds: `[T, D]`, embeddings of the accepted next tokens x_{i+1}.
            position_ids: `[T]`, int64, position i of each pair; those of a document follow one another.
            starts: `[S]`, int64, the pairs at which a chain starts; `None` for the last one only.
            document_ids: `[T]`, int64; pairs of other documents are not seen. `None` if all belong together. What
                the context holds belongs to them too, unless it says to which.
            context: what earlier calls read; `None` for nothing. Not changed.
            num_draft_steps: K of this call, the configuration's by default.
            num_rolled: chains rolled beyond g_0, the first ones of `starts`; `None` for all.
            labels: for training, what `loss_function(drafter, hidden_states, labels)` compares with. Computed in here,
                so that wrappers of the forward (data parallel, sharded, mixed precision) see all that is trained.
        """
        steps = self.config.num_draft_steps if num_draft_steps is None else num_draft_steps
        x = self.fuse_inputs(taps, embeds)
        past = context if context is not None else DraftContext()
        every = torch.arange(x.shape[0], device=x.device)
        last_only = starts is None
        starts = every[-1:] if starts is None else starts
        frequencies = rotary_frequencies(self.config, x.device)
        rope = rotary_embedding(position_ids, frequencies, x.dtype)
        layers: list[KeyValues] = []
        window, places = self.config.sliding_window, position_ids
        if past.position_ids is not None:
            places = torch.cat([past.position_ids, position_ids])
        near = window if window is not None and len(places) + steps > window else None
        # The last position of a single document sees everything: no mask, as in every decoding round.
        mask = None
        if not last_only or document_ids is not None or near is not None:
            mask = _causal_mask(starts, every, document_ids, past)
        trunk = cast(Sequence[HSDraftLayer], self.layers)
        for index, layer in enumerate(trunk):
            final = index == len(trunk) - 1
            x, key_values = layer.read(
                x,
                starts if final else every,
                rope,
                past.layers[index] if past.layers else None,
                _near(mask, position_ids[starts], places, near)
                if final
                else _near(_causal_mask(every, every, document_ids, past), position_ids, places, near),
            )
            layers.append(key_values)
        states = [x]
        rolled = x.shape[0] if num_rolled is None else num_rolled
        mask = None if mask is None else mask[:rolled]
        offsets = position_ids[starts[:rolled], None] + torch.arange(1, steps, device=x.device)
        cos, sin = rotary_embedding(offsets, frequencies, x.dtype)
        own: list[KeyValues | None] = [None] * len(trunk)
        for step in range(steps - 1):
            x = self.roll_proj(self.roll_norm(states[-1][:rolled]))
            seen = _near(mask, offsets[:, step], places, near)
            for index, layer in enumerate(trunk):
                x, own[index] = layer.roll(x, (cos[:, step], sin[:, step]), layers[index], seen, own[index])
            states.append(x)
        loss = None if labels is None else self.loss_function(self, states, labels)
        documents = document_ids
        if document_ids is not None and past.document_ids is not None:
            documents = torch.cat([past.document_ids, document_ids])
        read = DraftContext(layers, documents, None if window is None else places)
        return HSDrafterOutput(loss=loss, hidden_states=tuple(states), context=read)

    def logits(self, hidden: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Draft logits `[..., V']` of drafted hidden states `[..., D]`, before any token information."""
        if self.lm_head is not None:
            return self.lm_head(self.norm(hidden))
        assert weights.head is not None
        return F.linear(self.norm(hidden), weights.head)

    def draft_vocab_ids(self) -> torch.Tensor:
        """`[V']`, int64: the token id behind each row of the head."""
        ids = self.config.draft_vocab_ids
        return torch.arange(self.config.draft_vocab_size) if ids is None else torch.tensor(ids)

    def borrow(self, embedding: nn.Embedding, output_head: nn.Linear, with_head: bool = True) -> TargetWeights:
        """Collects what this drafter uses of a target: its embedding and the output rows of the draft vocabulary.

        Args:
            with_head: `False` leaves the rows out, which are copied.
        """
        device = self.device
        vocab_ids = self.draft_vocab_ids().to(device)
        head = None
        if self.lm_head is None and with_head:
            head = _output_rows(output_head, embedding, vocab_ids).to(device, self.dtype)
        table, dtype = embedding.weight.detach(), self.dtype  # the target is never trained
        place = table.device
        if type(embedding) is nn.Embedding and embedding.max_norm is None and is_unhooked(embedding):

            def look_up(tokens: torch.Tensor) -> torch.Tensor:
                return F.embedding(tokens, table)

        else:

            def look_up(tokens: torch.Tensor) -> torch.Tensor:
                return embedding(tokens).detach()

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            tokens = tokens if place.type == "meta" else tokens.to(place)  # an offloaded module moves them itself
            return look_up(tokens).to(device, dtype)

        return TargetWeights(embed, head, vocab_ids, len(table))


def _output_rows(output_head: nn.Module, embedding: nn.Embedding, vocab_ids: torch.Tensor) -> torch.Tensor:
    """`[V', D]`: rows of a target's output layer, also of an offloaded or a quantised one."""
    weight = getattr(output_head, "weight", None)
    if is_accelerate_available() and isinstance(weight, torch.Tensor) and weight.device.type == "meta":
        from accelerate.utils import align_module_device

        with align_module_device(output_head):
            return _output_rows(output_head, embedding, vocab_ids)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point():
        if torch.equal(vocab_ids, torch.arange(len(weight), device=vocab_ids.device)):
            return weight.detach()
        return weight.detach()[vocab_ids.to(weight.device)]
    # Packed weights are of no form known here, but they multiply; that takes time, so the rows are kept.
    kept = _rows_of_packed.get(output_head)
    if kept is None or not torch.equal(kept[0], vocab_ids.cpu()):
        size, place = embedding.weight.shape[1], embedding.weight
        inputs = torch.cat([torch.eye(size), torch.zeros(1, size)]).to(place.device, place.dtype)
        with torch.inference_mode(False), torch.no_grad():
            columns = output_head(inputs)[:, vocab_ids.to(place.device)]
        kept = vocab_ids.cpu(), (columns[:-1] - columns[-1:]).T.contiguous()
        _rows_of_packed[output_head] = kept
    return kept[1]


_rows_of_packed: weakref.WeakKeyDictionary[nn.Module, tuple[torch.Tensor, torch.Tensor]] = weakref.WeakKeyDictionary()


def _causal_mask(
    rows: torch.Tensor, every: torch.Tensor, document_ids: torch.Tensor | None, past: DraftContext
) -> torch.Tensor:
    """`[R, P + T]`, True where row r may look: earlier positions of its own document, and what is cached of it."""
    mask = every[None, :] <= rows[:, None]
    if document_ids is None:
        return F.pad(mask, (past.length, 0), value=True)
    mask &= document_ids[None, :] == document_ids[rows, None]
    if past.document_ids is None:
        return F.pad(mask, (past.length, 0), value=True)
    return torch.cat([past.document_ids[None, :] == document_ids[rows, None], mask], dim=1)


def _near(
    mask: torch.Tensor | None, rows: torch.Tensor, places: torch.Tensor, window: int | None
) -> torch.Tensor | None:
    """What of a mask `[R, P]` is within the window, for rows at positions `rows` `[R]` and a context at `places` `[P]`.

    Where the context does not know its positions, all that is before is near.
    """
    if mask is None or window is None or len(places) != mask.shape[1]:
        return mask
    return mask & (rows[:, None] - places[None, :] < window)


__all__ = ["HSDrafter"]
