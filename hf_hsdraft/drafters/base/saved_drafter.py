"""Drafters that the package itself writes as folders: in formats of other projects, or without weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...core.checks import FORMAT_VERSION, printable
from ...hub.checkpoint import LOOSE_MASK, Checkpoint
from ...hub.drafter_files import CONFIG, OPTIONS, WEIGHTS, check_is_drafter, read_json
from ...hub.fetching import find_folder, loading, taken_for_hub
from ...hub.model_card import write_card
from ...hub.pretrained_drafter import stored_options, write_options
from ...hub.publication import bring_known, complete_folder
from ...hub.pushing import push
from .formats import recognise
from .loading_arguments import Placement
from .protocol import Drafter


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
        """Uploads what `save_pretrained` writes to the Hub; arguments and errors as `hub.pushing.push`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push(Path(folder), repo_id, **kwargs)


@dataclass(frozen=True)
class SpeculatorsFiles:
    """A drafter's files in the speculators format."""

    document: Mapping[str, Any]  # config.json
    tensors: Mapping[str, torch.Tensor]  # weights by name
    # Tensors stored each in a separate file, by file name; only this package reads them
    loose: Mapping[str, torch.Tensor] = field(default_factory=dict)


class PublishedDrafter(SavedDrafter):
    """A drafter of a published architecture, saved in the speculators format, which vLLM reads too."""

    saved_as: Sequence[str] = ("speculators",)
    why_not_exported = "it is written in the format of speculators only"

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        """Returns the contents of its files; raises a ValueError if the format cannot express what it computes."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a drafter of this family from a folder or the Hub; checks it before allocating anything large.

        Arguments and errors as in `AutoDrafter.from_pretrained`, which loads it too.
        """
        name, (hub, subfolder) = pretrained_model_name_or_path, taken_for_hub(kwargs)
        with loading(name, bool(hub.get("local_files_only"))):
            checkpoint = Checkpoint.open(name, subfolder, **hub)
            form = recognise(checkpoint)
            other = f"{printable(name)} is of the format {form.name}, not a {cls.__name__}: load it by AutoDrafter"
            if form.drafter is not None and not issubclass(form.drafter, cls):
                raise ValueError(other)
            drafter = form.load(checkpoint, **kwargs)
            if not isinstance(drafter, cls):  # the format does not name its class
                raise ValueError(other)
            return drafter

    def save_pretrained(self, save_directory: str | os.PathLike[str], target_name: str = "", **kwargs: Any) -> None:
        """As in `SavedDrafter`, in the speculators format. `target_name` is by default the configuration's.

        Raises a ValueError for an invalid option, or if the format cannot express what the drafter computes.
        """
        self.check_options()
        files = self.in_files(target_name)
        super().save_pretrained(save_directory, files=files)
        if LOOSE_MASK not in files.loose:
            (Path(save_directory) / LOOSE_MASK).unlink(missing_ok=True)  # left by a previous drafter

    def write(self, folder: Path, files: SpeculatorsFiles) -> None:  # type: ignore[override]
        weights = {name: tensor.detach().contiguous().cpu() for name, tensor in files.tensors.items()}
        (folder / CONFIG).write_text(json.dumps(files.document, indent=2) + "\n", encoding="utf-8")
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        for name, tensor in files.loose.items():
            torch.save(tensor.detach().cpu(), folder / name)


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
