"""The block drafter: a trunk that computes all slots of a block in one forward, its heads, and its files.

Parameters have the names of the package speculators. Letters in the shapes: B rows or blocks, T context positions, D
hidden size, K drafts of a block, V' draft vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from ...core.checks import printable
from ...core.tensors import RMSNorm
from ...core.tuning import LIKELY_COLUMNS
from ...drafters.base.protocol import Call, weights_of
from ...drafters.base.target_weights import DrafterOutput, TargetWeights, borrow
from ...hub.checkpoint import LOOSE_MASK
from ...hub.drafter_files import Shape
from ...runtime.target_limits import text_config
from ..estimate.reads import Read
from ..published.checkpoint import AnyCheckpoint
from ..published.decoder_layer import Attend, AttendByLayer, DecoderLayer, Rope, rotary_of
from ..published.network import PublishedNetwork, SpeculatorsFiles, refuse_unsaid, speculators_document
from .configuration import BlockConfig
from .heads import MARKOV_HEADS, BlockHead, CandidateSelector, ConfidenceHead, DominoHead, RefinerHead
from .rows import rotated_part
from .session import CONFIDENCE, BlockSession, training_attention

logger = logging.get_logger(__name__)

# Class names that engines use.
_ARCHITECTURES = {
    "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel",
    "xpress": "XPressSpeculator",
}  # fmt: skip


class BlockConvolution(nn.Module):
    """Two convolutions over a block's slots, before and after a part of a layer.

    Slot i becomes the sum over tau of (base[tau] + delta[i, tau]) * x[i - tau], with zeros before the block. Channels
    of a group share one delta. Both deltas are computed from the input of the first convolution. Kernels span
    `kernel_size` slots, groups `group_size` channels.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * (hidden_size // group_size), bias=False)
        self.group_size = group_size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes both convolutions the identity."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the convolved input `[..., slots, D]` of the part, and the kernels for `after`."""
        size = self.base_kernel.shape[1]
        deltas = self.kernel_projection(x).unflatten(-1, (2, size, -1)).repeat_interleave(self.group_size, dim=-1)
        kernels = self.base_kernel + deltas
        return _convolved(x, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def after(self, x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Returns the convolved output `[..., slots, D]` of the part."""
        return _convolved(x, kernels)


def _convolved(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Convolves blocks `[..., slots, D]` by kernels `[..., slots, K, D]`."""
    slots = x.shape[-2]
    parts = (F.pad(x, (0, 0, back, 0))[..., :slots, :] * kernels[..., back, :] for back in range(kernels.shape[-2]))
    return torch.stack(list(parts)).sum(dim=0)


class BlockLayer(DecoderLayer):
    """A decoder layer whose slots also see the context; optionally with convolutions (DFlash2)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.sizes)
        self.attention_conv, self.mlp_conv = (
            BlockConvolution(config.sizes.hidden_size, config.conv_kernel_size, config.conv_group_size)
            if config.conv_kernel_size
            else None
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: Any = None) -> torch.Tensor:
        """Returns the slots `[B, slots, D]` after this layer."""
        if self.attention_conv is None:
            return super().forward(x, rope, attend, rows)

        def attention(x: torch.Tensor) -> torch.Tensor:
            return self.self_attn(x, rope, attend)

        x = x + _between(self.attention_conv, self.input_layernorm(x), attention)
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _between(convolution: nn.Module | None, x: torch.Tensor, part: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Applies a part of a layer, between its convolutions."""
    convolution = cast(BlockConvolution, convolution)
    x, kernels = convolution.before(x)
    return convolution.after(part(x), kernels)


class BlockDrafter(PublishedNetwork):
    """Drafts a whole block of tokens in one forward (DFlash, DFlash2, DSpark, XPress).

    Reads hidden states of the target and borrows its embedding, and its output layer if it drafts the whole vocabulary.

    `AutoDrafter` loads published drafters unchanged; [`BlockDrafter.for_target`] makes a new one. Saved in the
    speculators format, which vLLM reads too.
    """

    config_class = BlockConfig
    why_not_refined = ""
    own_options = (CONFIDENCE,)

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        sizes, inputs = config.sizes, config.num_taps * config.target_hidden_size
        self.fc = nn.Linear(inputs, sizes.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.rotary = rotary_of(config.rotation, sizes)
        vocab_size = config.num_input_tokens or config.vocab_size or 0
        draft_size, width = config.draft_vocab_size or 0, sizes.hidden_size
        self.embed_tokens = nn.Embedding(vocab_size, width) if config.own_embedding else None
        self.markov_head = self.candidate_selector = self.domino = self.refiner_head = None
        self.confidence_head = self.lm_head = None
        if config.markov_rank:
            self.markov_head = MARKOV_HEADS[config.markov_head_type](vocab_size, draft_size, width, config.markov_rank)
        if config.selector_rank:
            selector = CandidateSelector(vocab_size, width, config.selector_rank, config.selector_top_k)
            self.candidate_selector = selector
        if config.domino_rank:
            ends = config.domino_rank, draft_size, config.free_depths
            self.domino = DominoHead(width, config.gru_size, *ends)
        if config.xpress_rank:
            ranks = config.xpress_rank, config.xpress_mlp_ratio
            self.refiner_head = RefinerHead(vocab_size, draft_size, width, config.block_size, *ranks)
        if config.confidence_head != "none":
            extra = config.markov_rank if config.confidence_head == "markov" else 0
            self.confidence_head = ConfidenceHead(width + extra)
        if config.has_own_head:
            self.lm_head = nn.Linear(width, draft_size, bias=False)
            self.lm_head.weight.requires_grad = False  # the target's rows, or a copy that was trained further
        if self.embed_tokens is not None:
            self.embed_tokens.weight.requires_grad = False
        self.add_vocabulary()
        if config.learned_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(width))

    @property
    def rows_of_trial(self) -> int:  # type: ignore[override]
        return self.config.block_size

    def trial_states(
        self, taps: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, depth: int, weights: TargetWeights
    ) -> Sequence[torch.Tensor]:
        mask = None if self.config.learned_mask else weights.embed(torch.tensor(self.config.mask_token_id))
        positions = torch.arange(len(taps), device=taps.device)
        return self(taps, weights.embed(tokens[1:]), positions, starts, mask_embeds=mask).hidden_states

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialises all weights; the target's rows are to be taken after that."""
        super().reset_parameters(std)
        for module in self.modules():
            if isinstance(module, CandidateSelector):
                nn.init.normal_(module.predecessor_codebook, std=std)
                nn.init.normal_(module.successor_codebook, std=std)
            elif isinstance(module, BlockConvolution):
                module.reset_parameters()

    @property
    def token_head(self) -> BlockHead | None:
        return cast("BlockHead | None", self.markov_head or self.candidate_selector or self.domino or self.refiner_head)

    def read(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns context states `[T, D]`, shared by all layers, from the target's hidden states `[T, taps * D]`."""
        return self.hidden_norm(self.fc(taps))

    def context_keys(self, index: int, states: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's keys and values `[T, kv_heads, head_dim]` of context states `[T, D]`."""
        attention = cast(BlockLayer, self.layers[index]).self_attn
        return attention.keys(states, rope), attention.values(states)

    @property
    def sinks(self) -> list[torch.Tensor | None]:
        """Scores `[heads]` of each layer's attention sinks, if it has any."""
        return [cast(BlockLayer, layer).self_attn.attention_sink_bias for layer in self.layers]

    def run(self, embeds: torch.Tensor, positions: torch.Tensor, attend: AttendByLayer) -> torch.Tensor:
        """Returns the slots `[B, slots, D]` after the final norm, from their embeddings and positions `[B, slots]`."""
        x, rope = embeds, self.rotary(positions, embeds.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, partial(attend, index))
        return self.norm(x)

    def block_embeds(self, anchors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns embeddings `[B, slots, D]` from those of anchors, `[B, D]`, and of masks, if none is learned."""
        mask = self.mask_embedding.to(anchors.dtype) if self.config.learned_mask else mask
        masks = mask.expand(len(anchors), self.config.block_size - 1, -1)
        return torch.cat([anchors[:, None], masks], dim=1)

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
        mask_embeds: torch.Tensor | None = None,
    ) -> DrafterOutput:
        """Drafts blocks after many positions of packed sequences at once (DFlash, training).

        The block that starts at pair i has its anchor x_{i+1} at position i + 1, and sees the context up to i. Blocks
        do not see each other. Each is computed whole, as its slots see each other; after the first `num_rolled` blocks,
        only the first draft of each is returned.

        Args:
            mask_embeds: `[D]`, `embed` of `mask_token_id`; unused with a learned mask embedding. The other arguments
                are those of `PublishedNetwork`.

        Raises:
            ValueError: `mask_embeds` is missing.
        """
        if mask_embeds is None and not self.config.learned_mask:
            raise ValueError(f"mask_embeds is missing: expected the embedding of token {self.config.mask_token_id}")
        if starts is None:
            starts = torch.tensor([len(taps) - 1], device=taps.device)
        states, rope = self.read(taps), self.rotary(position_ids, taps.dtype)
        context = [self.context_keys(index, states, rope) for index in range(len(self.layers))]
        anchors = embeds[starts]
        blocks = self.block_embeds(anchors, anchors[0] if mask_embeds is None else mask_embeds.to(anchors))
        slots = torch.arange(self.config.block_size, device=taps.device)
        positions = position_ids[starts, None] + 1 + slots
        of_blocks = position_ids, document_ids, starts, positions, self.sinks
        attend = training_attention(context, self.config.sights, *of_blocks)
        hidden = self.run(blocks, positions, attend)[:, self.config.first_slot :]
        rolled = len(starts) if num_rolled is None else num_rolled
        drafts = tuple(hidden[: len(starts) if depth == 0 else rolled, depth] for depth in range(hidden.shape[1]))
        loss = None if labels is None else self.loss_function(self, drafts, labels)
        return DrafterOutput(loss=loss, hidden_states=drafts)

    def logits(self, hidden: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Returns draft logits `[..., V']` of slots `[..., D]`, before any token information."""
        head = weights.head if self.lm_head is None else self.lm_head.weight
        assert head is not None
        logits, cap = F.linear(hidden, head)[..., : len(weights.vocab_ids)], self.config.final_logit_softcapping
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        return logits if cap == 0 else torch.tanh(logits / cap) * cap

    def borrow(self, embedding: nn.Module, output_head: nn.Module, with_head: bool = True) -> TargetWeights:
        """Collects the target's embedding, and its output rows if needed; copies only to another dtype or device.

        The drafter's own tables are used where they differ from the target's. Tokens beyond the target's vocabulary, by
        which they may be padded, are left out.
        """
        self._drop_copies(embedding, output_head)
        scale = self.config.embedding_scale
        is_normed, own = isinstance(getattr(embedding, "embed_norm", None), nn.Module), self.embed_tokens
        as_made = scale is None and not is_normed and own is None
        if scale is None:  # except the norm
            scale = 1.0 if as_made else float(getattr(embedding, "embed_scale", 1.0))
        tokens = len(cast(torch.Tensor, embedding.weight))
        ids = self.draft_vocab_ids(tokens)[: None if self.config.is_reduced else tokens]
        if self.token_head is not None:
            self.token_head.columns = len(ids)
        head = output_head if self.lm_head is None and with_head else None
        weights = borrow(cast(nn.Embedding, embedding), head, ids, self.device, self.dtype, scaled=as_made)
        if own is not None:
            weights = replace(weights, embed=lambda tokens: own(tokens.to(self.device)))
        if scale == 1.0:
            return weights
        embed = weights.embed
        return replace(weights, embed=lambda tokens: embed(tokens) * scale)

    def _drop_copies(self, embedding: nn.Module, output_head: nn.Module) -> None:
        """Drops tables that are the target's, as many files have them."""

        def is_copy(own: nn.Module | None, theirs: nn.Module) -> bool:
            tables: list[Any] = [getattr(module, "weight", None) for module in (own, theirs)]
            plain = all(type(each) in (nn.Parameter, torch.Tensor) and not each.is_meta for each in tables)
            if not plain or tables[0].shape != tables[1].shape or not tables[1].is_floating_point():
                return False  # there is none, or it is quantised or offloaded
            ours, there = (each.detach() for each in tables)
            few = slice(None, None, len(ours) // 64 + 1)  # tables that were trained further differ everywhere
            return torch.equal(ours[few], there[few].to(ours)) and torch.equal(ours, there.to(ours))

        if is_copy(self.embed_tokens, embedding):
            self.embed_tokens, self.config = None, replace(self.config, own_embedding=False)
        if self.config.own_head and not self.config.is_reduced and is_copy(self.lm_head, output_head):
            self.lm_head, self.config = None, replace(self.config, own_head=False)

    def not_among_weights(self, checkpoint: AnyCheckpoint) -> Mapping[str, Callable[[Mapping[str, Any]], torch.Tensor]]:
        """See `PublishedNetwork`. Masks may have an embedding in a file beside the weights."""
        return {"mask_embedding": lambda _: self._mask_in(checkpoint)} if self.config.learned_mask else {}

    def _mask_in(self, checkpoint: AnyCheckpoint) -> torch.Tensor:
        (tensor, about), width = checkpoint.loose_tensor(LOOSE_MASK), self.config.sizes.hidden_size
        name, mask = printable(checkpoint.name), self.config.mask_token_id
        if tensor.numel() != width or not tensor.is_floating_point():
            found = f"{list(tensor.shape)} of {tensor.dtype}"
            raise ValueError(f"{LOOSE_MASK} in {name} is {found}: expected {width} floating numbers")
        if about.get("mask_token_id", mask) != mask:
            found = printable(str(about["mask_token_id"]))
            raise ValueError(f"{LOOSE_MASK} in {name} is of token {found}: expected mask_token_id={mask}")
        return tensor.reshape(width)

    def may_hold(self) -> dict[str, Shape]:
        """Returns the shapes of copies of the target's tensors that files may have."""
        width, drafted = self.config.target_hidden_size, self.config.draft_vocab_size
        found: dict[str, Shape] = {"verifier_norm.weight": (width,), **super().may_hold()}
        return found if drafted is None else {**found, "verifier_lm_head.weight": (drafted, width)}

    @classmethod
    def for_target(cls, target: Any, draft_vocab_ids: Sequence[int] | None = None, **overrides: Any) -> BlockDrafter:
        """Makes an untrained drafter for a text-generating transformers model, in float32 on the CPU.

        `draft_vocab_ids` are the draftable token ids, all by default; `overrides` as for
        `BlockConfig.for_target`. Raises a ValueError if one is invalid, or ids are not ascending or beyond the
        vocabulary.
        """
        if draft_vocab_ids is not None:
            overrides["draft_vocab_size"] = len(draft_vocab_ids)
        drafter = cls(BlockConfig.for_target(target, **overrides))
        drafter.reset_parameters()
        if drafter.config.has_own_head:
            if draft_vocab_ids is None:
                raise ValueError("draft_vocab_size is given without draft_vocab_ids: expected the ids of these tokens")
            drafter.take_head(target.get_output_embeddings(), draft_vocab_ids)
        return drafter

    @torch.no_grad()
    def take_head(self, output_head: Any, ids: Sequence[int]) -> None:
        """Copies the target's output rows of `ids` `[V']`; raises a ValueError unless they are ascending and known."""
        size = self.config.vocab_size or 0
        found = torch.tensor(list(ids))
        if len(found) != self.config.draft_vocab_size or bool((found.diff() <= 0).any()) or found[0] < 0:
            raise ValueError(f"draft_vocab_ids is invalid: expected {self.config.draft_vocab_size} ascending token ids")
        if found[-1] >= size:
            raise ValueError(f"draft_vocab_ids holds {int(found[-1])}: expected ids below vocab_size={size}")
        assert self.lm_head is not None
        rows = output_head.weight.detach()
        self.lm_head.weight.copy_(rows[found.to(rows.device)])
        cast(torch.Tensor, self.d2t).copy_(found - torch.arange(len(found)))

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        config = replace(self.config, target_name=target_name or self.config.target_name)
        state = self.weights_in_files()
        loose = {LOOSE_MASK: state.pop("mask_embedding")} if config.learned_mask else {}
        return SpeculatorsFiles(_document(config, self.dtype), state, loose)

    def export(self, form: str, folder: str | os.PathLike[str], target_name: str = "") -> None:
        if self.config.learned_mask:
            raise ValueError(
                f"this drafter cannot be written in the format {form!r}: its masks have a learned embedding, for "
                f"which that format has no field. `save_pretrained` keeps it in {LOOSE_MASK}, which only this package "
                "reads"
            )
        if self.config.embedding_scale is None:
            logger.warning(
                f"in the format {form!r} this drafter reads the target's embedding rows as they are. If its target "
                "multiplies them by a factor, as Gemma does, other programs will accept less than is accepted here"
            )
        super().export(form, folder, target_name)

    def check(self, target: Any) -> None:
        super().check(target)
        tokens, mask = text_config(target).vocab_size, self.config.mask_token_id
        known = max(tokens, self.config.num_embedded if self.config.own_embedding or self.config.learned_mask else 0)
        if self.config.is_reduced and int(self.draft_vocab_ids().max()) >= tokens:
            self.refuse(f"the drafter drafts token {int(self.draft_vocab_ids().max())}, the target has {tokens} tokens")
        if mask >= known:
            self.refuse(f"the drafter reads token {mask} as its mask, the target has {tokens} tokens")

    def reads(self, depth: int, width: int) -> Iterator[Read]:
        config = self.config
        columns, rank = config.draft_vocab_size or 0, max(config.ranks)
        yield Read("fusion", weights_of(self.fc), 1, 1)
        yield Read("layers", weights_of(self.layers), 1, config.block_size)
        head = columns * config.sizes.hidden_size
        yield Read("head", head, 1, config.num_draft_steps, borrowed=self.lm_head is None)
        if rank:
            yield Read("token bias", min(columns, LIKELY_COLUMNS) * rank, depth, width)

    def session(self, call: Call) -> BlockSession:
        weights = self.borrow(call.target.get_input_embeddings(), call.target.get_output_embeddings())
        return BlockSession(self, weights, call)


def _kind_of(config: BlockConfig) -> str:
    """Returns the type of drafter: `"dflash"`, `"dflash2"`, `"dspark"` or `"xpress"`."""
    if config.selector_rank or config.xpress_rank:
        return "dflash2" if config.selector_rank else "xpress"
    heads = config.markov_rank > 0 or config.confidence_head != "none"
    return "dspark" if heads or config.sample_from_anchor else "dflash"


def _document(config: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns a drafter's config.json; raises a ValueError if the format cannot express what the drafter computes."""
    _check_can_be_written(config)
    kind = _kind_of(config)
    heads: dict[str, Any] = {}
    if kind == "dspark":
        heads = {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type,
            "enable_confidence_head": config.confidence_head != "none",
            "confidence_head_with_markov": config.confidence_head == "markov",
        }
    if kind == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        heads = {name: getattr(config, name) for name in names}
    if kind == "xpress":
        heads = {name: getattr(config, name) for name in ("xpress_rank", "xpress_mlp_ratio")}
    if config.embedding_scale is None:
        heads["target_scales_embeddings"] = True
    return speculators_document(
        config,
        kind,
        _ARCHITECTURES[kind],
        dtype,
        "qwen3",
        [sight.reach for sight in config.sights],
        aux_hidden_state_layer_ids=list(config.taps_of(0)),
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        sample_from_anchor=config.sample_from_anchor,
        sliding_window_non_causal=not any(sight.causal for sight in config.sights),
        **({"untold": list(config.untold)} if config.untold else {}),
        **heads,
    )


def _check_can_be_written(config: BlockConfig) -> None:
    sights = [sight for sight in config.sights if sight.reach is not None or sight.causal]
    last = config.taps_of(0)[-1]
    one_rule = len({(sight.reach, sight.causal) for sight in sights}) <= 1
    refuse_unsaid({
        "a sliding window that each slot counts by itself": any(each.reach and not each.of_anchor for each in sights),
        "slots that see no later ones in a layer without a window": any(sight.reach is None for sight in sights),
        "several sliding windows": not one_rule,
        "a factor of embeddings": config.embedding_scale not in (None, 1.0),
        "a factor or a cap of logits": config.output_multiplier != 1.0 or config.final_logit_softcapping != 0.0,
        "any target's vocabulary": config.vocab_size is None,
        "an output of the target's last layer after its norm, or one that may be that": config.last_tap_is_normed
        and last == (config.target_num_hidden_layers or last),
        "layers of Gemma 4": config.sizes.gemma,
        "attention sinks": config.sizes.sinks,
        "a bias by a recurrent network": config.domino_rank > 0,
        "convolutions without a selector": bool(config.conv_kernel_size) and not config.selector_rank,
        "heads that are rotated in part": rotated_part(config.rotation) != 1.0,
        "tables of more or fewer tokens than the vocabulary": config.num_input_tokens is not None
        and bool(config.own_embedding or any(config.ranks)),
    })  # fmt: skip
