"""EAGLE drafters and their sessions, with the parameter names of published files.

At position i, with embedding e and the target's hidden state h_i: the row of an accepted position reads e(x_{i+1}) and
the fused h_i, and gives y_i, which predicts x_{i+2}. The row of a drafted token reads its embedding and the y of the
row that drafted it, one position later ("EAGLE-3", section 3.1).

Letters in the shapes: T accepted pairs, S chains, K draft steps, D hidden size, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ...core.draft_tree import Expansion
from ...core.tensors import Attend as PackedAttend
from ...core.tensors import RMSNorm, batched_attention
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.packed_texts import PackedTexts
from ...drafters.base.protocol import Accepted, Ask, Call, weights_of
from ...drafters.base.target_weights import DrafterOutput, TargetWeights, borrow
from ...drafters.base.tree_session import Columns, ParallelExpansion
from ...runtime.target_limits import text_config
from ..estimate.reads import Read
from ..published.checkpoint import AnyCheckpoint
from ..published.context import RowContext, Slots
from ..published.decoder_layer import AttendByLayer, rotary_of
from ..published.levels import LevelExpansion
from ..published.network import (
    TOKEN_MAP,
    PublishedNetwork,
    SpeculatorsFiles,
    offsets_listed,
    refuse_unsaid,
    speculators_document,
)
from ..published.nodes import DraftedNodes, LevelSession, ends_of, reading_attention
from ..published.readings import told
from .configuration import EagleConfig, EagleLayer, LatentSizes


class DraftedRows(DraftedNodes):
    """Rows drafted in one round. Row 0 is the last accepted pair; drafted rows follow in the order of `extend`.

    Args:
        weights: what the drafter borrows from its target.
        states: `[B, D]`, y of the last accepted pairs.
        last: `[B, 1]`, int64, positions of these pairs.
    """

    def __init__(
        self,
        network: Any,
        weights: TargetWeights,
        context: RowContext,
        rows: Sequence[int],
        states: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        super().__init__(context, rows, states.device)
        self._network, self._weights, self._last = network, weights, last
        self.states = states[:, None]  # y of all rows by number, `[B, 1 + m, D]`

    def extend(
        self,
        states: torch.Tensor,  # `[B, n, D]`, input states
        embeds: torch.Tensor,  # `[B, n, D]`, embeddings of their tokens
        parents: torch.Tensor,  # `[B, n]`, int64, row numbers
        depths: torch.Tensor,  # `[n]`, int64, distance from the last accepted pair
        causal: bool = False,  # whether each row also sees the earlier rows of this call
    ) -> torch.Tensor:
        """Adds rows, which see the accepted text, their ancestors and themselves; returns their numbers `[B, n]`."""
        numbers = self.add(parents, causal)

        @cache  # layers with the same window share a mask
        def mask(window: int | None) -> torch.Tensor:
            near = None if window is None else (window - depths).expand(len(parents), -1)
            return self.seen(self._last.expand_as(parents), near)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
            view = self.written(layer, keys, values)
            return batched_attention(queries, *view, mask(self._network.config.windows[layer]))

        y = self._network.through(states, embeds, self._last + depths, attend)
        self.states = torch.cat([self.states, y], dim=1)
        return numbers

    def of_roots(self) -> torch.Tensor:
        return self._network.logits(self.states[:, :1], self._weights)

    def of_nodes(self, level: int, tokens: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        above = self.states.gather(1, parents[..., None].expand(-1, -1, self.states.shape[-1]))
        depths = torch.full_like(tokens[0], level - 1)
        numbers = self.extend(self._network.fed_back(above), self._weights.embed(tokens), parents, depths)
        return self._network.logits(self.states[:, -tokens.shape[1] :], self._weights), numbers


class EagleSession(LevelSession):
    """Drafts trees (or chains) for a batch, one depth of all rows per forward."""

    def __init__(self, network: Any, weights: TargetWeights, call: Call) -> None:
        config = network.config
        super().__init__(network, weights, call, config.num_hidden_layers)
        parallel = config.mask_token_id is not None
        sizes = config.sizes, config.num_hidden_layers, config.draft_vocab_size
        self.kind = *sizes, parallel, network.dtype, network.device

    def columns(self, news: Accepted) -> Columns:
        device, dtype = self.drafter.device, self.drafter.dtype
        last = self.weights.embed(news.following[-1:])
        if news.embeds is None:
            embeds, count = self.weights.embed(news.following), len(news.positions)
        elif news.embeds.shape[-1] == last.shape[-1]:
            embeds, count = torch.cat([news.embeds.to(last.device, last.dtype), last]), len(news.positions)
        else:  # the drafter's embedding has another width, and the token ids are unknown
            embeds, count = last, 1
        taps, positions = news.taps[-count:], news.positions[-count:]
        return taps.to(device, dtype), embeds.to(device, dtype), positions.to(device)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        (taps, embeds, positions), network = columns, self.drafter
        attend = reading_attention(self._context, slots, counts, positions, network.config.windows)
        ends = ends_of(counts, positions.device)
        states = network.through(network.fuse(taps), embeds, positions, attend, ends)
        self._left.update(zip(counts, states, strict=True))  # y of its last pair, `[D]`

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        network, weights, mask = self.drafter, self.weights, self.drafter.config.mask_token_id
        rows = [ask.row for ask in asks]
        self.read_pending(rows)
        race, temperature = self.race(rows, depth), options.temperature
        states = torch.stack([self._left[row] for row in rows])
        drafted = DraftedRows(network, weights, self._context, rows, states, self.anchors(rows) - 1)
        if mask is None:
            return LevelExpansion(drafted, depth, temperature, race)
        if depth > 1:  # one forward over rows of the mask token; the last accepted pair gives the first depth
            depths = torch.arange(1, depth, device=states.device)
            embeds = weights.embed(torch.full_like(depths, mask)).expand(len(rows), -1, -1)
            parents = torch.zeros_like(depths).expand(len(rows), -1)
            drafted.extend(network.mask_states().expand_as(embeds), embeds, parents, depths, causal=True)
        return ParallelExpansion(network.logits(drafted.states, weights), temperature=temperature, race=race)


_CLASSES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}


class EagleDrafter(PublishedNetwork):
    """A drafter of EAGLE-1, EAGLE-2, EAGLE-3 or a parallel one (P-EAGLE), in any published format.

    The constructor makes an untrained drafter; an unknown rope type raises a ValueError.

        drafter = AutoDrafter.from_pretrained("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
        out = model.generate(**inputs, assistant_model=drafter)
    """

    config_class = EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, eps = config.sizes.hidden_size, config.sizes.rms_norm_eps
        inputs = config.num_taps * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size or 0, size) if config.own_embedding else None
        self.input_norm = RMSNorm(inputs, eps) if config.norm_before_fc else None
        tap_norms = (RMSNorm(config.target_hidden_size, eps) for _ in range(config.num_taps))
        self.fc_norm = nn.ModuleList(tap_norms) if config.fc_norm else None
        self.fc = (
            nn.Linear(inputs + size * config.fuses_embedding, size, bias=config.fc_bias) if config.has_fc else None
        )
        self.layers = nn.ModuleList(EagleLayer(config, index == 0) for index in range(config.num_hidden_layers))
        self.norm = nn.Identity() if config.fuses_embedding else RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or 0, bias=False) if config.own_head else None
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, inputs)) if config.mask_token_id is not None else None
        self.rotary = rotary_of(dict(config.rope), config.sizes)
        self.add_vocabulary()
        if self.device.type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        super().reset_parameters(std)
        if self.mask_hidden is not None:
            nn.init.normal_(self.mask_hidden)
        if self.config.is_reduced and self.config.draft_vocab_ids is not None:
            ids = torch.tensor(self.config.draft_vocab_ids)
            cast(torch.Tensor, self.d2t).copy_(ids - torch.arange(len(ids)))

    @classmethod
    def of_format(cls, *args: Any, **kwargs: Any) -> Any:
        drafter = super().of_format(*args, **kwargs)
        if drafter.config.is_reduced:
            drafter.config = replace(drafter.config, draft_vocab_ids=tuple(drafter.draft_vocab_ids().tolist()))
        return drafter

    def not_among_weights(self, checkpoint: AnyCheckpoint) -> Mapping[str, Callable[[Mapping[str, Any]], torch.Tensor]]:
        """See `PublishedNetwork`. The head may be the drafter's embedding, as SGLang reads files without a head."""
        ids, made = self.config.draft_vocab_ids, {}
        if self.config.is_reduced and ids is not None:
            made["d2t"] = lambda state: torch.tensor(ids) - torch.arange(len(ids))
        elif self.config.is_reduced and TOKEN_MAP in checkpoint.shapes:
            made["d2t"] = lambda state: offsets_listed(checkpoint, self.config.vocab_size or 0)
        tied = checkpoint.config.get("tie_word_embeddings") is True and self.config.own_embedding
        if tied and self.config.own_head and not ("lm_head.weight" in checkpoint.shapes or self.config.is_reduced):
            made["lm_head.weight"] = lambda state: state["embed_tokens.weight"].clone()
        return made

    @classmethod
    def described(cls, config: EagleConfig) -> dict[str, str]:
        if config.fuses_embedding:
            return {"reads": "the last hidden state, and the next token (EAGLE-1, EAGLE-2)"}
        fed_back = () if config.mask_token_id is not None or "norm_output" in config.untold else ("norm_output",)
        return told(config, {}, (*fed_back, *config.untold))

    @property
    def can_be_tried(self) -> bool:  # type: ignore[override]
        return len(set(self.config.windows)) == 1

    @property
    def rows_of_trial(self) -> int:  # type: ignore[override]
        return 4

    def reread(self, **fields: Any) -> None:
        super().reread(**fields)
        for index, layer in enumerate(cast("Iterable[EagleLayer]", self.layers)):
            layer.norm_before_residual = self.config.norm_before_residual
            layer.norms_state_twice = index == 0 and self.config.norms_state_twice

    def trial_states(
        self, taps: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, depth: int, weights: TargetWeights
    ) -> Sequence[torch.Tensor]:
        embeds, mask = weights.embed(tokens[1:]), self.config.mask_token_id
        path = embeds[starts[:, None] + torch.arange(depth, device=starts.device)]
        path = path if mask is None else weights.embed(torch.tensor(mask)).expand_as(path)
        positions = torch.arange(len(taps), device=taps.device)
        return self(taps, embeds, positions, starts, num_draft_steps=depth, path_embeds=path).hidden_states

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        check_can_be_written(self.config)
        config = replace(self.config, target_name=target_name or self.config.target_name)
        return SpeculatorsFiles(_document(config, self.dtype), self.weights_in_files())

    def borrow(
        self, embedding: nn.Embedding, output_head: nn.Module | None = None, vocab_size: int | None = None
    ) -> TargetWeights:
        """Borrows the target's embedding, unscaled as in training, and its output rows, where the drafter has none.

        Tokens from the target's `vocab_size` on, by which the drafter's tables are padded, are left out.
        """
        ids, table = self.draft_vocab_ids()[: vocab_size if not self.config.is_reduced else None], self.embed_tokens
        head = None if self.config.own_head else output_head
        weights = borrow(embedding, head, ids, self.device, self.dtype, scaled=False)
        return weights if table is None else replace(weights, embed=lambda tokens: table(tokens.to(self.device)))

    def reads(self, depth: int, width: int) -> Iterator[Read]:
        config, layers, fused = self.config, weights_of(self.layers), weights_of(self.fc)
        head, borrowed = (config.draft_vocab_size or 0) * config.sizes.hidden_size, self.lm_head is None
        if config.fuses_embedding:
            layers, fused = layers + fused, 0
        parallel = self.mask_hidden is not None  # P-EAGLE
        yield Read("fusion", fused, 1, 1)
        yield Read("layers", layers, 2, depth) if parallel else Read("layers", layers, depth, width)
        yield Read("head", head, 1, depth, borrowed) if parallel else Read("head", head, depth, width, borrowed)

    def session(self, call: Call) -> EagleSession:
        target = call.target
        weights = self.borrow(
            target.get_input_embeddings(), target.get_output_embeddings(), text_config(target).vocab_size
        )
        return EagleSession(self, weights, call)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Maps taps `[..., taps * target's D]` to input states `[..., D]` of the first layer."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return taps if self.fc is None or self.config.fuses_embedding else self.fc(taps)

    def through(
        self,
        states: torch.Tensor,  # `[..., n, D]`, fused hidden states of the target, or from `fed_back`
        embeds: torch.Tensor,  # `[..., n, D]`, embeddings of the tokens
        positions: torch.Tensor,  # `[..., n]`, int64
        attend: AttendByLayer,  # stores keys and values, and computes attention
        rows: Any = None,  # rows to return; None for all
    ) -> torch.Tensor:
        """Returns y of rows `[..., n, D]`."""
        rope = self.rotary(positions, states.dtype)
        last, x = len(self.layers) - 1, states
        if self.config.fuses_embedding:
            x = cast(nn.Linear, self.fc)(torch.cat([embeds, states], dim=-1))
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, partial(attend, index), rows if index == last else None, embeds)
        return x

    def fed_back(self, y: torch.Tensor) -> torch.Tensor:
        """Maps y `[..., D]` to the input state of the token that it drafted."""
        return self.norm(y) if self.config.norm_output else y

    def logits(self, hidden: torch.Tensor, weights: TargetWeights | None = None) -> torch.Tensor:
        """Returns draft logits `[..., V']` of states y `[..., D]`; `weights` are needed without a head."""
        normed = self.norm(hidden)
        if self.lm_head is None:
            logits = F.linear(normed, cast(torch.Tensor, cast(TargetWeights, weights).head))
        else:
            logits = self.lm_head(normed)
        logits = logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale
        if cap := self.config.final_logit_softcapping:
            logits = torch.tanh(logits / cap) * cap
        return logits if weights is None else logits[..., : len(weights.vocab_ids)]

    def mask_states(self) -> torch.Tensor:
        """Returns the input state `[D]` of the deeper rows of a parallel drafter."""
        return self.fuse(cast(torch.Tensor, self.mask_hidden)).flatten()

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_draft_steps: int | None = None,
        num_rolled: int | None = None,
        path_embeds: torch.Tensor | None = None,
        labels: Any = None,
    ) -> DrafterOutput:
        """Reads sequences, then unrolls drafts from some positions (EAGLE-3's training-time test).

        The row of step s at start i sees the target's states up to i, and the s steps of its chain as drafted states.

        Args:
            num_draft_steps: K, the configuration's by default.
            path_embeds: `[S, K, D]`, embeddings of the parents x_{i+1}, x_{i+2}, ... of each depth, or of the mask
                token for a parallel drafter. The first depth is not read here but from `embeds`. The other arguments
                are those of `PublishedNetwork`.

        Raises:
            ValueError: `path_embeds` is missing, or the layers have different windows.
        """
        steps = self.config.num_draft_steps if num_draft_steps is None else num_draft_steps
        if steps > 1 and path_embeds is None:
            raise ValueError(f"path_embeds=None is invalid with {steps} draft steps: expected the chains' embeddings")
        texts = PackedTexts(position_ids, document_ids, starts, self.config.window, steps)
        y = self.through(self.fuse(taps), embeds, position_ids, _of_packed(texts.reading()), texts.starts)
        states, at = [y], position_ids[texts.starts][:num_rolled]
        y = y[:num_rolled]
        mask = None if self.mask_hidden is None else self.mask_states().expand_as(y)
        for step in range(1, steps):
            inputs = self.fed_back(y) if mask is None else mask
            path = cast(torch.Tensor, path_embeds)[: len(y), step]
            y = self.through(inputs, path, at + step, _of_packed(texts.rolling(step, len(y))))
            states.append(y)
        loss = None if labels is None else self.loss_function(self, states, labels)
        return DrafterOutput(loss=loss, hidden_states=tuple(states))


