"""The FlashMap drafter: loading, saving, and use in `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from ...hub.checkpoint import Checkpoint
from ..base.draft_options import DraftOptions, default_options
from ..base.formats import Format
from ..base.loading_arguments import Placement, take_options
from ..base.protocol import Call, Read, weights_of
from ..base.refiners import REFINER_OPTIONS, check_refiners
from ..base.saved_drafter import PublishedDrafter, SpeculatorsFiles
from ..base.target_info import fit_of
from .configuration import FlashMapConfig, read_config
from .network import FlashMapNetwork
from .options import FLOW_STEPS
from .session import FlashMapSession


class FlashMapDrafter(FlashMapNetwork, PublishedDrafter):
    """Drafts a whole block of tokens from noise, in one jump or a few (FlashMap).

    Reads hidden states of the target, and borrows its embedding and output layer. Drafting options are in
    `generation_config`, as for every drafter. `AutoDrafter` loads published drafters unchanged, and they are saved as
    they were published.
    """

    takes_tree_builders = True
    why_not_refined = ""
    own_options = (*REFINER_OPTIONS, FLOW_STEPS)
    saved_as = ()
    why_not_exported = "it is saved in its authors' format, which no other program is known to read in another form"

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__(config)
        self.name_or_path = ""
        self.generation_config = self.default_generation_config()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> FlashMapDrafter:
        """As `from_pretrained`."""
        placement = Placement.taken_from(kwargs)
        with torch.device("meta"):
            drafter = cls(read_config(checkpoint.config))
        take_options(drafter, checkpoint.folder, kwargs)
        shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        checkpoint.check_shapes(shapes)
        drafter.load_state_dict(dict(checkpoint.tensors(shapes.keys())), assign=True)
        drafter.to(placement.dtype or drafter.dtype).eval()
        drafter.name_or_path, drafter.loaded_from = checkpoint.name, checkpoint.folder
        return placement.place(drafter)

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        """Returns the contents of its files, in the format of its authors."""
        config = replace(self.config, target_model=target_name or self.config.target_model)
        return SpeculatorsFiles(config.document(), self.state_dict())

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return self.config.target_tap_layers

    def default_generation_config(self) -> GenerationConfig:
        steps = self.config.block_size
        return default_options(steps, tree_size=max(24, steps), beam_width=8, own=self.own_options)

    def check_together(self, options: DraftOptions) -> None:
        check_refiners(self, options)
        self.config.times(options.own.get(FLOW_STEPS.name))

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        config, steps = self.config, getattr(self.generation_config, FLOW_STEPS.name, None) or self.config.num_steps
        head = config.vocab_size * config.target_hidden_size
        layers = weights_of(self.layers, self.x_embed, self.head)
        return (
            Read("fusion", weights_of(self.fc), 1, 1),
            Read("layers", layers, steps, config.block_size),
            Read("head", head, steps, config.block_size, borrowed=True),
        )

    def session(self, call: Call) -> FlashMapSession:
        embedding, head = call.target.get_input_embeddings(), call.target.get_output_embeddings()
        return FlashMapSession(self, self.borrow(embedding, head), embedding, call)


def _is_flashmap(config: Any) -> bool:
    return config.get("model_type") == "flashmap"


FORMAT = Format(
    "FlashMap",
    30,
    lambda checkpoint: _is_flashmap(checkpoint.config),
    FlashMapDrafter.from_checkpoint,
    drafter=FlashMapDrafter,
    possible=_is_flashmap,
    fit=lambda checkpoint, *target: fit_of(read_config(checkpoint.config), *target),
)
