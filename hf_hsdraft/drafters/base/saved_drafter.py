"""What families share in loading (dtype, device, options), and drafters that the package itself writes as folders."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.checks import FORMAT_VERSION, is_misspelt, nearest_option, printable
from ...hub.drafter_files import CONFIG, OPTIONS, check_is_drafter, find_folder, loading, read_json, taken_for_hub
from ...hub.model_card import write_card
from ...hub.pretrained_drafter import stored_options, write_options
from ...hub.publication import bring_known, complete_folder, push
from .draft_options import option_names
from .protocol import Drafter

PLACEMENT = ("dtype", "device_map", "attn_implementation")  # accepted by every family, beside options


@dataclass(frozen=True)
class Placement:
    """Where a drafter's weights go."""

    dtype: torch.dtype | None  # None for the dtype of the files
    device: torch.device | None  # None for the CPU. `generate()` moves a drafter to its target anyway.

    @classmethod
    def taken_from(cls, given: MutableMapping[str, Any]) -> Placement:
        """Pops dtype (also `torch_dtype`), device and attention from `given`; raises a ValueError if one is invalid."""
        dtypes = {name: dtype_of(given[name]) for name in ("dtype", "torch_dtype") if given.get(name) is not None}
        if len(set(dtypes.values())) > 1:
            raise ValueError(f"dtype={given['dtype']!r} contradicts torch_dtype={given['torch_dtype']!r}: pass one")
        for name in ("dtype", "torch_dtype"):
            given.pop(name, None)
        attention = given.pop("attn_implementation", None)
        if attention not in (None, "eager", "sdpa"):
            raise ValueError(
                f"attn_implementation={attention!r} is invalid: this drafter computes attention by itself; leave it "
                "out, or pass 'sdpa' or 'eager', which change nothing"
            )
        return cls(next(iter(dtypes.values()), None), _device_of(given.pop("device_map", None)))

    def place(self, drafter: Any) -> Any:
        """Moves a drafter to the device, if it has weights, and returns it."""
        return drafter.to(self.device) if self.device is not None and isinstance(drafter, nn.Module) else drafter


def _device_of(device_map: Any) -> torch.device | None:
    if isinstance(device_map, Mapping) and len(set(device_map.values())) == 1:
        [device_map] = set(device_map.values())
    if device_map is None or device_map == "auto":  # it will follow its target
        return None
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device_map={device_map!r} is invalid: expected one device, such as 'cuda:0', as a drafter is not divided"
        ) from error


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns a floating-point dtype, given by name or itself; None and `"auto"` give None, the dtype of the files."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is invalid: expected one such as torch.bfloat16, or 'auto'")
    return found


def take_options(drafter: Any, folder: Path, given: Mapping[str, Any], file: str = OPTIONS) -> None:
    """As `give_options`, with the options saved in a folder's `file`. The drafter may be on the meta device."""
    give_options(drafter, stored_options(folder / file), given)


def give_options(drafter: Any, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Applies saved options, ignoring unknown ones, then options from the caller.

    Raises a TypeError if the caller names an unknown option, and a ValueError if one is out of range.
    """
    names = option_names(drafter)
    refuse_unknown(type(drafter).__name__, given, names)
    for name, value in {**stored, **given}.items():
        if name in names:
            setattr(drafter.generation_config, name, value)
    if given:
        drafter.check_options()


def refuse_unknown(kind: str, given: Collection[str], names: Collection[str], others: bool = False) -> None:
    """Raises a TypeError if an argument is not a drafting option; with `others`, only if it is a typo of one."""
    for name in sorted(set(given) - set(names)):
        near = nearest_option(name, names)
        hint = f"expected {', '.join(PLACEMENT)}, or one of {', '.join(sorted(names))}"
        if is_misspelt(name, near):
            hint = f"the nearest option is {near}"
        elif others:
            continue
        raise TypeError(f"{kind} has no drafting option {printable(name)}: {hint}")


class SavedDrafter(Drafter):
    """A drafter that is saved with its options and a card; families implement `write` for the rest."""

    loaded_from: Path | None = None  # may hold the recipe, figures and files of methods

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Writes configuration and weights, if any; `kwargs` as in `save_pretrained`."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Writes configuration, weights if any, drafting options and a card; raises a ValueError for an invalid option.

        An existing folder's files are replaced once all are written. `kwargs` of transformers models are accepted and
        ignored.
        """
        self.check_options()
        folder = Path(save_directory)
        with complete_folder(folder) as partial:
            self.write(partial, **kwargs)
            write_options(self.generation_config, partial)
            if self.loaded_from is not None:
                bring_known(self.loaded_from, partial)
            write_card(partial, folder.resolve().name)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads what `save_pretrained` writes to the Hub; arguments and errors as `hub.publication.push`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push(Path(folder), repo_id, **kwargs)


class WeightlessDrafter(SavedDrafter):
    """A drafter saved as a configuration and options."""

    config_class: Any  # its configuration, with the family's `model_type`
    shown_fields: Sequence[str] = ()  # fields of config.json that `hsdraft info` shows

    @classmethod
    def of_document(
        cls, document: Mapping[str, Any], stored: Mapping[str, Any], given: Mapping[str, Any], where: Path
    ) -> Any:
        """Builds a drafter from its config.json and saved options; raises a ValueError if one is invalid.

        Args:
            given: options from the caller; they override the saved ones.
            where: path of config.json, for messages.
        """
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Returns its config.json, except type and version."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads what `save_pretrained` wrote; as in `AutoDrafter.from_pretrained`, but dtype and device are ignored."""
        name, (hub, subfolder) = pretrained_model_name_or_path, taken_for_hub(kwargs)
        Placement.taken_from(kwargs)
        with loading(name, bool(hub.get("local_files_only"))):
            folder = find_folder(name, (CONFIG, OPTIONS), subfolder, **hub)
            check_is_drafter(folder, cls.config_class.model_type)
            document, options = read_json(folder / CONFIG), stored_options(folder / OPTIONS)
        return cls.of_document(document, options, kwargs, folder / CONFIG)

    def write(self, folder: Path, **kwargs: Any) -> None:
        head = {"model_type": self.config_class.model_type, "format_version": FORMAT_VERSION}
        (folder / CONFIG).write_text(json.dumps({**head, **self.document()}) + "\n", encoding="utf-8")
