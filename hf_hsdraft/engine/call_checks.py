"""Checks made before a call does any work."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from ..core.checks import public_name
from ..core.refusals import DraftingRefused
from ..drafters.base.protocol import Drafter
from ..runtime.target_limits import (
    GRADIENTS,
    check_cache,
    check_inputs,
    furthest_position,
    gradients_flow,
    text_config,
    without_cache,
)
from ..verify.verdict import Verifier
from .row_processors import check_processors, is_row_wise


def check_call(
    target: Any, drafter: Drafter, input_ids: torch.Tensor, processors: Any, synced_gpus: bool, kwargs: dict[str, Any]
) -> None:
    """Raises a DraftingRefused for everything known beforehand that would make the call fail or be wrong."""
    check_drafter(drafter, target)
    check_inputs(target)
    if not kwargs.get("use_cache"):
        raise DraftingRefused("use_cache=False is not possible with a drafter: verification needs the target's cache")
    if target in without_cache:
        check_cache(target, None)
    if gradients_flow(target, kwargs):
        raise DraftingRefused(GRADIENTS)
    window = furthest_position(target)
    rotary = getattr(text_config(target), "rope_parameters", None)  # works beyond the window
    length = 0 if rotary else _positions_taken(target, input_ids, kwargs)
    if length > window:
        raise DraftingRefused(
            f"the prompt has {length} tokens, the target's context window is {window}; shorten the prompt"
        )
    if synced_gpus and any(isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor) for one in processors):
        raise DraftingRefused(
            "guidance_scale is not possible with a drafter and synced_gpus=True: its forwards differ by process"
        )
    check_processors(processors, len(input_ids))


def check_drafter(drafter: Drafter, target: Any) -> None:
    """Raises a DraftingRefused for a drafter without weights, and what its `check` raises."""
    module: Any = drafter if isinstance(drafter, nn.Module) else nn.Identity()
    on_meta = any(weight.is_meta for weight in module.parameters())
    if on_meta and not any(hasattr(part, "_hf_hook") for part in module.modules()):  # hooks bring offloaded weights
        raise DraftingRefused(
            "the drafter is on the meta device, where weights have no values: load it by "
            "AutoDrafter.from_pretrained(name), not inside torch.device('meta')"
        )
    drafter.check(target)


def told_of_class(kind: type) -> str:
    """The error message for a class passed as a drafter."""
    parameters = inspect.signature(kind).parameters.values()
    given = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    alone = issubclass(kind, Drafter) and all(one.default is not one.empty for one in given)
    made = f"{kind.__name__}() or " if alone else ""
    return f"{kind.__name__} is a class: expected a drafter, which {made}{kind.__name__}.from_pretrained(...) makes"


def check_verifier(verifier: Verifier, target: Any, processors: Any) -> None:
    """Raises a ValueError for a verification rule trained for another target.

    Raises a DraftingRefused for a rule that may drop scores again, if a processor may keep state between calls.
    """
    config = text_config(target)
    name = public_name(getattr(target, "name_or_path", ""))
    verifier.check(getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0), name)
    if verifier.looks_ahead and (keeping := [type(one).__name__ for one in processors if not is_row_wise(one)]):
        raise DraftingRefused(
            f"{type(verifier).__name__} asks for scores beyond a mismatch that it may drop again, and "
            f"{', '.join(keeping)} may remember being asked; set row_wise = True on a processor that remembers "
            f"nothing, choose another rule of verification, or {DraftingRefused.PLAINLY}"
        )


def _positions_taken(target: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> int:
    """Number of the target's positions that the prompts take."""
    if target.config.is_encoder_decoder:
        return input_ids.shape[1]
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None:
        return int(positions.max()) + 1
    return input_ids.shape[1] if mask is None else int(mask.sum(dim=1).max())
