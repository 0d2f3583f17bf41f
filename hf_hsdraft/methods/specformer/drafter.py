"""The SpecFormer drafter: configuration, network and session. One attended position makes all slots at once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.checks import integer, setting
from ...core.draft_tree import Expansion
from ...core.tensors import RMSNorm, batched_attention, is_unhooked, on_device
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.packed_texts import PackedTexts
from ...drafters.base.pretrained_drafter import StateDrafter
from ...drafters.base.protocol import Ask, Call, weights_of
from ...drafters.base.registry import register_drafter
from ...drafters.base.target_weights import DrafterOutput, StateNetwork, TargetWeights
from ...drafters.base.travelling_config import AttendingConfig, as_list
from ...drafters.base.tree_session import Columns, TokenBias
from ..estimate.reads import Read
from ..published.context import ParallelContextSession, Slots
from ..published.decoder_layer import Attention, DecoderLayer, LayerSizes, rotary_of
from ..published.target_sizes import FLAG
from .collapsed_frames import CollapsedFrames


class SpecFormerConfig(AttendingConfig):
    """Configuration of a [`SpecFormerDrafter`], checked on construction; [`SpecFormerConfig.for_target`] derives it."""

    model_type = "specformer"

    target_tap_layers: Sequence[int] = setting(
        "Hidden states of the target that the drafter reads, ascending (0 = embeddings, i = output of layer i, the "
        "last one after the final norm). `None` picks the embeddings, a middle layer, and the last two (SpecFormer)",
        None, convert=as_list, derived=lambda config: sorted(
            {0, config.target_num_hidden_layers // 2, *range(config.target_num_hidden_layers + 1)[-2:]}
        ),
    )  # fmt: skip
    num_hidden_layers: int = setting("Number of layers over the slots; SpecFormer has one", 1, integer(64))
    num_draft_steps: int = setting("K, the number of slots, and so the depth of the draft tree", 8, integer(64))
    reads_tokens: bool = setting(
        "Whether slots know the last accepted token. SpecFormer's do not, see [`SpecFormerDrafter`]", True, FLAG
    )
    ctc: bool = setting(
        "Whether slots are frames of which each may be blank, and are collapsed into a tree, see `collapsed_frames` "
        '("CTC drafter"). Such a drafter has learned by `objective="ctc"`',
        False, FLAG
    )  # fmt: skip

    @property
    def sizes(self) -> LayerSizes:
        heads = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        return LayerSizes(self.hidden_size, self.intermediate_size, *heads, self.rms_norm_eps)


def _of_slots(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
    """Attention of each chain's slots, which see the slots before them; see `Attend`."""
    chains, count = queries.shape[:2]
    seen = torch.ones(count, count, dtype=torch.bool, device=queries.device).tril().expand(chains, -1, -1)
    return batched_attention(queries, keys.transpose(1, 2), values.transpose(1, 2), seen)


