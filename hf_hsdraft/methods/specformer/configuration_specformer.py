"""Configuration of a SpecFormer drafter."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.checks import integer, setting
from ...drafters.base.decoder_layer import LayerSizes
from ...drafters.base.plain_config import FLAG
from ...drafters.base.travelling_config import AttendingConfig, as_list


def default_tap_layers(num_hidden_layers: int) -> list[int]:
    """The embeddings, a middle layer, and the last two, as indices into `hidden_states` (SpecFormer)."""
    return sorted({0, num_hidden_layers // 2, num_hidden_layers - 1, num_hidden_layers})


class SpecFormerConfig(AttendingConfig):
    """Configuration of a [`SpecFormerDrafter`]. [`SpecFormerConfig.for_target`] derives it from a loaded target.

    A ValueError if a field is out of range or contradicts another; the message names field, value and remedy.
    """

    model_type = "specformer"

    target_tap_layers: Sequence[int] = setting(
        "Hidden states of the target that the drafter reads, ascending (0 = embeddings, i = output of layer i, the "
        "last one after the final norm). `None` picks the embeddings, a middle layer, and the last two (SpecFormer)",
        None, convert=as_list, derived=lambda config: default_tap_layers(config.target_num_hidden_layers)
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
        return LayerSizes(
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.rms_norm_eps,
        )


__all__ = ["SpecFormerConfig"]
