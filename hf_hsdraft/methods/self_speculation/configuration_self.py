"""Configuration of a self-speculative drafter: number of the target's layers, size of the imitation network."""

from __future__ import annotations

from typing import Any

from ...core.checks import MOST_NODES, check_fields, demand, integer, setting
from ...drafters.base.travelling_config import TravellingConfig
from .layer_split import weights_of_a_layer


class SelfDraftConfig(TravellingConfig):
    """Configuration of a [`SelfDrafter`]. [`SelfDraftConfig.for_target`] derives it from a loaded target.

    A ValueError if a field is out of range or contradicts another; the message names field, value and remedy.
    """

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
    beam_width: int = setting(
        "Number of nodes of one depth that are expanded to the next. 1 drafts a chain", 4, integer(MOST_NODES)
    )

    @classmethod
    def for_target(cls, target: Any, **overrides: Any) -> SelfDraftConfig:
        """See [`TravellingConfig.for_target`]."""
        config: SelfDraftConfig = super().for_target(
            target, **{"target_layer_weights": weights_of_a_layer(target), **overrides}
        )
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


__all__ = ["SelfDraftConfig"]
