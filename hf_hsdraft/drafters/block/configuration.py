"""Configuration of a block drafter: taps, block layout and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.checks import (
    POSITIVE,
    are_ascending,
    check_fields,
    choice,
    demand,
    integer,
    is_integer,
    public_name,
    setting,
)
from ...runtime.target_limits import decoder_layers, text_config
from ..base.decoder_layer import LayerSizes
from ..base.layer_fields import MOST_LAYERS
from ..base.plain_config import PlainConfig, described, most_of, number
from ..base.published import fresh_rope
from ..base.travelling_config import any_special_tokens, own_integer

MARKOV_HEADS = ("vanilla", "gated", "rnn")

MOST_TAPS, MOST_RANK = 64, 2**16


@dataclass(frozen=True)
class Sight:
    """How far slots of a block see in one layer."""

    reach: int | None = None  # greatest distance to a visible context position; None for no limit
    # Count the distance from the anchor for all slots. Otherwise each slot counts from its position, and sees other
    # slots within the same distance only.
    of_anchor: bool = False
    causal: bool = False  # whether a slot sees no later slot


@described
@dataclass(frozen=True)
class BlockConfig(PlainConfig):
    """Configuration of a [`BlockDrafter`]. Fields are checked on construction.

    A block has `block_size` slots: the anchor, which is the last accepted token, and masks. In the *anchor-first*
    layout slot k drafts the token after it, so every slot drafts. In the *fill-in* layout slot k drafts the token at
    its place, and the anchor's slot drafts nothing.
    """

    vocab_size: int | None = setting(
        "of the target; `None` where the drafter takes that of any target", limit=integer(2**22), optional=True
    )
    target_hidden_size: int = setting("width of the target's hidden states and embeddings", limit=integer(2**17))
    target_tap_layers: tuple[int, ...] = setting(
        "hidden states of the target that are read, ascending. 0 are the embeddings, k the output of layer k. The "
        "order is that of the columns of `fc`"
    )
    sizes: LayerSizes = setting("of the layers")
    num_hidden_layers: int = setting("number of layers", limit=integer(MOST_LAYERS))
    block_size: int = setting("number of slots", limit=integer(256))
    sample_from_anchor: bool = setting("True for the anchor-first layout, False for fill-in")
    mask_token_id: int = setting("the token whose embedding stands for a mask")
    draft_vocab_size: int | None = setting(
        "number of tokens that can be drafted; `None` for those of any target", limit=integer(2**22), optional=True
    )
    rope: Mapping[str, Any] = setting(
        "`rope_parameters` and `max_position_embeddings`, see `rotary_of`", default_factory=dict
    )
    sights: tuple[Sight, ...] = setting("how far slots see, by layer", ())
    markov_rank: int = setting(
        "rank of the head that tells slots the tokens before them (DSpark); 0 for none",
        0, limit=integer(MOST_RANK, least=0)
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
        "rank of the choice among candidates (DFlash2); 0 for none", 0, limit=integer(MOST_RANK, least=0)
    )
    selector_top_k: int = setting("number of candidates", 16, limit=integer(2**12))
    domino_rank: int = setting(
        "rank of the bias by a recurrent network over the path (Domino); 0 for none",
        0, limit=integer(MOST_RANK, least=0)
    )  # fmt: skip
    gru_size: int = setting("width of that network's state", 1024, limit=integer(2**17))
    free_depths: int = setting("number of depths, from the first on, without that bias", 0, limit=integer(256, least=0))
    learned_mask: bool = setting("whether a mask has an embedding of its own instead of a token's", False)
    embedding_scale: float | None = setting(
        "factor of the target's embedding rows in a block; `None` for embeddings as the target makes them, but without "
        "a norm that it puts on them",
        1.0, POSITIVE, optional=True
    )  # fmt: skip
    output_multiplier: float = setting("factor of the logits", 1.0, POSITIVE)
    final_logit_softcapping: float = setting("cap of the logits; 0 for none", 0.0, number())
    last_tap_is_normed: bool = setting(
        "whether the target's last hidden state is read after its final norm, as transformers gives it", True
    )
    target_num_hidden_layers: int | None = setting("of the target, where it is known", None)
    target_name: str = setting("of the target, where it is known", "")
    target_architectures: tuple[str, ...] = setting("class names of the target, where they are known", ())

    def __post_init__(self) -> None:
        if not self.sights:
            object.__setattr__(self, "sights", (Sight(),) * self.num_hidden_layers)
        check_fields(self)
        self._check_layout()
        self._check_target()
        self._check_heads()

    @property
    def num_draft_steps(self) -> int:
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot that drafts the first token after the anchor."""
        return 0 if self.sample_from_anchor else 1

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        return self.target_tap_layers

    @property
    def has_own_head(self) -> bool:
        """Whether the drafter stores output rows: it does for a reduced vocabulary."""
        return self.draft_vocab_size is not None and self.draft_vocab_size != self.vocab_size

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
        fields: dict[str, Any] = {
            "vocab_size": size,
            "target_hidden_size": config.hidden_size,
            "target_tap_layers": tuple(target_tap_layers or default_tap_layers(layers, num_hidden_layers)),
            "sizes": LayerSizes.like(config, **sizes),
            "num_hidden_layers": num_hidden_layers,
            "block_size": num_draft_steps,
            "sample_from_anchor": True,
            "mask_token_id": size - 1 if pad is None or not 0 <= pad < size else pad,
            "draft_vocab_size": size if draft_vocab_size is None else draft_vocab_size,
            "rope": fresh_rope(config),
            "markov_rank": markov_rank,
            "last_tap_is_normed": False,  # other engines take it without the norm
            "target_num_hidden_layers": layers,
            "target_name": public_name(getattr(target, "name_or_path", "")),
            "target_architectures": tuple(getattr(target.config, "architectures", None) or ()),
        }
        if unknown := sorted(overrides.keys() - cls.__dataclass_fields__.keys()):
            raise ValueError(f"a block drafter's configuration has no {', '.join(unknown)}")
        return cls(**{**fields, **overrides})

    def _check_layout(self) -> None:
        least = 1 + self.first_slot
        wanted = f"at least {least} with sample_from_anchor={self.sample_from_anchor}, so that something is drafted"
        _demand(self.block_size >= least, "block_size", self.block_size, wanted)
        count = self.num_hidden_layers
        _demand(len(self.sights) == count, "sights", self.sights, f"one for each of the {count} layers")
        for sight in self.sights:
            valid = sight.reach is None or (is_integer(sight.reach) and sight.reach >= 1)
            _demand(valid, "sliding window", sight.reach, "a distance of 1 or more")

    def _check_target(self) -> None:
        taps, layers = self.target_tap_layers, self.target_num_hidden_layers
        most = 4096 if layers is None else layers
        valid = 1 <= len(taps) <= MOST_TAPS and are_ascending(taps, 0, most)
        wanted = f"ascending indices of hidden states from 0 (embeddings) to {most}, each once"
        _demand(valid, "target_tap_layers", list(taps), wanted)
        size, mask, drafted = self.vocab_size, self.mask_token_id, self.draft_vocab_size
        valid = is_integer(mask) and 0 <= mask < (most_of(BlockConfig, "vocab_size") if size is None else size)
        _demand(valid, "mask_token_id", mask, f"a token id below vocab_size={size}")
        valid = drafted is None if size is None else drafted is not None and drafted <= size
        _demand(valid, "draft_vocab_size", drafted, f"at most vocab_size={size}")
        width = self.sizes.hidden_size
        wanted = f"target_hidden_size={self.target_hidden_size}: the target's embeddings and output rows are used"
        _demand(width == self.target_hidden_size, "hidden_size", width, wanted)

    def _check_heads(self) -> None:
        valid = self.confidence_head != "markov" or self.markov_rank > 0
        _demand(valid, "confidence_head", self.confidence_head, "'hidden' or 'none' with markov_rank=0")
        heads = [self.markov_rank, self.selector_rank, self.domino_rank]
        valid = sum(map(bool, heads)) <= 1
        _demand(valid, "markov_rank, selector_rank and domino_rank", heads, "at most one above 0")
        valid = self.vocab_size is not None or not any(heads)
        _demand(valid, "vocab_size", self.vocab_size, "a number, as a head has rows for its tokens")
        if self.conv_kernel_size:
            width, group = self.sizes.hidden_size, self.conv_group_size
            _demand(width % group == 0, "conv_group_size", group, f"a divisor of hidden_size={width}")
            wanted = f"at most block_size={self.block_size}"
            _demand(self.conv_kernel_size <= self.block_size, "conv_kernel_size", self.conv_kernel_size, wanted)
        if self.selector_rank:
            wanted = f"vocab_size={self.vocab_size}, as candidates are chosen among all tokens"
            _demand(not self.has_own_head, "draft_vocab_size", self.draft_vocab_size, wanted)
            wanted = f"at most draft_vocab_size={self.draft_vocab_size}"
            _demand(self.selector_top_k <= (self.draft_vocab_size or 0), "selector_top_k", self.selector_top_k, wanted)


def default_tap_layers(num_target_layers: int, count: int) -> list[int]:
    """Returns `count` hidden states spread evenly, as DFlash and DSpark do; fewer for small targets."""
    if count == 1:
        return [num_target_layers // 2 + 1]
    spread = [round(1 + index * (num_target_layers - 4) / (count - 1)) + 1 for index in range(count)]
    return sorted({min(max(tap, 1), max(num_target_layers - 1, 1)) for tap in spread})


def _demand(valid: bool, name: str, value: Any, wanted: str) -> None:
    demand(valid, name, value, f"expected {wanted}")
