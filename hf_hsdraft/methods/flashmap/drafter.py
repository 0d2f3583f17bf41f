"""The FlashMap drafter: loading, saving, and use in `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.protocol import Call, Read, weights_of
from ...drafters.base.published import SpeculatorsFiles
from ...drafters.base.published_format import PublishedFormat
from ...drafters.base.refiners import REFINER_OPTIONS
from .configuration import ROWS, FlashMapConfig
from .network import FlashMapNetwork
from .options import FLOW_STEPS
from .session import FlashMapSession


class FlashMapDrafter(FlashMapNetwork):
    """Drafts a whole block of tokens from noise, in one jump or a few (FlashMap).

    Reads hidden states of the target, and borrows its embedding and output layer. Drafting options are in
    `generation_config`, as for every drafter. `AutoDrafter` loads published drafters unchanged, and they are saved as
    they were published.
    """

    config_class = FlashMapConfig
    why_not_refined = ""
    own_options = (*REFINER_OPTIONS, FLOW_STEPS)
    saved_as = ()
    why_not_exported = "it is saved in its authors' format, which no other program is known to read in another form"

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        """Returns the contents of its files, in the format of its authors."""
        config = replace(self.config, target_model=target_name or self.config.target_model)
        return SpeculatorsFiles(config.document(), self.state_dict())

    def check_together(self, options: DraftOptions) -> None:
        super().check_together(options)
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


PublishedFormat(
    "FlashMap", 30, lambda checkpoint: checkpoint.config.get("model_type") == "flashmap", FlashMapDrafter, ROWS
).register()