def _of_packed(attend: PackedAttend) -> AttendByLayer:
    """Packed attention, with keys and values row by row."""

    def attend_rows(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any
    ) -> torch.Tensor:
        return attend(layer, queries, keys.transpose(0, 1), values.transpose(0, 1), rows)

    return attend_rows


def check_can_be_written(config: EagleConfig) -> None:
    refuse_unsaid({
        "one fused embedding and state (EAGLE-1, EAGLE-2)": config.fuses_embedding,
        "the target's output rows": not config.own_head,
        "no fc": not config.has_fc,
        "a bias of fc": config.fc_bias,
        "a state that is normed twice (ModelOpt)": config.norms_state_twice,
        "a factor or a cap of logits": config.logit_scale != 1.0 or config.final_logit_softcapping != 0.0,
        "layers of Gemma 4": config.sizes.gemma,
        "keys and values of one state (MLA)": isinstance(config.sizes, LatentSizes),
        "embeddings read by all layers": config.all_read_embeddings and config.num_hidden_layers > 1,
    })  # fmt: skip


def _document(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns a drafter's config.json in the speculators format, which vLLM reads too."""
    kind = "eagle3" if config.mask_token_id is None else "peagle"
    open_fields: dict[str, Any] = {} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}
    if config.untold:  # a later load tries them
        open_fields["untold"] = list(config.untold)
    taps = config.target_tap_layers
    switches = ("num_draft_steps", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return speculators_document(
        config,
        kind,
        _CLASSES[kind],
        dtype,
        "qwen3" if config.sizes.qk_norm else "llama",
        config.windows if any(config.windows) else (),
        eagle_aux_hidden_state_layer_ids=None if taps is None else list(taps),
        embed_requires_grad=config.own_embedding,
        tie_word_embeddings=False,
        **{name: getattr(config, name) for name in switches},
        **open_fields,
    )
