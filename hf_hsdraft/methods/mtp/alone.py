"""Drafters made of layers for multi-token prediction that are published without their target.

| format | written by | files |
|---|---|---|
| NextN | SGLang (lmsys/DeepSeek-V3-NextN) | `model.layers.0.eh_proj.weight`, named as in the target's files |
| speculators `mtp` | the package speculators | `mtp_layers.0.input_proj.weight` |
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import GenerationConfig

from ...core.checks import is_integer, printable
from ...core.refusals import DraftingRefused
from ...drafters.base.draft_options import default_options
from ...drafters.base.protocol import Call, Drafter
from ...drafters.base.registry import TREES, Fit, TargetInfo
from ...drafters.base.saved_drafter import Placement, take_options
from ...hub.checkpoint import target_of
from ...hub.drafter_files import CONFIG, DamagedFile
from ...runtime.target_limits import text_config
from ...runtime.target_parts import decoding_model
from ..estimate.reads import Read
from ..published.checkpoint import AnyCheckpoint, speculators_type
from ..published.fields import Fields
from ..published.format_table import check_proposals
from ..published.formats import IN_TURN, Format, fields_told, register_format
from ..published.nodes import LevelSession
from ..published.readings import kept, match_told, settled_by, told
from ..published.refusals import with_fields
from ..published.target_sizes import fit_by_sizes, misfit
from .drafter import LEAST_STEPS, MtpConfig, MtpDrafter
from .kinds import KINDS, OF_SPECULATORS, OTHERS, Kind
from .loading import layers_alone

_MARK = "model.layers.0.eh_proj.weight"
_MARK_OF_SPECULATORS = "mtp_layers.0.input_proj.weight"
_LAYERS = "transformer_layer_config"


def _of_target(checkpoint: AnyCheckpoint) -> Mapping[str, Any]:
    """The fields of config.json that are the target's."""
    table = checkpoint.config.get(_LAYERS) if speculators_type(checkpoint) else checkpoint.config
    return table if isinstance(table, Mapping) else {}


def _read(checkpoint: AnyCheckpoint) -> MtpConfig:
    """What config.json tells of the target; raises a DamagedFile if its sizes are missing."""
    of_speculators, table = bool(speculators_type(checkpoint)), _of_target(checkpoint)
    vocab_size, hidden_size = (table.get(name) for name in ("vocab_size", "hidden_size"))
    if not (is_integer(vocab_size) and is_integer(hidden_size)):
        place = checkpoint.folder / CONFIG
        raise DamagedFile(f"{place} is damaged: expected numbers vocab_size and hidden_size", place)
    if of_speculators:
        check_proposals(Fields(checkpoint.config, CONFIG))
    kind = OF_SPECULATORS if of_speculators else KINDS.get(str(table.get("model_type")), OTHERS)
    return MtpConfig(
        vocab_size=vocab_size,
        target_hidden_size=hidden_size,  # type: ignore[arg-type]
        target_name=target_of(checkpoint.config)[0],
        hands_on_normed=kind.hands_on_normed,
        untold=kind.untold,
    )


