"""A drafter made of the target's own layers for multi-token prediction."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.modeling_layers import MtpModel

from ...core.refusals import DraftingRefused
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import INDEX, read_json
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_parts import decoding_model
from ..base.draft_options import default_options
from ..base.finding import Found, register_finder
from ..base.plain_config import PlainConfig
from ..base.protocol import Call, Drafter, Read, weights_of
from ..base.target_info import TargetInfo, empty_model
from .layers import MtpLayers
from .session import MtpSession
from .types import described_target, layers_in, renamed

LEAST_STEPS = 5  # greatest depth of a draft where there are fewer layers: they are used again


@dataclass(frozen=True)
class MtpConfig(PlainConfig):
    """What the layers are for."""

    model_type: ClassVar[str] = "mtp"

    vocab_size: int
    num_mtp_layers: int
    target_name: str = ""


class MtpDrafter(Drafter):
    """Drafts with the layers for multi-token prediction that a target's checkpoint holds (DeepSeek-V3, section 2.2).

        drafter = MtpDrafter.for_target(model)
        out = model.generate(**inputs, assistant_model=drafter)  # or assistant_model="mtp"

    It drafts trees for batches, greedy and sampled texts. The layers of depths 1, 2, ... are used in turn, so a single
    layer drafts deeper too. They are read once for each target, and belong to it: there is nothing to save.
    """

    takes_tree_builders = True
    why_not_exported = "its layers are in the target's checkpoint, where other programs find them"

    def __init__(self, target: Any, layers: MtpLayers) -> None:
        self._target, self.layers = weakref.ref(target), layers
        name = str(getattr(target.config, "name_or_path", "") or "")
        self.config = MtpConfig(text_config(target).vocab_size, layers.count, name)
        self.num_draft_steps = max(layers.count, LEAST_STEPS)
        self.taps = (decoder_layers(text_config(target)),)  # after the final norm
        self.generation_config = self.default_generation_config()

    @classmethod
    def for_target(
        cls, target: Any, cache_dir: str | os.PathLike[str] | None = None, revision: str | None = None
    ) -> MtpDrafter:
        """Returns the drafter of a loaded target, also inside a PEFT model or `torch.compile`.

        A target of the Hub must have been loaded with the same `cache_dir` (by default `HF_HUB_CACHE`) and `revision`.
        Raises a DraftingRefused if the checkpoint holds no such layers, or layers that cannot draft here.
        """
        target = decoding_model(target)
        return cls(target, MtpLayers.of(target, cache_dir=cache_dir, revision=revision))

    @property
    def device(self) -> Any:
        return self.layers.device

    @property
    def dtype(self) -> Any:
        return self.layers.dtype

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.num_draft_steps, tree_size=16, beam_width=4)

    def check(self, target: Any) -> None:
        if decoding_model(target) is not self._target():
            raise DraftingRefused(
                "this drafter is made of another model's layers: make one with MtpDrafter.for_target(model)"
            )

    def session(self, call: Call) -> MtpSession:
        self.layers.follow(call.target)
        return MtpSession(self, self.layers, call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        weights, model = weights_of(*self.layers.model.layers), self.layers.model
        own, each, head = self.layers.heads, weights // self.layers.count, weights_of(model.shared_head)
        return Read("layers", each, depth, width), Read("head", head, depth, width, borrowed=own is None)


def _found(target: TargetInfo, local_files_only: bool) -> Iterator[Found]:
    """The target's layers for multi-token prediction, if they can draft."""
    count = layers_in(target.config)
    if count and target.place and _can_be_read(target, count, local_files_only):
        yield Found(
            "the target's own layers",
            "MtpDrafter",
            f"{count} layer{'s' * (count > 1)} for multi-token prediction in the checkpoint",
            None,
            'model.generate(**inputs, assistant_model="mtp")',
            made=MtpDrafter.for_target,
        )


def _can_be_read(target: TargetInfo, count: int, local_files_only: bool) -> bool:
    """Whether these layers can be built, and the checkpoint names tensors for them."""
    model = target.model if target.model is not None else empty_model(target.config)
    if model is None:
        return False
    try:
        with torch.device("meta"):
            MtpLayers(MtpModel(described_target(model, count), count))
        checkpoint = Checkpoint.open(target.place, local_files_only=local_files_only)
        return bool(renamed(_tensor_names(checkpoint), target.config))
    except Exception:  # any error of building them means that it cannot
        return False


def _tensor_names(checkpoint: Checkpoint) -> Collection[str]:
    if (checkpoint.folder / INDEX).is_file():
        return read_json(checkpoint.folder / INDEX).get("weight_map", {}).keys()
    return checkpoint.shapes if checkpoint.is_described else ()


register_finder("mtp", _found)
