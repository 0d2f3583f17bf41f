"""Drafters made of a target's layers for multi-token prediction."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import CONFIG_MAPPING, GenerationConfig

from ...core.checks import few, setting
from ...core.refusals import DraftingRefused
from ...drafters.base.auto_drafter import Found, register_finder
from ...drafters.base.draft_options import default_options
from ...drafters.base.plain_config import described
from ...drafters.base.protocol import Call, Drafter, weights_of
from ...drafters.base.registry import TREES, TargetInfo
from ...drafters.base.target_weights import TargetWeights
from ...hub.drafter_files import INDEX, read_json
from ...runtime.target_limits import text_config
from ...runtime.target_parts import decoding_model
from ..estimate.reads import Read
from ..published.checkpoint import AnyCheckpoint
from ..published.formats import IN_TURN, empty_model
from ..published.nodes import LevelSession
from ..published.readings import match_told, settle, settled_by
from ..published.refusals import register_refusal, with_fields
from ..published.target_copies import before_norm, check_last_state
from ..published.target_sizes import FLAG, TargetSizes
from .kinds import UNABLE, described_target, layers_in, renamed
from .layers import MtpLayers
from .loading import layer_numbers, layers_of
from .session import CachedMtpSession, MtpSession


@described
@dataclass(frozen=True, kw_only=True)
class MtpConfig(TargetSizes):
    """What an [`MtpDrafter`] knows of its target, and how its layers are read."""

    last_tap_is_normed: bool = setting("whether the first layer reads the state after the final norm", True, FLAG)
    hands_on_normed: bool = setting("whether a layer reads the one before after its norm", True, FLAG)
    untold: Sequence[str] = setting("fields that the files leave open; a trial on the target decides", ())

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        """Returns the hidden states that are read of a target with so many layers."""
        return (num_hidden_layers,)


LEAST_STEPS = 5  # greatest depth of a draft where there are fewer layers: they are used again


class MtpDrafter(Drafter):
    """Drafts with the layers for multi-token prediction that a target's checkpoint holds (DeepSeek-V3, section 2.2).

        drafter = MtpDrafter.for_target(model)
        out = model.generate(**inputs, assistant_model=drafter)  # or assistant_model="mtp"

    It drafts trees for batches, greedy and sampled texts. The layers of depths 1, 2, ... are used in turn, so a single
    layer drafts deeper too. They are read once for each target, and belong to it: there is nothing to save.
    """

    takes_tree_builders = True
    unsaved = (
        "its layers belong to its target's checkpoint; keep that, and make the drafter again by "
        'MtpDrafter.for_target(model), or pass assistant_model="mtp" to generate'
    )
    rows_of_trial = 4

    def __init__(
        self, target: Any, layers: MtpLayers, config: MtpConfig | None = None, loaded_from: Any = None
    ) -> None:
        self._target, self.loaded_from, kind = weakref.ref(target), loaded_from, layers.kind
        name, text = str(getattr(target.config, "name_or_path", "") or ""), text_config(target)
        self.config = config or MtpConfig(
            vocab_size=text.vocab_size,
            target_hidden_size=text.hidden_size,
            target_name=name,
            last_tap_is_normed=kind.reads_normed,
            hands_on_normed=kind.hands_on_normed,
            untold=kind.untold,
        )
        self.layers, self.tried, self.trials = layers.handing_on(self.config.hands_on_normed), dict[str, str](), 0
        self.num_draft_steps = max(layers.count, LEAST_STEPS)
        self._last = len(target.get_decoder().layers)  # hidden state
        self.generation_config = self.default_generation_config()

    @classmethod
    def for_target(
        cls,
        target: Any,
        cache_dir: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        hands_on_normed: bool | None = None,
    ) -> MtpDrafter:
        """Returns the drafter of a loaded target, also inside a PEFT model or `torch.compile`.

        A target of the Hub must have been loaded with the same `cache_dir` (by default `HF_HUB_CACHE`) and `revision`.
        `hands_on_normed` tells whether each layer reads the one before after its norm; None for what is known of the
        type, which for GLM's a trial finds.
        Raises a DraftingRefused if the checkpoint holds no such layers, or layers that cannot draft here.
        """
        target = decoding_model(target)
        layers = layers_of(target, cache_dir=cache_dir, revision=revision)
        drafter = cls(target, layers, loaded_from=layers.folder)
        given = {} if hands_on_normed is None else {"hands_on_normed": hands_on_normed}
        drafter.reread(**vars(settled_by(drafter.config, **given)))
        return drafter

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        last = (self._last,)
        return last if self.config.last_tap_is_normed else before_norm(last, self._last)

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
        if not self.config.last_tap_is_normed:
            check_last_state(target)

    def reads(self, depth: int, width: int) -> Iterator[Read]:
        layers, model = self.layers, self.layers.model
        yield Read("layers", weights_of(*model.layers) // layers.count, depth, width)
        yield Read("head", weights_of(model.shared_head), depth, width, borrowed=layers.heads is None)

    def session(self, call: Call) -> LevelSession:
        self.layers.follow(call.target)
        return (MtpSession if self.layers.by_node else CachedMtpSession)(self, self.layers, call)

    @property
    def can_be_tried(self) -> bool:
        return self.layers.num_stored == 1 and self.layers.by_node

    def match_told(self, target: Any, tokenizer: Any, name: str) -> list[str]:
        return match_told(self, target, tokenizer, name)

    def settle(self, target: Any, tokens: Sequence[int]) -> None:
        if self.config.untold:
            self.layers.follow(target)
            settle(self, target, tokens)

    def reread(self, **fields: Any) -> None:
        self.config = replace(self.config, **fields)
        self.layers = self.layers.handing_on(self.config.hands_on_normed)

    def borrow(self, *_: Any) -> TargetWeights:
        ids = torch.arange(self.layers.vocab_size, device=self.device)
        return TargetWeights(self.layers.embed, None, ids)

    def logits(self, states: torch.Tensor, _: Any) -> torch.Tensor:
        return self.layers.logits(states, 0)

    def trial_states(
        self, taps: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, depth: int, weights: TargetWeights
    ) -> Sequence[torch.Tensor]:
        """See `PublishedNetwork`. Chains follow the text's tokens, and do not see each other."""
        stored: list[tuple[torch.Tensor, torch.Tensor]] = []

        def write(_: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            stored.append((keys, values))
            keys, values = (torch.cat(each, dim=2) for each in zip(*stored, strict=True))
            return keys, values

        def run(embeds: torch.Tensor, states: torch.Tensor, at: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            return self.layers.run(0, embeds[None], states[None], at[None] + 1, seen[None], write)[0]

        every, found = torch.arange(len(taps), device=taps.device), list[torch.Tensor]()
        own = torch.eye(len(starts), dtype=torch.bool, device=taps.device)
        for step in range(depth):
            at = starts + step if step else every
            seen = every <= (starts if step else every)[:, None]
            seen &= at[:, None] - every < (self.layers.windows[0] or 2**31)
            seen = torch.cat([seen, *[own] * step], dim=1)
            made = run(weights.embed(tokens[at + 1]), found[-1] if step else taps, at, seen)
            found.append(made if step else made[starts])
        return found


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
            drafts=f"{TREES}, {IN_TURN}",
        )


def _can_be_read(target: TargetInfo, count: int, local_files_only: bool) -> bool:
    """Whether these layers can be built, and the checkpoint has tensors of each of them, in files that are there."""
    model = target.model if target.model is not None else empty_model(target.config)
    if model is None:
        return False
    try:
        with torch.device("meta"):
            MtpLayers(described_target(model, count).model())
        checkpoint = AnyCheckpoint.open(target.place, local_files_only=local_files_only)
        names = renamed(_tensor_names(checkpoint), target.config)
        numbers = layer_numbers(names, target.config)
        return bool(numbers) and numbers == set(range(len(numbers)))
    except Exception:  # any error of building them means that it cannot
        return False


def _tensor_names(checkpoint: AnyCheckpoint) -> Collection[str]:
    if (checkpoint.folder / INDEX).is_file():
        files: dict[str, str] = read_json(checkpoint.folder / INDEX).get("weight_map", {})
        local = os.path.isdir(checkpoint.name)
        return [name for name, file in files.items() if not local or (checkpoint.folder / file).is_file()]
    return checkpoint.shapes if checkpoint.is_described else ()


def _why_refused(checkpoint: AnyCheckpoint) -> str:
    """Why files are no drafter that hold a target together with its layers; empty for others."""
    if not any("mtp" in name or "eh_proj" in name for name in checkpoint.shapes):
        return ""
    fields = {name: value for name, value in checkpoint.config.items() if name != "num_labels"}  # of any size
    try:
        config = CONFIG_MAPPING[str(fields["model_type"])].from_dict(fields)
        names = list(renamed(checkpoint.shapes, config)) if layers_in(config) else []
    except Exception:  # a type or fields that transformers does not read
        return ""
    if not names or config.model_type in UNABLE:
        return ""
    return (
        f"holds a target's own prediction heads ({few(names, 2)}), which draft for that target alone: load it as the "
        'target, and pass assistant_model="mtp" to generate, or `--drafter mtp` to commands'
    )


def _may_be_refused(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")  # beside images
    return with_fields("hidden_size", "vocab_size")(text if isinstance(text, Mapping) else config)


register_refusal("target with layers for multi-token prediction", 71, _why_refused, _may_be_refused)
register_finder("mtp", _found)
