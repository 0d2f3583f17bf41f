"""A drafter made of the target's own layers for multi-token prediction."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.modeling_layers import MtpModel

from ...core.checks import is_integer
from ...core.refusals import DraftingRefused
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import CONFIG, INDEX, DamagedFile, read_json
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_parts import decoding_model
from ..base.auto_drafter import Found, register_finder
from ..base.draft_options import default_options
from ..base.plain_config import PlainConfig, TargetSizes
from ..base.protocol import Call, Drafter, Read, weights_of
from ..base.registry import Fit, Format, TargetInfo, empty_model, fit_of, misfit, register_format
from ..base.saved_drafter import Placement, take_options
from .layers import MtpLayers, described_target, layers_in, renamed
from .session import MtpSession

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


_MARK = "model.layers.0.eh_proj.weight"


def _sizes(checkpoint: Checkpoint) -> TargetSizes:
    """The sizes of the target; raises a DamagedFile if config.json does not tell them."""
    vocab_size, hidden_size = (checkpoint.config.get(name) for name in ("vocab_size", "hidden_size"))
    if not (is_integer(vocab_size) and is_integer(hidden_size)):
        place = checkpoint.folder / CONFIG
        raise DamagedFile(f"{place} is damaged: expected numbers vocab_size and hidden_size", place)
    return TargetSizes(vocab_size=vocab_size, target_hidden_size=hidden_size)


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
