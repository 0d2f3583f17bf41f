"""Self-speculation with some of the target's layers skipped; nothing is trained."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import GenerationConfig

from ...core.checks import are_ascending, demand, is_integer, printable, public_name
from ...core.refusals import DraftingRefused
from ...drafters.base.draft_options import default_options
from ...drafters.base.plain_config import PlainConfig
from ...drafters.base.protocol import Call
from ...drafters.base.registry import register_drafter
from ...drafters.base.saved_drafter import WeightlessDrafter, give_options
from ...drafters.base.travelling_config import ANY
from ...drafters.language_model.layer_subset import with_layers
from ...drafters.language_model.lm_ability import ability_of, shared_tokens
from ...drafters.language_model.lm_session import CausalLMSession
from ...runtime.target_limits import decoder_layers, text_config


@dataclass(frozen=True)
class LayerSkipConfig(PlainConfig):
    """Which layers of which target are skipped; a ValueError if it has no such layers, or none would remain."""

    model_type: ClassVar[str] = "layer_skip"
    target_hidden_size: ClassVar[None] = None  # any

    skipped_layers: tuple[int, ...]  # ascending, from 0
    num_hidden_layers: int  # of the target
    target_name: str = ""  # for messages and cards
    vocab_size: Any = ANY  # equal to any target's
    is_encoder_decoder: bool = False

    def __post_init__(self) -> None:
        count, skipped = self.num_hidden_layers, self.skipped_layers
        demand(is_integer(count) and 1 <= count <= 4096, "num_hidden_layers", count, "expected 1 to 4096")
        valid = are_ascending(skipped, 0, count - 1) and len(skipped) < count
        wanted = f"expected ascending numbers from 0 to {count - 1}, each once and not all of them"
        demand(valid, "skipped_layers", list(skipped), wanted)

    @property
    def target_num_hidden_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def kept_layers(self) -> list[int]:
        return [number for number in range(self.num_hidden_layers) if number not in self.skipped_layers]


class LayerSkipDrafter(WeightlessDrafter):
    """Self-speculation without training: the target drafts with some of its layers skipped ("Draft & Verify").

    It has no weights, and reads the text with a separate cache, so the target's results do not change.

        drafter = LayerSkipDrafter.for_target(model, skipped_layers=[4, 6, 9])
        out = model.generate(**inputs, assistant_model=drafter)
    """

    config_class = LayerSkipConfig
    shown_fields = ("skipped_layers", "num_hidden_layers", "target_name")
    num_draft_steps = 32
    takes_tree_builders = True
    why_not_exported = "it has no weights: other programs leave layers out by methods of their own"

    def __init__(self, config: LayerSkipConfig) -> None:
        self.config = config
        self.generation_config = self.default_generation_config()

    @classmethod
    def for_target(cls, target: Any, skipped_layers: Sequence[int], target_name: str = "") -> LayerSkipDrafter:
        """Makes a drafter for a target without these of its layers, ascending from 0; a ValueError for other numbers.

        `target_name` is by default the name by which the target was loaded.
        """
        name = public_name(target_name or getattr(target, "name_or_path", "") or "")
        return cls(LayerSkipConfig(tuple(skipped_layers), decoder_layers(text_config(target)), name))

    @classmethod
    def of_document(
        cls, document: Mapping[str, Any], stored: Mapping[str, Any], given: Mapping[str, Any], where: Path
    ) -> LayerSkipDrafter:
        skipped, name = document.get("skipped_layers"), document.get("target_name", "")
        if not isinstance(skipped, list) or not isinstance(name, str):
            raise ValueError(f"{where} is damaged: expected a list of numbers as skipped_layers, a name as target_name")
        try:
            drafter = cls(LayerSkipConfig(tuple(skipped), document.get("num_hidden_layers", 0), name))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where} is damaged: {error}") from error
        give_options(drafter, stored, given)
        return drafter

    def document(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in self.shown_fields}

    def default_generation_config(self) -> GenerationConfig:
        return default_options(num_assistant_tokens=5, tree_size=16, beam_width=4)

    def check(self, target: Any) -> None:
        layers = decoder_layers(text_config(target))
        if layers != self.config.num_hidden_layers:
            raise DraftingRefused(
                f"the target has num_hidden_layers={layers}, this drafter leaves out layers of one with "
                f"{self.config.num_hidden_layers} ({printable(self.config.target_name) or 'not named'}). Search a list "
                "for this target by `hsdraft make skip-layers`."
            )
        reason = ability_of(drafting_part(target, self.config)).reason
        if reason:
            raise DraftingRefused(f"the target's layers cannot draft: {reason}")

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        """Raises a DraftingRefused where all processes have to run the same forwards."""
        if all_processes:
            raise DraftingRefused.of_sharded("some of the layers")

    def session(self, call: Call) -> CausalLMSession:
        part = drafting_part(call.target, self.config)
        return CausalLMSession(part, call, shared_tokens(part, call.target), ability_of(part).kinds)


def drafting_part(target: Any, config: LayerSkipConfig) -> Any:
    """Returns the target without its skipped layers. It shares the target's weights and is cached per target.

    Raises a DraftingRefused if the remaining layers cannot run without the others.
    """
    where = target.device, target.dtype, text_config(target)._attn_implementation
    known, key = _parts.get(target, {}), (config.skipped_layers, *where)
    part = known.get(key)
    if part is None:
        try:
            part = with_layers(target, config.kept_layers).eval()
        except ValueError as error:
            raise DraftingRefused(f"the target cannot draft by some of its layers: {error}") from error
        # Parts made before the target was moved are useless. Other threads may read the old mapping.
        _parts[target] = {**{other: kept for other, kept in known.items() if other[1:] == where}, key: part}
    return part


_parts: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


register_drafter(LayerSkipConfig.model_type, LayerSkipConfig, LayerSkipDrafter)
