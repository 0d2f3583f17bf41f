"""The SpecFormer drafter: attention over the accepted positions, then slots computed at once; loading and saving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig

from ...core.tensors import RMSNorm, batched_attention, is_unhooked
from ...drafters.base.decoder_layer import Attention, DecoderLayer, rotary_of
from ...drafters.base.draft_options import DraftOptions, default_options
from ...drafters.base.packed_texts import PackedTexts
from ...drafters.base.protocol import Call, Drafter, Read, check_sizes, weights_of
from ...drafters.base.refiners import REFINER_OPTIONS, check_refiners
from ...drafters.base.registry import register_drafter
from ...drafters.base.target_weights import DrafterOutput, StateNetwork, TargetWeights
from ...hub.pretrained_drafter import PretrainedDrafter
from .configuration_specformer import SpecFormerConfig
from .specformer_session import SpecFormerSession


def _of_slots(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
    """Attention of each chain's slots, which see the slots before them; see `Attend`."""
    chains, count = queries.shape[:2]
    seen = torch.ones(count, count, dtype=torch.bool, device=queries.device).tril().expand(chains, -1, -1)
    return batched_attention(queries, keys.transpose(1, 2), values.transpose(1, 2), seen)


class SpecFormerDrafter(StateNetwork, PretrainedDrafter, Drafter):
    """A drafter that computes all slots at once, after attention over the accepted positions ("SpecFormer").

    A draft takes one forward of two attentions and a feed-forward block, whatever its depth and the batch size. The
    drafter holds weights, configuration and, in `generation_config`, the drafting options, but no state of a call,
    so one drafter may serve several threads.

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
    - A norm precedes each attention, and the drafter has a separate norm before the head, whose scale starts as the
      target's.
    - With `ctc`, slots are frames that may be blank: their head has one more row, see `frames`.
    - Drafts of depth k compute only the first k of K slots. These are the same, as slots see none after them.

    Letters in the shapes: T pairs that are read, S or B texts or chains, K slots, D hidden size.
    """

    config_class = SpecFormerConfig
    config: SpecFormerConfig
    main_input_name = "taps"
    loss_function: Any = None
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    takes_tree_builders = True
    own_options = REFINER_OPTIONS
    why_not_exported = "its slots are made of one position by one product, and no format of another project does so"

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
        self.generation_config = self.default_generation_config()

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
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return tuple(self.config.target_tap_layers)

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return self.config.num_draft_steps

    @property
    def why_not_refined(self) -> str:
        return "its slots are frames, and the children of a node are not those of one slot" if self.config.ctc else ""

    def default_generation_config(self) -> GenerationConfig:
        config = self.config
        return default_options(config.num_draft_steps, config.tree_size, config.beam_width, self.own_options)

    def check_together(self, options: DraftOptions) -> None:
        check_refiners(self, options)

    def check(self, target: Any) -> None:
        check_sizes(self.config, target)

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


__all__ = ["SpecFormerDrafter"]


register_drafter(SpecFormerConfig.model_type, SpecFormerConfig, SpecFormerDrafter)
