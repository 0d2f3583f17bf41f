"""The self-speculative drafter: its configuration, imitation network and session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ...core.checks import MOST_NODES, Limit, check_fields, demand, integer, setting
from ...core.draft_tree import DraftTree
from ...core.options import Option
from ...core.refusals import DraftingRefused
from ...core.tensors import RMSNorm, device_of
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.pretrained_drafter import StateDrafter
from ...drafters.base.protocol import Ask, Call, weights_of
from ...drafters.base.registry import register_drafter
from ...drafters.base.target_weights import DrafterOutput, StateNetwork, TargetWeights
from ...drafters.base.travelling_config import TravellingConfig
from ...drafters.base.tree_session import TreeSession
from ...runtime.target_parts import decoder_list
from ..estimate.reads import Read
from ..published.decoder_layer import FeedForward
from ..published.levels import LevelExpansion
from ..published.target_copies import refuse_sharded, why_not_replaced
from .first_layers import FirstLayers

logger = logging.get_logger(__name__)

LAYER_REUSE = Option(
    "layer_reuse",
    True,
    Limit(lambda value: isinstance(value, bool), "True or False"),
    "Whether verification continues from what the first layers have read of a draft, or reads it again.",
)


class SelfDraftConfig(TravellingConfig):
    """Configuration of a [`SelfDrafter`], checked on construction; [`SelfDraftConfig.for_target`] derives it."""

    model_type = "self_speculation"

    target_layer_weights: int = setting(
        "Number of weights of one of the target's layers, for estimates; 0 if it is not known",
        0, integer(2**40, least=0)
    )  # fmt: skip
    draft_layers: int = setting(
        "n, the number of the target's first layers that draft. `None` means a quarter of them",
        None, integer(4096), derived=lambda config: max(1, config.target_num_hidden_layers // 4)
    )  # fmt: skip
    num_hidden_layers: int = setting("Number of blocks of the imitation network", 1, integer(64))
    intermediate_size: int = setting(
        "Inner width of its blocks. `None` means four times that of the states",
        None, integer(2**20), derived=lambda config: 4 * config.target_hidden_size
    )  # fmt: skip
    num_draft_steps: int = setting("K, the greatest depth of the draft tree", 5, integer(64))
    tree_size: int = setting("Number of nodes of the draft tree, the root not counted", 16, integer(MOST_NODES))
    beam_width: int = setting("Nodes of a depth that are expanded to the next; 1 is a chain", 4, integer(MOST_NODES))

    @classmethod
    def for_target(cls, target: Any, **overrides: Any) -> SelfDraftConfig:
        """See [`TravellingConfig.for_target`]."""
        try:
            layers = list(decoder_list(target)[1])
        except ValueError:  # they cannot be found
            layers = []
        weights = sum(weight.numel() for layer in layers for weight in layer.parameters()) // max(len(layers), 1)
        config: SelfDraftConfig = super().for_target(target, **{"target_layer_weights": weights, **overrides})
        return config

    @property
    def hidden_size(self) -> int:
        return self.target_hidden_size

    @property
    def target_tap_layers(self) -> list[int]:
        """The hidden state of the target that training reads."""
        return [self.draft_layers]

    def check(self) -> None:
        check_fields(self)
        layers, count = self.draft_layers, self.target_num_hidden_layers
        # Before the taps, which are derived from it.
        demand(layers < count, "draft_layers", layers, f"it must be below target_num_hidden_layers={count}")
        super().check()


class ImitationBlock(FeedForward):
    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(self.norm(x))


class SelfDrafter(StateNetwork, StateDrafter):
    """Drafting by the target's first layers, an imitation network and the target's head (FastVLM; LayerSkip).

    The layers read each drafted token in the target's cache, so everything in the prompt, images included, is known.
    Verification computes only the other layers.

    Let h_i be the target's hidden state after its first n layers at position i. The network imitates the last hidden
    state from it, position by position: a linear map with a residual, and gated blocks. A norm and the target's output
    rows then predict x_{i+1}. The first layers attend to the whole text, so the network has no attention.

    Letters in the shapes: T positions, S chains, D hidden size.
    """

    config_class = SelfDraftConfig
    config: SelfDraftConfig
    main_input_name = "taps"
    _no_split_modules = ["ImitationBlock"]  # noqa: RUF012
    taps = ()  # its first layers are in the target's forward
    own_options = (LAYER_REUSE,)

    def __init__(self, config: SelfDraftConfig) -> None:
        config.check()  # fields may have been set since it was built
        super().__init__(config)
        self.tap_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.turn = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(ImitationBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_head()
        self.post_init()

    def imitated(self, states: torch.Tensor) -> torch.Tensor:
        """Returns imitations `[..., D]` of the last hidden states, before the norm, from early ones `[..., D]`."""
        normed = self.tap_norm(states)
        x = normed + self.turn(normed)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> DrafterOutput:
        """Predicts along many chains of packed texts, each token after the text's own; see `HSDrafter.forward`.

        A draft begins with the token after position i, which the first layers read. So its first prediction comes
        from the state at position i + 1 of `taps` `[T, D]`, and that of depth d from the state at i + 1 + d. Only the
        first `num_rolled` of `starts` get predictions beyond the first depth. `embeds` and ids are unused.
        """
        last = len(taps) - 1
        starts = torch.tensor([last - 1], device=taps.device) if starts is None else starts
        rolled = len(starts) if num_rolled is None else num_rolled
        places = [starts + 1, *(starts[:rolled] + 1 + depth for depth in range(1, self.config.num_draft_steps))]
        drafts = self.imitated(taps[torch.cat(places).clamp(max=last)]).split([len(each) for each in places])
        loss = None if labels is None else self.loss_function(self, drafts, labels)
        return DrafterOutput(loss=loss, hidden_states=drafts)

    def check(self, target: Any) -> None:
        super().check(target)
        if reason := _why_not_split(target):
            raise DraftingRefused(
                f"its first layers cannot draft: {reason}. To decode it plainly, leave assistant_model out."
            )

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        refuse_sharded("the first layers", all_processes)

    def session(self, call: Call) -> SelfSession:
        weights = self.borrow(call.target.get_input_embeddings(), call.target.get_output_embeddings())
        return SelfSession(self, weights, call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        config = self.config
        head = config.draft_vocab_size * config.hidden_size
        layers = config.draft_layers * config.target_layer_weights
        return (
            Read(f"first {config.draft_layers} layers of the target", layers, depth, width, borrowed=True),
            Read("imitation network", weights_of(self.tap_norm, self.turn, self.layers), depth, width),
            Read("head", head, depth, width, borrowed=self.lm_head is None),
        )


def _why_not_split(target: Any) -> str:
    """Returns why a target's layers cannot be split; empty if they can."""
    if target.config.is_encoder_decoder:
        return f"{type(target).__name__} is an encoder-decoder"
    try:
        return why_not_replaced(target, [decoder_list(target)[0]])
    except ValueError as error:
        return str(error)


