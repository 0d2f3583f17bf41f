"""What configurations of published drafters share: the target that they were made for, and sizes of their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.checks import are_ascending, check_fields, demand, integer, public_name, setting
from ...runtime.target_limits import text_config
from .decoder_layer import LayerSizes
from .plain_config import FLAG, PlainConfig

MOST_LAYERS, MOST_TAPS, _MOST_OF_TARGET = 64, 64, 4096


@dataclass(frozen=True, kw_only=True)
class PublishedConfig(PlainConfig):
    """Configuration of a drafter of a published architecture. Fields are checked on construction.

    A ValueError names a field that is out of range or contradicts another.
    """

    vocab_size: int | None = setting(
        "of the target; `None` where the drafter takes that of any target", limit=integer(2**22), optional=True
    )
    target_hidden_size: int = setting("width of the target's hidden states", limit=integer(2**17))
    target_tap_layers: Sequence[int] | None = setting(
        "hidden states of the target that are read, ascending, in the order of the columns of `fc`. 0 are the "
        "embeddings, k the output of layer k. `None` means 2, L // 2 and L - 3 of the target's L layers, (-1,) is L",
        None,
    )
    sizes: LayerSizes = setting("of the layers")
    num_hidden_layers: int = setting("number of layers", 1, limit=integer(MOST_LAYERS))
    rope: Mapping[str, Any] = setting(
        "how positions are rotated: `rope_parameters`, or `rope_theta` and `rope_scaling`, and "
        "`max_position_embeddings`, see `rotary_of`",
        default_factory=dict, hash=False
    )  # fmt: skip
    draft_vocab_size: int | None = setting(
        "V', the number of tokens that can be drafted; `None` for those of any target",
        None, limit=integer(2**22), optional=True
    )  # fmt: skip
    mask_token_id: int | None = setting(
        "the token whose embedding stands for tokens that are not drafted yet", None, integer(2**31, 0), optional=True
    )
    rotates_whole_heads: bool = setting("whether a `partial_rotary_factor` in `rope` is ignored", False, FLAG)
    untold: Sequence[str] = setting(
        "fields of this configuration that the files leave open; a trial on the target decides, see `readings`", ()
    )
    last_tap_is_normed: bool = setting(
        "whether the target's last hidden state is read after its final norm, as transformers gives it", False, FLAG
    )
    target_num_hidden_layers: int | None = setting(
        "of the target, where it is known", None, integer(_MOST_OF_TARGET), optional=True
    )
    target_name: str = setting("name of the target, where it is known", "")
    target_architectures: Sequence[str] = setting("class names of the target, where they are known", ())

    def __post_init__(self) -> None:
        check_fields(self)
        taps, most = self.target_tap_layers, self.target_num_hidden_layers or _MOST_OF_TARGET
        valid = taps in (None, (-1,)) or (0 < len(taps) <= MOST_TAPS and are_ascending(taps, 0, most))
        wanted = f"expected ascending indices of hidden states from 0 (embeddings) to {most}, each once"
        demand(valid, "target_tap_layers", taps if taps is None else list(taps), wanted)
        size, drafted, mask = self.vocab_size, self.draft_vocab_size, self.mask_token_id
        valid = drafted is None if size is None else drafted is not None and drafted <= size
        demand(valid, "draft_vocab_size", drafted, f"the target has only vocab_size={size} tokens")
        valid = mask is None or size is None or mask < self.num_embedded
        demand(valid, "mask_token_id", mask, f"expected a token id below vocab_size={size}")

    @property
    def is_reduced(self) -> bool:
        """Whether only a part of the target's vocabulary can be drafted."""
        return self.draft_vocab_size is not None and self.draft_vocab_size != self.vocab_size

    @property
    def rotation(self) -> dict[str, Any]:
        """The fields of `rotary_of`."""

        def kept(fields: Mapping[str, Any]) -> dict[str, Any]:
            left = {name: kept(each) if isinstance(each, Mapping) else each for name, each in fields.items()}
            return {name: each for name, each in left.items() if name != "partial_rotary_factor"}

        return kept(self.rope) if self.rotates_whole_heads else dict(self.rope)

    @property
    def padding(self) -> int:
        """The greatest number of rows for tokens beyond the target's vocabulary, by which tables are padded."""
        return 0

    @property
    def num_embedded(self) -> int:
        """The number of tokens that have an embedding, where the vocabulary is known."""
        return self.vocab_size or 0

    @property
    def num_taps(self) -> int:
        return 3 if self.target_tap_layers is None else len(self.target_tap_layers)

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        """Returns the hidden states that it reads of a target with so many layers."""
        if self.target_tap_layers is not None:
            return tuple(num_hidden_layers if tap == -1 else tap for tap in self.target_tap_layers)
        return 2, num_hidden_layers // 2, num_hidden_layers - 3


def fields_of_target(target: Any) -> dict[str, Any]:
    """Returns the fields of a fresh drafter that a loaded target decides, with plain rope of its base."""
    config = text_config(target)
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "rope": {
            "rope_parameters": {"rope_theta": rope.get("rope_theta") or 10000.0, "rope_type": "default"},
            "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
        },
        "target_name": public_name(getattr(target, "name_or_path", "")),
        "target_architectures": (type(target).__name__,),
    }
