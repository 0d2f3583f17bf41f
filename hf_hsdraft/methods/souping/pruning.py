"""Makes a small language model by removing layers of a target: the start of a drafter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers import __version__ as transformers_version

from ..._version import __version__
from ...core.checks import public_name
from ...hub.publication import complete_folder
from ...runtime.misreading import same_but_rounding
from ...runtime.target_limits import text_config
from ...training.files import check_empty, write_json
from ..distillation.layer_subset import checked_layers, layers_of, with_layers

RECIPE = "pruning_recipe.json"
_TRIED = 12  # tokens that the saved model reads in its check


def prune(target: Any, tokenizer: Any, kept: Sequence[int], out: str | os.PathLike[str], name: str = "") -> Any:
    """Saves an ordinary transformers model with some of a target's layers, and returns it as loaded from the folder.

    Tokenizer, generation configuration and recipe are saved beside it.

    Args:
        target: a target of any type whose layers are in one list.
        kept: ascending numbers of the layers to keep, from 0 on.
        out: new or empty folder.
        name: name of the target, for the recipe, which is published with the model; of a path, only the last part.

    Raises:
        FileExistsError: the folder holds something.
        ValueError: there are no such layers, or a model of this type cannot be saved with some of its layers.
    """
    folder = Path(out)
    check_empty(folder)
    numbers, count = checked_layers(target, kept), len(layers_of(target)[1])
    small = with_layers(target, numbers)
    recipe = {
        "target": public_name(name or getattr(target, "name_or_path", "") or ""),
        "target_layers": count,
        "kept_layers": numbers,
        "software": f"hf_hsdraft {__version__}, transformers {transformers_version}, torch {torch.__version__}",
    }
    with complete_folder(folder) as partial:
        small.save_pretrained(partial)
        _check_saved(small, partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        write_json(partial / RECIPE, recipe)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)


@torch.no_grad()
def _check_saved(small: Any, folder: Path) -> None:
    """Raises a ValueError unless the files hold the model: some types' layers depend on fields not known here."""
    what = type(small).__name__
    advice = "expected a model whose layers are told apart by its configuration's lists alone"
    try:
        loaded, found = AutoModelForCausalLM.from_pretrained(folder, dtype=small.dtype, output_loading_info=True)
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise ValueError(f"{what} cannot be pruned: what was saved cannot be loaded ({error}); {advice}") from error
    wrong = sorted({*found["missing_keys"], *found["unexpected_keys"]})
    ids = torch.arange(_TRIED, device=small.device)[None] % text_config(small).vocab_size
    loaded = loaded.to(small.device).eval()
    same = not wrong and same_but_rounding(
        loaded(input_ids=ids, use_cache=False).logits, small(input_ids=ids, use_cache=False).logits
    )
    if not same:
        raise ValueError(f"{what} cannot be pruned: what was saved is not what was kept; {advice}")