@dataclass(frozen=True)
class ImitatedLevels:
    """The `Levels` of a draft that the target's first layers read after the texts; a node's state is its column."""

    drafter: SelfDrafter
    weights: TargetWeights
    first: FirstLayers

    def __call__(
        self, level: int, tokens: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read, columns = self.first.read_nodes(tokens, None if states is None else states[..., 0])
        imitated = self.drafter.imitated(read.to(self.drafter.device, self.drafter.dtype))
        return self.drafter.logits(imitated, self.weights).to(tokens.device), columns[..., None]


class SelfSession(TreeSession):
    """Drafts trees, or chains, depth by depth for all texts of a batch, whose state is in the target's cache alone."""

    def __init__(self, drafter: SelfDrafter, weights: TargetWeights, call: Call) -> None:
        config, runtime = drafter.config, call.runtime
        super().__init__(call.options, weights.vocab_ids.to(device_of(call.target)), call.foresight)
        self._drafter, self._weights = drafter, weights
        self._rows = list(range(call.rows))
        self._first: FirstLayers | None = None
        if runtime is not None and runtime.can_read_ahead:
            self._first = runtime.ahead = FirstLayers(runtime, config.draft_layers, call.options.own["layer_reuse"])
        elif call.options.depth > 0:
            logger.warning_once(
                f"{type(call.target).__name__} is decoded without drafts of its first layers: they need a cache that "
                "grows, and attention that takes masks"
            )
        sizes = config.draft_layers, config.num_hidden_layers, config.intermediate_size, config.draft_vocab_size
        self.kind = *sizes, drafter.dtype, drafter.device

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        """All rows that the target reads are in each forward; rows without an ask add nothing to it."""
        if self._first is None:
            return [DraftTree.root(ask.root) for ask in asks]
        wanted = {ask.row: ask for ask in asks}
        # Predictions for the other rows are ignored.
        every = [wanted.get(row, Ask(row, root=0, depth=depth, size=0)) for row in self._rows]
        with self._first.draft([min(wanted[row].depth, depth) if row in wanted else 0 for row in self._rows]):
            grown = self.grown(every, self.expansion(every, depth, options), options)
        trees = dict(zip(self._rows, grown, strict=True))
        return [trees[ask.row] for ask in asks]

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> LevelExpansion:
        assert self._first is not None
        levels = ImitatedLevels(self._drafter, self._weights, self._first)
        return LevelExpansion(levels, depth, options.temperature, self.race([ask.row for ask in asks], depth))

    def repeatable(self, asks: Sequence[Ask], expansion: Any, options: DraftOptions) -> LevelExpansion:
        apart = replace(expansion.levels, first=expansion.levels.first.apart())  # leaves the target's cache alone
        return replace(expansion, levels=apart)


register_drafter(SelfDraftConfig.model_type, SelfDraftConfig, SelfDrafter)