class NextnDrafter(Drafter):
    """Drafts with layers for multi-token prediction that are published without their target; see `MtpDrafter`.

        drafter = AutoDrafter.from_pretrained("lmsys/DeepSeek-V3-NextN")
        out = model.generate(**inputs, assistant_model=drafter)

    The layers are of the target's class, so their weights are read for the first call, once for each target.
    """

    takes_tree_builders = True
    num_draft_steps = LEAST_STEPS
    unsaved = "its layers are read from the files that it was loaded from; copy these"

    def __init__(self, checkpoint: AnyCheckpoint, config: MtpConfig | None = None, kind: Kind | None = None) -> None:
        self._checkpoint, self._kind, self.config = checkpoint, kind, config or _read(checkpoint)
        self.name_or_path = checkpoint.name
        self.generation_config = self.default_generation_config()
        self._drafters: weakref.WeakKeyDictionary[Any, MtpDrafter] = weakref.WeakKeyDictionary()

    @classmethod
    def of_checkpoint(cls, checkpoint: AnyCheckpoint, kind: Kind | None = None, **kwargs: Any) -> NextnDrafter:
        """Loads a drafter, as `AutoDrafter.from_pretrained`. Weights have the dtype and device of the target."""
        Placement.taken_from(kwargs)
        config = _read(checkpoint)
        drafter = cls(
            checkpoint, settled_by(config, **{name: kwargs.pop(name) for name in config.untold if name in kwargs}), kind
        )
        take_options(drafter, checkpoint.folder, kwargs)
        return drafter

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.num_draft_steps, tree_size=16, beam_width=4)

    def check(self, target: Any) -> None:
        if wrong := misfit(self.config, target):
            raise DraftingRefused(f"{wrong}: these layers were made for another target. Use those of this target.")
        self.of_target(target).check(target)

    def taps_of(self, target: Any) -> Sequence[int]:
        return self.of_target(target).taps

    def match_told(self, target: Any, tokenizer: Any, name: str) -> list[str]:
        return match_told(self, target, tokenizer, name)

    def settle(self, target: Any, tokens: Sequence[int]) -> None:
        self.of_target(target).settle(target, tokens)

    @property
    def tried(self) -> dict[str, str]:
        """Which reading a trial has taken on the targets so far, and why, by the field of the configuration."""
        return {name: why for each in self._drafters.values() for name, why in each.tried.items()}

    def session(self, call: Call) -> LevelSession:
        return self.of_target(call.target).session(call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        shapes = self._checkpoint.shapes
        layers = sum(math.prod(shape) for name, shape in shapes.items() if "layers." in name and ".head." not in name)
        head = (self.config.vocab_size or 0) * self.config.target_hidden_size
        return Read("layers", layers, depth, width), Read("head", head, depth, width, borrowed=True)

    def of_target(self, target: Any) -> MtpDrafter:
        """Returns the drafter of a target, wrapped or not; a DraftingRefused if its class has no such layers."""
        target = decoding_model(target)
        if target not in self._drafters:
            try:
                layers = layers_alone(target, self._checkpoint, self._kind)
            except DraftingRefused as error:
                made_for, own = _of_target(self._checkpoint).get("model_type"), text_config(target).model_type
                if made_for in (None, own, target.config.model_type):
                    raise
                told = f"these layers are of {printable(made_for)}, the target is {own}"
                raise DraftingRefused(f"{told}: use layers or a drafter of this target") from error
            self._drafters[target] = MtpDrafter(target, layers, self.config, self._checkpoint.folder)
        return self._drafters[target]


def _fit(checkpoint: AnyCheckpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
    same = _of_target(checkpoint).get("model_type") == target.config.get_text_config().model_type
    return fit_by_sizes(_read(checkpoint), target, named) if same else None


def _described(checkpoint: AnyCheckpoint) -> dict[str, str]:
    try:
        config = _read(checkpoint)
    except ValueError as error:
        return {**fields_told(checkpoint), "cannot be loaded": str(error)}
    readings = {**told(config, {}, config.untold), **kept(checkpoint.folder)} if config.untold else {}
    return {"drafts": f"{TREES}, {IN_TURN}", **fields_told(checkpoint), **readings}


register_format(
    Format(
        name="layers for multi-token prediction alone (NextN)",
        rank=69,  # before formats that refuse the layers inside a target
        matches=lambda checkpoint: _MARK in checkpoint.shapes,
        load=NextnDrafter.of_checkpoint,
        describe=_described,
        drafter=NextnDrafter,
        possible=with_fields("hidden_size", "vocab_size"),
        fit=_fit,
    )
)
register_format(
    Format(
        name="speculators mtp",
        rank=10,
        matches=lambda checkpoint: speculators_type(checkpoint) == "mtp" and _MARK_OF_SPECULATORS in checkpoint.shapes,
        load=partial(NextnDrafter.of_checkpoint, kind=OF_SPECULATORS),
        describe=_described,
        drafter=NextnDrafter,
        possible=with_fields("speculators_model_type", _LAYERS),
        fit=_fit,
    )
)
