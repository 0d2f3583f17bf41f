"""The EAGLE-3 drafter: loading, saving, and use in `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...core.checks import few, printable
from ...core.refusals import DraftingRefused
from ...hub.checkpoint import Checkpoint
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_outputs import before_norm, check_last_state
from ..base.draft_options import default_options
from ..base.loading_arguments import Placement, take_options
from ..base.protocol import Call, Read, weights_of
from ..base.saved_drafter import PublishedDrafter, SpeculatorsFiles
from ..base.target_weights import TargetWeights, borrow
from .configuration_eagle import EagleConfig
from .eagle_formats import read
from .eagle_network import EagleNetwork, initialise
from .eagle_saving import fields_of, vocabulary_maps
from .eagle_session import EagleSession


class EagleDrafter(EagleNetwork, PublishedDrafter):
    """An EAGLE-3 drafter, or a parallel one (P-EAGLE), in any published format.

    Holds weights, configuration and, in `generation_config`, the drafting options common to all drafters, but no state
    of a call, so several threads may share it. The constructor makes an untrained drafter; an unknown rope type raises
    a ValueError.

        drafter = AutoDrafter.from_pretrained("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
        out = model.generate(**inputs, assistant_model=drafter)
    """

    takes_tree_builders = True

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        if self.device.type != "meta":
            initialise(self)
        self.generation_config = self.default_generation_config()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, mask_token_id: int | None = None, **options: Any) -> Any:
        """As `from_pretrained`; `mask_token_id` is for a parallel drafter whose files lack it."""
        placement, reading = Placement.taken_from(options), read(checkpoint, mask_token_id)
        with torch.device("meta"):
            drafter = cls(reading.config)
        take_options(drafter, checkpoint.folder, options)
        reading.check(drafter)
        drafter.config = reading.complete_config()
        drafter.load_state_dict(reading.state(drafter, placement.dtype), assign=True)
        drafter.loaded_from = checkpoint.folder
        return placement.place(drafter.eval())

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        config = replace(self.config, target_name=target_name or self.config.target_name)
        tensors = {**dict(self.named_parameters()), **vocabulary_maps(config)}
        return SpeculatorsFiles(fields_of(config, self.dtype), tensors)

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        """The hidden states that it reads; raises a ValueError if only `taps_of` a target can tell."""
        if self.config.target_tap_layers is None:
            raise ValueError("which hidden states this drafter reads depends on its target: ask drafter.taps_of(model)")
        return tuple(self.config.target_tap_layers)

    def taps_of(self, target: Any) -> Sequence[int]:
        layers = decoder_layers(text_config(target))
        return before_norm(self.config.taps_of(layers), layers)

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return self.config.num_draft_steps

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.config.num_draft_steps, tree_size=24, beam_width=8)

    def check(self, target: Any) -> None:
        config, wanted = text_config(target), self.config
        made_for = f"this drafter was trained for {printable(wanted.target_name) or 'another target'}"
        for name, found, expected in (
            ("vocab_size", config.vocab_size, wanted.vocab_size),
            ("hidden_size", config.hidden_size, wanted.target_hidden_size),
        ):
            if found != expected:
                raise DraftingRefused(
                    f"the target has {name}={found}, the drafter expects {expected}: {made_for}. Use a drafter of this "
                    "target."
                )
        layers = decoder_layers(config)
        taps = wanted.taps_of(layers)
        if taps[0] < 0 or taps[-1] > layers or any(low >= high for low, high in pairwise(taps)):
            raise DraftingRefused(
                f"the target has num_hidden_layers={layers}, the drafter reads its hidden states {list(taps)}: "
                f"{made_for}. Use a drafter of this target."
            )
        if taps[-1] == layers:
            check_last_state(target)

    def borrow(self, embedding: nn.Embedding, output_head: nn.Module | None = None) -> TargetWeights:
        """Borrows the target's embedding, unless the drafter has one.

        Rows are used unscaled: these drafters are trained on a copy of the table, even if the target scales it.
        """
        ids = self.draft_vocab_ids()
        if self.embed_tokens is None:
            return borrow(embedding, None, ids, self.device, self.dtype, scaled=False)
        table = self.embed_tokens
        return TargetWeights(lambda tokens: table(tokens.to(self.device)), None, ids.to(self.device))

    def session(self, call: Call) -> EagleSession:
        weights = self.borrow(call.target.get_input_embeddings())
        return EagleSession(self, weights, call.options, call.rows, call.foresight)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        layers, head = weights_of(self.layers), weights_of(self.lm_head)
        fusion = Read("fusion", weights_of(self.fc), 1, 1)
        if self.mask_hidden is not None:  # P-EAGLE
            return fusion, Read("layers", layers, 2, depth), Read("head", head, 1, depth)
        return fusion, Read("layers", layers, depth, width), Read("head", head, depth, width)

    @torch.no_grad()
    def limit_vocabulary(self, ids: Sequence[int]) -> None:
        """Limits the head to the distinct token ids `ids`, for faster drafts of these tokens only.

        Raises a ValueError if the drafter cannot propose some of them.
        """
        places = {token: place for place, token in enumerate(self.draft_vocab_ids().tolist())}
        wanted = [int(token) for token in ids]
        if missing := [str(token) for token in wanted if token not in places]:
            raise ValueError(f"ids holds {few(missing)}: expected tokens of the drafter's vocabulary")
        config = replace(self.config, draft_vocab_size=len(wanted), draft_vocab_ids=tuple(wanted))
        rows = torch.tensor([places[token] for token in wanted], device=self.device)
        head = self.lm_head.weight
        self.lm_head = nn.Linear(head.shape[1], len(wanted), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(head[rows], requires_grad=head.requires_grad)
        self.config = config


__all__ = ["EagleDrafter"]
