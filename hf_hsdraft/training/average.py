"""One drafter from several of the same make: the average of their weights (Wortsman et al. 2022, "Model soups").

Runs that began with the same drafter end in one valley of the loss; between them it is often lower than where any of
them ended. Costs nothing when drafting, and which shares are best is for a benchmark to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..configuration_hsdraft import public_name
from ..model_card import RECIPE, read_recipe, write_card
from ..modeling_hsdraft import HSDrafter
from .files import write_json
from .identity import record_target

# Beside the shapes of the weights, what decides their meaning.
_MEANING = (
    "target_tap_layers",
    "target_tokenizer_hash",
    "draft_vocab_size",
    "draft_vocab_ids",
    "injector",
    "head",
    "num_draft_steps",
    "num_attention_heads",
    "rope_theta",
    "rms_norm_eps",
)


def average(drafters: Sequence[HSDrafter], shares: Sequence[float]) -> HSDrafter:
    """The weighted average of drafters, in float32; everything else is the first one's.

    Args:
        drafters: at least two, of one architecture, for one target.
        shares: of each, positive; they are divided by their sum.

    Raises:
        ValueError: shares and drafters do not match, or the drafters cannot be averaged.
    """
    if len(drafters) < 2 or len(shares) != len(drafters) or not all(0.0 < share < float("inf") for share in shares):
        raise ValueError(
            f"expected at least two drafters and a positive share for each, found {len(drafters)} and {list(shares)}"
        )
    first = drafters[0]
    for other in drafters[1:]:
        _check_alike(first, other)
    states = [drafter.state_dict() for drafter in drafters]
    total = sum(shares)
    averaged = {
        name: sum(share / total * state[name].float() for share, state in zip(shares, states, strict=True))
        for name in states[0]
    }
    result = HSDrafter(first.config).to(torch.float32)
    result.load_state_dict(averaged)
    result.generation_config = first.generation_config
    return result.eval()


def average_folders(
    names: Sequence[str],
    shares: Sequence[float],
    out: Path,
    target: Any,
    tokenizer: Any,
    target_name: str | None = None,
) -> HSDrafter:
    """Averages stored drafters and saves the result in bfloat16, with the first one's recipe.

    Args:
        names: folders, or names of the Hub.
        out: new or empty folder.
        target: the model they draft for, loaded; it writes the text by which it will be recognised.
        target_name: name of the target to store; default: the first drafter's.

    Raises:
        ValueError: as of [`average`], or the target has other sizes than the drafters'.
        FileExistsError: there is something in `out`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty: name a new folder")
    drafters = [HSDrafter.from_pretrained(name, dtype=torch.float32) for name in names]
    result = average(drafters, shares)
    record_target(result, target, tokenizer, target_name or drafters[0].config.target_name or None)
    result.to(torch.bfloat16).save_pretrained(out)
    source = drafters[0].loaded_from
    recipe = {name: value for name, value in read_recipe(source).items() if value} if source is not None else {}
    parts = [f"{share / sum(shares):.3g} of {public_name(name)}" for share, name in zip(shares, names, strict=True)]
    averaged = f"{', '.join(parts)}, in float32; the other lines are about the first of them"
    write_json(out / RECIPE, {**recipe, "training": {**recipe.get("training", {}), "averaged": averaged}})
    write_card(out, out.resolve().name)
    return result


def _check_alike(first: HSDrafter, other: HSDrafter) -> None:
    for name in _MEANING:
        one, two = getattr(first.config, name), getattr(other.config, name)
        if one != two:
            shown = "" if name == "draft_vocab_ids" else f" ({one} and {two})"
            raise ValueError(
                f"these drafters differ in {name}{shown}: average only those that began with the same drafter"
            )
    shapes = [{name: tensor.shape for name, tensor in each.state_dict().items()} for each in (first, other)]
    if shapes[0] != shapes[1]:
        raise ValueError("these drafters' weights have other shapes: average only those of one architecture")
