"""Averages the weights of drafters (Wortsman et al. 2022, "Model soups").

Runs that share a starting point end in one valley of the loss, and the loss is often lower between their ends than at
any of them. An average costs nothing when drafting. Which shares are best has to be measured.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ...core.checks import public_name
from ...drafters.base.registry import tokenizer_hash
from ...drafters.hidden_state.modeling_hsdraft import HSDrafter
from ...drafters.hidden_state.target_match import explain_mismatch
from ...hub.drafter_files import RECIPE
from ...hub.model_card import read_recipe, write_card
from ...hub.publication import complete_folder
from ...training.families.hidden_state import record_target
from ...training.files import check_empty, write_json

logger = logging.get_logger(__name__)

# Fields that decide the meaning of the weights, besides their shapes.
_MEANING = (
    "vocab_size", "target_hidden_size", "target_num_hidden_layers", "target_tap_layers", "target_tokenizer_hash",
    "draft_vocab_size", "draft_vocab_ids", "injector", "head", "num_draft_steps", "num_roll_layers",
    "num_step_modules", "num_attention_heads", "rope_theta", "rms_norm_eps",
)  # fmt: skip


def check_shares(count: int, shares: Sequence[float]) -> None:
    """Raises a ValueError unless there is a positive share for each of `count` drafters."""
    if count < 2 or len(shares) != count or not all(0.0 < share < float("inf") for share in shares):
        raise ValueError(f"expected two drafters or more and a positive share for each, found {count} and {[*shares]}")


def average(drafters: Sequence[HSDrafter], shares: Sequence[float]) -> HSDrafter:
    """Returns the weighted average of drafters, in float32 on the CPU.

    Everything but the weights, files of methods included, is copied from the first drafter. All must have the same
    draft vocabulary. Whether they share a starting point is not checked, because nothing in them tells it.

    Args:
        drafters: two or more drafters of one architecture, for one target.
        shares: positive share of each drafter. They are divided by their sum.

    Raises:
        ValueError: shares and drafters do not match, or the drafters cannot be averaged.
    """
    check_shares(len(drafters), shares)
    first = drafters[0]
    for other in drafters[1:]:
        _check_alike(first, other)
    states, total = [drafter.state_dict() for drafter in drafters], sum(shares)
    averaged = {
        name: sum(share / total * state[name].float().cpu() for share, state in zip(shares, states, strict=True))
        for name in states[0]
    }
    result = copy.deepcopy(first).float().cpu()
    result.load_state_dict(averaged)
    return result.eval()


def average_folders(
    names: Sequence[str],
    shares: Sequence[float],
    out: Path,
    target: Any,
    tokenizer: Any,
    target_name: str | None = None,
) -> HSDrafter:
    """Averages stored drafters and saves the result in bfloat16, with a recipe that names the parts.

    Args:
        names: folders, or names on the Hub.
        shares: see `average`.
        out: new or empty folder. After an error it is as it was.
        target: the loaded model that they draft for. It writes the text by which it will be recognised.
        target_name: name of the target to store; `None` for the name in the first drafter.

    Raises:
        ValueError: see `average`; or this is not the target of one of the drafters.
        FileExistsError: `out` is not empty.
    """
    check_shares(len(names), shares)
    check_empty(out)
    drafters: list[HSDrafter] = [HSDrafter.from_pretrained(name, dtype=torch.float32) for name in names]
    result = average(drafters, shares)
    for name, drafter in zip(names, drafters, strict=True):
        _check_target(name, drafter, target, tokenizer)
    record_target(result, target, tokenizer, target_name or drafters[0].config.target_name or None)
    _warn_of_loss(result, drafters)
    told = [public_name(name) for name in names]
    numbered = [
        f"{name} ({told[: at + 1].count(name)})" if told.count(name) > 1 else name for at, name in enumerate(told)
    ]
    recipe = _recipe(numbered, shares, drafters)
    with complete_folder(out) as partial:
        result.to(torch.bfloat16).save_pretrained(partial)
        write_json(partial / RECIPE, recipe)
        write_card(partial, out.resolve().name)
    return result


def _check_alike(first: HSDrafter, other: HSDrafter) -> None:
    for name in _MEANING:
        one, two = getattr(first.config, name), getattr(other.config, name)
        if one != two and not (name == "target_tokenizer_hash" and "" in (one, two)):  # format 1 has none
            shown = "" if name == "draft_vocab_ids" else f" ({one} and {two})"
            raise ValueError(
                f"these drafters differ in {name}{shown}: average only those that began with the same drafter"
            )
    shapes = [{name: tensor.shape for name, tensor in each.state_dict().items()} for each in (first, other)]
    if shapes[0] != shapes[1]:
        raise ValueError("these drafters' weights have other shapes: average only those of one architecture")


def _check_target(name: str, drafter: HSDrafter, target: Any, tokenizer: Any) -> None:
    """Raises a ValueError if this is not the target of a drafter: what is recorded of the target would be wrong."""
    drafter.check(target)
    recorded = drafter.config.target_tokenizer_hash
    problem = explain_mismatch(target, drafter, tokenizer)
    if not problem and recorded and recorded != tokenizer_hash(tokenizer):
        problem = "this target's tokenizer has other tokens than the tokenizer of the drafter's own target"
    if problem:
        raise ValueError(f"{name}: {problem}. Name the target that these drafters were trained for (--target)")


def _warn_of_loss(result: HSDrafter, drafters: Sequence[HSDrafter]) -> None:
    """Warns if the average guesses much less of its target's text than each of its parts."""
    recorded = [each.config.target_reference for each in (result, *drafters)]
    references = [each for each in recorded if each is not None]
    if len(references) < len(recorded):
        return
    own, *others = (each["drafted"] / max(len(each["input_ids"]) - each["start"], 1) for each in references)
    if own < 0.9 * min(others):
        logger.warning(
            f"the average guesses {own:.0%} of a text of its target, its parts {min(others):.0%} or more: they may not "
            "have begun with the same drafter"
        )


def _recipe(names: Sequence[str], shares: Sequence[float], drafters: Sequence[HSDrafter]) -> dict[str, Any]:
    """How the average and each of its parts were made, and what else their recipes say."""
    recipes = [{} if each.loaded_from is None else read_recipe(each.loaded_from) for each in drafters]
    parts = ", ".join(f"{share / sum(shares):.3g} of {name}" for share, name in zip(shares, names, strict=True))
    training = {"averaged": f"{parts}; in float32, stored in bfloat16"}
    for name, recipe in zip(names, recipes, strict=True):
        training |= {f"{name}: {title}": line for title, line in recipe.get("training", {}).items()}
    together: dict[str, Any] = {"training": training}
    for field in ("language", "datasets", "limits", "notes"):
        values = [value for recipe in recipes for value in recipe.get(field) or []]
        if values:
            together[field] = list(dict.fromkeys(values))
    licences = {recipe.get("license") for recipe in recipes}
    if len(licences) == 1 and None not in licences:
        together["license"] = licences.pop()
    return together
