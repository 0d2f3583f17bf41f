"""Configuration of a block drafter: taps, block layout and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...core.checks import POSITIVE, choice, demand, integer, is_integer, setting
from ...drafters.base.plain_config import described
from ...drafters.base.travelling_config import any_special_tokens, own_integer
from ...runtime.target_limits import decoder_layers, text_config
from ..published.decoder_layer import LayerSizes
from ..published.network import PublishedConfig, fields_of_target
from ..published.target_sizes import FLAG, number

MARKOV_HEADS = ("vanilla", "gated", "rnn")
_MOST_RANK = 2**16
_MOST_PADDING = 1024


@dataclass(frozen=True)
class Sight:
    """How far slots of a block see in one layer."""

    reach: int | None = None  # greatest distance to a visible context position; None for no limit
    # Count the distance from the anchor for all slots. Otherwise each slot counts from its position, and sees other
    # slots within the same distance only.
    of_anchor: bool = False
    causal: bool = False  # whether a slot sees no later slot


@described
@dataclass(frozen=True, kw_only=True)
class BlockConfig(PublishedConfig):
    """Configuration of a [`BlockDrafter`]. Fields are checked on construction.

    A block has `block_size` slots: the anchor, which is the last accepted token, and masks. In the *anchor-first*
    layout slot k drafts the token after it, so every slot drafts. In the *fill-in* layout slot k drafts the token at
    its place, and the anchor's slot drafts nothing.
    """

    block_size: int = setting("number of slots", limit=integer(256))
    sample_from_anchor: bool = setting("True for the anchor-first layout, False for fill-in", limit=FLAG)
    sights: tuple[Sight, ...] = setting("how far slots see, by layer", ())
    markov_rank: int = setting(
        "rank of the head that tells slots the tokens before them (DSpark); 0 for none",
        0, limit=integer(_MOST_RANK, least=0)
    )  # fmt: skip
    markov_head_type: str = setting("type of that head", "vanilla", choice(*MARKOV_HEADS))
    confidence_head: str = setting(
        '`"none"`, `"hidden"`, or `"markov"` where it reads the token before a slot too',
        "none", choice("none", "hidden", "markov")
    )  # fmt: skip
    conv_kernel_size: int = setting(
        "of the convolutions within a block (DFlash2); 0 for none", 0, limit=integer(256, least=0)
    )
    conv_group_size: int = setting("number of channels of a group of these", 16, limit=integer(2**17))
    selector_rank: int = setting(
        "rank of the choice among candidates (DFlash2); 0 for none", 0, limit=integer(_MOST_RANK, least=0)
    )
    selector_top_k: int = setting("number of candidates", 16, limit=integer(2**12))
    domino_rank: int = setting(
        "rank of the bias by a recurrent network over the path (Domino); 0 for none",
        0, limit=integer(_MOST_RANK, least=0)
    )  # fmt: skip
    gru_size: int = setting("width of that network's state", 1024, limit=integer(2**17))
    free_depths: int = setting("number of depths, from the first on, without that bias", 0, limit=integer(256, least=0))
    xpress_rank: int = setting(
        "rank of the bias by all tokens and slots of the block before (XPress); 0 for none",
        0, limit=integer(_MOST_RANK, least=0)
    )  # fmt: skip
    xpress_mlp_ratio: int = setting("inner width of its feed-forward block, over the rank", 2, limit=integer(64))
    learned_mask: bool = setting("whether masks have a learned embedding instead of a token's", False, FLAG)
    own_embedding: bool = setting("whether the drafter has its own embedding", False, FLAG)
    own_head: bool = setting("whether it has its own output rows, for a whole vocabulary", False, FLAG)
    num_input_tokens: int | None = setting(
        "rows of its tables for tokens that are read, if more than can be drafted", None, integer(2**22), optional=True
    )
    embedding_scale: float | None = setting(
        "factor of the target's embedding rows in a block; `None` for embeddings as the target makes them, but without "
        "a norm that it puts on them",
        1.0, POSITIVE, optional=True
    )  # fmt: skip
    output_multiplier: float = setting("factor of the logits", 1.0, POSITIVE)
    final_logit_softcapping: float = setting("cap of the logits; 0 for none", 0.0, number())

    def __post_init__(self) -> None:
        if not self.sights:
            object.__setattr__(self, "sights", (Sight(),) * self.num_hidden_layers)
        super().__post_init__()
        object.__setattr__(self, "own_head", self.own_head and not self.is_reduced)
        self._check_layout()
        self._check_heads()

    @property
    def num_draft_steps(self) -> int:
        """The greatest depth, by any reading that the files leave open."""
        return self.block_size - (1 if "sample_from_anchor" in self.untold else self.first_slot)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the heads that tell slots the tokens before them; at most one is above 0."""
        return self.markov_rank, self.selector_rank, self.domino_rank, self.xpress_rank

    @property
    def first_slot(self) -> int:
        """The slot that drafts the first token after the anchor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def has_own_head(self) -> bool:
        """Whether the drafter stores output rows: it does for a reduced vocabulary."""
        return self.is_reduced or self.own_head

    @property
    def num_embedded(self) -> int:
        return 2**31 if self.learned_mask else self.num_input_tokens or super().num_embedded

    @property
    def padding(self) -> int:
        return _MOST_PADDING

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Returns this configuration in a form that transformers finds equal to the target's."""
        return any_special_tokens(self, *() if self.vocab_size is not None else ("vocab_size",))

    @classmethod
    def for_target(
        cls,
        target: Any,
        *,
        num_draft_steps: int = 8,
        num_hidden_layers: int = 3,
        markov_rank: int = 256,
        draft_vocab_size: int | None = None,
        target_tap_layers: Sequence[int] | None = None,
        **overrides: Any,
    ) -> BlockConfig:
        """Derives the configuration of a new drafter from a loaded target, in DSpark's layout: anchor-first.

        Args:
            num_draft_steps: slots of a block, each of which drafts a token.
            markov_rank: rank of the token head; 0 for none.
            draft_vocab_size: number of draftable tokens; all by default.
            target_tap_layers: hidden states to read; by default spread evenly over the target.
            overrides: further fields of the configuration and of `LayerSizes`. An invalid one raises a ValueError.
        """
        config = text_config(target)
        layers, size, pad = decoder_layers(config), config.vocab_size, own_integer(config, "pad_token_id")
        sizes: dict[str, Any] = {"rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5, "qk_norm": True}
        sizes |= {name: overrides.pop(name) for name in list(overrides) if name in LayerSizes.__dataclass_fields__}
        fields = fields_of_target(target) | {
            "target_tap_layers": tuple(target_tap_layers or default_tap_layers(layers, num_hidden_layers)),
            "sizes": LayerSizes.like(config, **sizes),
            "num_hidden_layers": num_hidden_layers,
            "block_size": num_draft_steps,
            "sample_from_anchor": True,
            "mask_token_id": size - 1 if pad is None or not 0 <= pad < size else pad,
            "draft_vocab_size": size if draft_vocab_size is None else draft_vocab_size,
            "markov_rank": markov_rank,
            "target_num_hidden_layers": layers,
        }
        if unknown := sorted(overrides.keys() - cls.__dataclass_fields__.keys()):
            raise ValueError(f"a block drafter's configuration has no {', '.join(unknown)}")
        return cls(**{**fields, **overrides})

    def _check_layout(self) -> None:
        least, count, width = 1 + self.first_slot, self.num_hidden_layers, self.sizes.hidden_size
        wanted = f"at least {least} with sample_from_anchor={self.sample_from_anchor}, so that something is drafted"
        _demand(self.block_size >= least, "block_size", self.block_size, wanted)
        _demand(len(self.sights) == count, "sights", self.sights, f"one for each of the {count} layers")
        for sight in self.sights:
            valid = sight.reach is None or (is_integer(sight.reach) and sight.reach >= 1)
            _demand(valid, "sliding window", sight.reach, "a distance of 1 or more")
        _demand(self.mask_token_id is not None, "mask_token_id", None, "a token id")
        wanted = f"target_hidden_size={self.target_hidden_size}: the target's embeddings or output rows are used"
        own = self.own_embedding and self.has_own_head
        _demand(own or width == self.target_hidden_size, "hidden_size", width, wanted)

    def _check_heads(self) -> None:
        heads, size = self.ranks, self.vocab_size
        valid = self.confidence_head != "markov" or self.markov_rank > 0
        _demand(valid, "confidence_head", self.confidence_head, "'hidden' or 'none' with markov_rank=0")
        valid = sum(map(bool, heads)) <= 1
        _demand(valid, "markov_rank, selector_rank, domino_rank and xpress_rank", heads, "at most one above 0")
        _demand(size is not None or not any(heads), "vocab_size", size, "a number, as a head has rows for its tokens")
        if self.conv_kernel_size:
            width, group = self.sizes.hidden_size, self.conv_group_size
            _demand(width % group == 0, "conv_group_size", group, f"a divisor of hidden_size={width}")
            wanted = f"at most block_size={self.block_size}"
            _demand(self.conv_kernel_size <= self.block_size, "conv_kernel_size", self.conv_kernel_size, wanted)
        if self.selector_rank:
            wanted = f"vocab_size={self.vocab_size}, as candidates are chosen among all tokens"
            _demand(not self.is_reduced, "draft_vocab_size", self.draft_vocab_size, wanted)
            wanted = f"at most draft_vocab_size={self.draft_vocab_size}"
            _demand(self.selector_top_k <= (self.draft_vocab_size or 0), "selector_top_k", self.selector_top_k, wanted)


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Returns `count` hidden states spread evenly, as DFlash and DSpark do."""
    if count == 1:
        return (num_target_layers // 2 + 1,)
    return tuple(round(1 + index * (num_target_layers - 4) / (count - 1)) + 1 for index in range(count))


def default_tap_layers(num_target_layers: int, count: int) -> list[int]:
    """Returns `spread_layers`, or fewer for small targets."""
    spread = spread_layers(num_target_layers, count)
    return sorted({min(max(tap, 1), max(num_target_layers - 1, 1)) for tap in spread}) if count > 1 else [*spread]


def _demand(valid: bool, name: str, value: Any, wanted: str) -> None:
    demand(valid, name, value, f"expected {wanted}")
