"""Layers for multi-token prediction that are published without their target, as lmsys/DeepSeek-V3-NextN."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from transformers import GenerationConfig

from ...core.checks import is_integer
from ...core.refusals import DraftingRefused
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import CONFIG, DamagedFile
from ..base.draft_options import default_options
from ..base.plain_config import TargetSizes
from ..base.protocol import Call, Drafter, Read
from ..base.registry import Format, register_format
from ..base.saved_drafter import Placement, take_options
from ..base.target_info import Fit, TargetInfo, fit_of, misfit
from .drafter import LEAST_STEPS, MtpDrafter
from .layers import MtpLayers
from .session import MtpSession

_MARK = "model.layers.0.eh_proj.weight"


def _sizes(checkpoint: Checkpoint) -> TargetSizes:
    """The sizes of the target; raises a DamagedFile if config.json does not tell them."""
    vocab_size, hidden_size = (checkpoint.config.get(name) for name in ("vocab_size", "hidden_size"))
    if not (is_integer(vocab_size) and is_integer(hidden_size)):
        place = checkpoint.folder / CONFIG
        raise DamagedFile(f"{place} is damaged: expected numbers vocab_size and hidden_size", place)
    return TargetSizes(vocab_size, hidden_size)  # type: ignore[arg-type]


class NextnDrafter(Drafter):
    """Drafts with layers for multi-token prediction that are published without their target; see `MtpDrafter`.

        drafter = AutoDrafter.from_pretrained("lmsys/DeepSeek-V3-NextN")
        out = model.generate(**inputs, assistant_model=drafter)

    The layers are of the target's class, so their weights are read for the first call, once for each target.
    """

    takes_tree_builders = True
    why_not_exported = "its layers are in a checkpoint that other programs read as it is"
    num_draft_steps = LEAST_STEPS

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.config = checkpoint, _sizes(checkpoint)
        self.name_or_path = checkpoint.name
        self.generation_config = self.default_generation_config()
        self._drafters: weakref.WeakKeyDictionary[Any, MtpDrafter] = weakref.WeakKeyDictionary()

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> NextnDrafter:
        """Loads a drafter, as `AutoDrafter.from_pretrained`. Weights have the dtype and device of the target."""
        Placement.taken_from(kwargs)
        drafter = cls(checkpoint)
        take_options(drafter, checkpoint.folder, kwargs)
        return drafter

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.num_draft_steps, tree_size=16, beam_width=4)

    def check(self, target: Any) -> None:
        if wrong := misfit(self.config, target):
            raise DraftingRefused(f"{wrong}: these layers were made for another target. Use those of this target.")
        self._of(target)

    def taps_of(self, target: Any) -> Sequence[int]:
        return self._of(target).taps

    def session(self, call: Call) -> MtpSession:
        return self._of(call.target).session(call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        shapes = self._checkpoint.shapes
        layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and ".head." not in name)
        head = self.config.vocab_size * self.config.target_hidden_size
        return Read("layers", layers, depth, width), Read("head", head, depth, width, borrowed=True)

    def _of(self, target: Any) -> MtpDrafter:
        if target not in self._drafters:
            self._drafters[target] = MtpDrafter(target, MtpLayers.apart(target, self._checkpoint))
        return self._drafters[target]


def _fit(checkpoint: Checkpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
    same = checkpoint.config.get("model_type") == target.config.get_text_config().model_type
    return fit_of(_sizes(checkpoint), target, named) if same else None


register_format(
    Format(
        name="layers for multi-token prediction alone (NextN)",
        rank=69,  # before formats that refuse the layers inside a target
        matches=lambda checkpoint: _MARK in checkpoint.shapes,
        load=NextnDrafter.of_checkpoint,
        drafter=NextnDrafter,
        possible=lambda config: {"hidden_size", "vocab_size"} <= config.keys(),
        fit=_fit,
    )
)