class SpecFormerDrafter(StateNetwork, StateDrafter):
    """A drafter that computes all slots at once, after attention over the accepted positions ("SpecFormer").

    Let h_i be the target's hidden states at position i, after which it chose x_{i+1}. The states of a position are
    normed and joined, attend to the positions before (causal, with a residual), and are normed again. One product maps
    them to K slots, without a residual; its bias tells slots apart. The slots attend to those before them and pass a
    feed-forward block, both with residuals. A norm and the target's output rows make predictions of them ("SpecFormer",
    section 3). Slot d of position i predicts x_{i+2+d}. All slots of a draft are those of position t-1, the last that
    the target has read, with x_t the last accepted token.

    Differences from SpecFormer:

    - SpecFormer's slots know h_i alone. They can only guess x_{i+1} from the distribution that the target drew it from.
      With `reads_tokens`, the default, the embedding of x_{i+1} joins the states, as in the hidden-state drafter. This
      matters most at temperatures above 0. `reads_tokens=False` is SpecFormer's form.
    - The released code runs the module on every verified position, in the target's forward, before it is known which
      are accepted. Here only accepted positions are read, in the next draft. The slots are the same.
    - A norm precedes each attention, and the drafter has its own norm before the head.

    Letters in the shapes: T pairs that are read, S or B texts or chains, K slots, D hidden size.
    """

    config_class = SpecFormerConfig
    config: SpecFormerConfig
    main_input_name = "taps"
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012

    def __init__(self, config: SpecFormerConfig) -> None:
        config.check()  # fields may have been set since it was built
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.add_fusion(config.reads_tokens)
        self.context_norm = RMSNorm(size, eps)
        self.context_attn = Attention(config.sizes)
        self.expand_norm = RMSNorm(size, eps)
        self.expand = nn.Linear(size, config.num_draft_steps * size)
        self.layers = nn.ModuleList(DecoderLayer(config.sizes) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.add_head()
        self.blank = nn.Parameter(torch.zeros(size)) if config.ctc else None
        theta = {"rope_theta": config.rope_theta, "rope_type": "default"}
        self.rotary = rotary_of({"rope_parameters": theta}, config.sizes)
        self.post_init()

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> DrafterOutput:
        """Drafts after many positions of packed texts at once; see `HSDrafter.forward`.

        Pair i is `taps` `[T, taps * D]`, the target's hidden states h_i, with `embeds` `[T, D]` of x_{i+1}. Chains
        beyond the first `num_rolled` of `starts` get only the first slot.
        """
        window, part = self.config.sliding_window, self.context_attn
        texts = PackedTexts(position_ids, document_ids, starts, window, 1)
        x, places = self.fuse_inputs(taps, embeds), texts.starts
        normed, rope = self.context_norm(x), self.rotary(position_ids, x.dtype)
        keys, values = part.keys(normed, rope).transpose(0, 1), part.values(normed).transpose(0, 1)
        queries = part.queries(normed[places], (rope[0][places], rope[1][places]))
        mixed = texts.reading()(0, queries, keys, values, places)
        states = x[places] + part.o_proj(mixed)
        rolled = len(states) if num_rolled is None else num_rolled
        first, *further = self.slots(states[:rolled], self.config.num_draft_steps).unbind(dim=1)
        if rolled < len(states):
            first = torch.cat([first, self.slots(states[rolled:], 1)[:, 0]])
        drafts = (first, *further)
        loss = None if labels is None else self.loss_function(self, drafts, labels)
        return DrafterOutput(loss=loss, hidden_states=drafts)

    def slots(self, states: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the first slots `[B, count, D]` of states `[B, D]` that have attended to the text."""
        size = self.config.hidden_size * count
        x, expand = self.expand_norm(states), self.expand
        if type(expand) is nn.Linear and is_unhooked(expand):  # an adapter or an offloaded layer has to be called
            x = F.linear(x, expand.weight[:size], expand.bias[:size])
        else:
            x = expand(x)[..., :size]
        x = x.unflatten(-1, (count, -1))
        rope = self.rotary(torch.arange(count, device=x.device), x.dtype)
        for layer in self.layers:
            x = layer(x, rope, _of_slots)
        return x

    def frames(self, slots: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Returns log-probabilities `[..., V' + 1]`, float32, of slots `[..., D]` as frames; the blank is last."""
        assert self.blank is not None, "only with ctc"
        blank = self.norm(slots) @ self.blank.to(slots.dtype)
        logits = torch.cat([self.logits(slots, weights), blank[..., None]], dim=-1)
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    @property
    def why_not_refined(self) -> str:
        return "its slots are frames, and the children of a node are not those of one slot" if self.config.ctc else ""

    def session(self, call: Call) -> SpecFormerSession:
        weights = self.borrow(call.target.get_input_embeddings(), call.target.get_output_embeddings())
        return SpecFormerSession(self, weights, call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        config, head = self.config, self.config.draft_vocab_size * self.config.hidden_size
        depth = config.num_draft_steps if config.ctc else depth  # all frames count
        return (
            Read("fusion", weights_of(self.fuse), 1, 1),
            Read("attention to the text", weights_of(self.context_attn), 1, 1),
            Read("slots", weights_of(self.expand) * depth // config.num_draft_steps, 1, 1),
            Read("slot layers", weights_of(self.layers), 1, depth),
            Read("head", head, 1, depth, borrowed=self.lm_head is None),
        )


register_drafter(SpecFormerConfig.model_type, SpecFormerConfig, SpecFormerDrafter)


class SpecFormerSession(ParallelContextSession):
    """Drafts trees (or chains) for a batch. Only the last position of each text attends to those before it."""

    reads_tokens = True

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        config = drafter.config
        super().__init__(drafter, weights, call, 1)
        layers, taps, tokens = config.num_hidden_layers, len(config.target_tap_layers), config.draft_vocab_size
        place = drafter.dtype, drafter.device
        self.kind = config.sizes, layers, taps, tokens, config.num_draft_steps, config.ctc, config.reads_tokens, *place
        # The fused inputs of each text's last position read.
        self._last = torch.zeros(call.rows, config.hidden_size, dtype=drafter.dtype, device=drafter.device)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        drafter, part = self.drafter, self.drafter.context_attn
        taps, embeds, positions = columns
        x = drafter.fuse_inputs(taps, embeds)
        normed = drafter.context_norm(x)
        self._context.write(0, slots, part.keys(normed, drafter.rotary(positions, x.dtype)), part.values(normed))
        ends = [end - 1 for end in itertools.accumulate(counts.values())]
        self._last[on_device(list(counts), x.device)] = x[on_device(ends, x.device)]

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        rows, drafter, part = [ask.row for ask in asks], self.drafter, self.drafter.context_attn
        self.read_pending(rows)
        positions = self.anchors(rows) - 1
        x = self._last[on_device(rows, positions.device)]
        queries = part.queries(drafter.context_norm(x)[:, None], drafter.rotary(positions, x.dtype))
        keys, values = self._context.view(0, rows)
        seen = self._context.seen(rows, positions, drafter.config.sliding_window)
        mixed = batched_attention(queries, keys, values, seen)
        count = drafter.config.num_draft_steps if drafter.config.ctc else depth  # any frame may say the first token
        return drafter.slots(x + part.o_proj(mixed[:, 0]), count)

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, TokenBias | None]:
        return self.drafter.logits(hidden, self.weights), None

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        if not self.drafter.config.ctc:
            return super().expansion(asks, depth, options)
        frames = self.drafter.frames(self.drafted(asks, depth), self.weights)
        drawn, temperature = options.drawn, options.temperature
        race = self.race([ask.row for ask in asks], depth)
        return CollapsedFrames(frames, self.weights.vocab_ids, depth, drawn, temperature, race)
