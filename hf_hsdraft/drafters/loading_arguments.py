"""Arguments of loading a drafter of another project: the dtype of its weights, and drafting options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..common.checks import printable
from ..repository.drafter_files import OPTIONS
from ..repository.pretrained_drafter import stored_options
from .draft_options import nearest_option, option_names


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the dtype that is asked for; `None` for that of the files.

    Args:
        dtype: a dtype or its name; `None` or `"auto"` for that of the files.

    Raises:
        ValueError: it is no dtype of floating-point numbers.
    """
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is invalid: expected one such as torch.bfloat16, or 'auto'")
    return found


def take_options(drafter: Any, folder: Path, given: Mapping[str, Any], file: str = OPTIONS) -> None:
    """Gives a drafter the drafting options of its folder, and those of a call to load it.

    What other projects write into that file is not about drafting here, and is left alone.

    Args:
        drafter: the drafter; its weights may be on the meta device.
        folder: of its files.
        given: options of the call, which go before those of the folder.
        file: name of the file that holds options.

    Raises:
        TypeError: there is no such option.
        ValueError: an option of the call is out of range.
    """
    give_options(drafter, stored_options(folder / file), given)


def give_options(drafter: Any, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Gives a drafter options that were saved, of which those of other projects are left alone, and those of a call.

    Args:
        drafter: the drafter.
        stored: options that were saved.
        given: options of the call, which go before those.

    Raises:
        TypeError: there is no such option.
        ValueError: an option of the call is out of range.
    """
    names = option_names(drafter)
    for name in sorted(given.keys() - names):
        near = nearest_option(name, names)
        hint = f"the nearest option is {near}" if near else f"expected dtype, or one of {', '.join(sorted(names))}"
        raise TypeError(f"{type(drafter).__name__} has no drafting option {printable(name)}: {hint}")
    for name, value in {**stored, **given}.items():
        if name in names:
            setattr(drafter.generation_config, name, value)
    if given:
        drafter.check_options()
