"""The EAGLE-3 drafter: loading, saving, and use in `generate()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...core.checks import few
from ...hub.checkpoint import Checkpoint
from ..base.draft_options import default_options
from ..base.loading_arguments import Placement, take_options
from ..base.protocol import Call, Read, weights_of
from ..base.published import speculators_document
from ..base.saved_drafter import PublishedDrafter, SpeculatorsFiles
from ..base.target_weights import TargetWeights, borrow
from .configuration import EagleConfig
from .formats import read
from .network import EagleNetwork
from .session import EagleSession

_CLASSES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}


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
            self.reset_parameters()
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
        tensors = {**dict(self.named_parameters()), **_vocabulary_maps(config)}
        return SpeculatorsFiles(_document(config, self.dtype), tensors)

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        """The hidden states that it reads; raises a ValueError if only `taps_of` a target can tell."""
        if self.config.target_tap_layers is None:
            raise ValueError("which hidden states this drafter reads depends on its target: ask drafter.taps_of(model)")
        return tuple(self.config.target_tap_layers)

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.config.num_draft_steps, tree_size=24, beam_width=8)

    def borrow(self, embedding: nn.Embedding, output_head: nn.Module | None = None) -> TargetWeights:
        """Borrows the target's embedding, unscaled as in training, unless the drafter has one."""
        ids = self.draft_vocab_ids()
        if self.embed_tokens is None:
            return borrow(embedding, None, ids, self.device, self.dtype, scaled=False)
        table = self.embed_tokens
        return TargetWeights(lambda tokens: table(tokens.to(self.device)), None, ids.to(self.device))

    def session(self, call: Call) -> EagleSession:
        return EagleSession(self, self.borrow(call.target.get_input_embeddings()), call)

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


def _vocabulary_maps(config: EagleConfig) -> dict[str, torch.Tensor]:
    """Returns `d2t` `[V']`, int64, from row to token, and `t2d` `[V]`, bool; nothing for a whole vocabulary."""
    if config.draft_vocab_size == config.vocab_size:
        return {}
    size = config.draft_vocab_size
    ids = torch.arange(size) if config.draft_vocab_ids is None else torch.tensor(config.draft_vocab_ids)
    rows = torch.zeros(config.vocab_size, dtype=torch.bool)
    rows[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": rows}


def _document(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns a drafter's config.json in the speculators format, which vLLM reads too."""
    kind = "eagle3" if config.mask_token_id is None else "peagle"
    open_fields: dict[str, Any] = {} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}
    if not config.norm_output_told:  # the next load continues the trial
        open_fields["norm_output_told"] = False
    taps = config.target_tap_layers
    switches = ("num_draft_steps", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return speculators_document(
        config,
        kind,
        _CLASSES[kind],
        dtype,
        "qwen3" if config.layer.qk_norm else "llama",
        config.layer,
        config.windows if any(config.windows) else (),
        eagle_aux_hidden_state_layer_ids=None if taps is None else list(taps),
        embed_requires_grad=config.own_embedding,
        tie_word_embeddings=False,
        **{name: getattr(config, name) for name in switches},
        **open_fields,
    )
