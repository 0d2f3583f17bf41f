"""Drafters in formats of other projects: how they are loaded, saved and sent, whatever their family."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...core.checks import printable
from ...hub.care import care
from ...hub.checkpoint import LOOSE_MASK, Checkpoint
from ...hub.drafter_files import CONFIG, HUB_ARGUMENTS, WEIGHTS
from ...hub.publication import bring_known, complete_folder
from .formats import recognise
from .protocol import Drafter


@dataclass(frozen=True)
class SpeculatorsFiles:
    """What the files of a drafter hold in the format of the package speculators.

    Attributes:
        document: of config.json.
        tensors: the weights by name.
        loose: tensors that have a file of their own, by its name. Only this package reads them.
    """

    document: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    loose: Mapping[str, torch.Tensor] = field(default_factory=dict)


class PublishedDrafter(Drafter):
    """A drafter that other projects publish. It is saved in the format of the package speculators, which vLLM reads."""

    loaded_from: Path | None = None  # holds recipe, figures and files of methods, if any
    saved_as = ("speculators",)
    why_not_exported = "it is written in the format of speculators only"

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        """Returns what the files of this drafter hold.

        Args:
            target_name: name of the target; the one that the configuration has by default.

        Raises:
            ValueError: the format cannot say what the drafter computes.
        """
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a drafter of this family, checked before anything large is allocated. `AutoDrafter` loads it too.

        Args:
            pretrained_model_name_or_path: folder or Hub name of a drafter in a format that is known.
            kwargs: as `AutoDrafter.from_pretrained` takes them.

        Raises:
            OSError: there is no such folder or repository.
            ValueError: it holds something else, or its files contradict each other.
        """
        hub = {name: value for name in HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
        name, subfolder = pretrained_model_name_or_path, kwargs.pop("subfolder", None) or ""
        with care().loading(name, bool(hub.get("local_files_only"))):
            checkpoint = Checkpoint.open(name, subfolder, **hub)
            form = recognise(checkpoint)
            other = f"{printable(name)} is of the format {form.name}, not a {cls.__name__}: load it by AutoDrafter"
            if form.drafter is not None and not issubclass(form.drafter, cls):
                raise ValueError(other)
            drafter = form.load(checkpoint, **kwargs)
            if not isinstance(drafter, cls):  # of a format that does not name its class
                raise ValueError(other)
            return drafter

    def save_pretrained(self, save_directory: str | os.PathLike[str], target_name: str = "", **kwargs: Any) -> None:
        """Writes configuration, weights, drafting options and a card, in the format of speculators.

        Args:
            save_directory: created if missing. Its files are replaced when all are written.
            target_name: name of the target to write; the one that the configuration has by default.
            kwargs: as every model of transformers takes them; they mean nothing here.

        Raises:
            ValueError: a drafting option is wrong, or the format cannot say what the drafter computes.
        """
        self.check_options()
        files, folder = self.in_files(target_name), Path(save_directory)
        weights = {name: tensor.detach().contiguous().cpu() for name, tensor in files.tensors.items()}
        with complete_folder(folder) as partial:
            (partial / CONFIG).write_text(json.dumps(files.document, indent=2) + "\n", encoding="utf-8")
            save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
            self.generation_config.save_pretrained(partial)
            if self.loaded_from is not None:
                bring_known(self.loaded_from, partial)
            for name, tensor in files.loose.items():
                torch.save(tensor.detach().cpu(), partial / name)
            care().write_card(partial, folder.resolve().name)
        if LOOSE_MASK not in files.loose:
            (folder / LOOSE_MASK).unlink(missing_ok=True)  # that of a former drafter

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Sends what `save_pretrained` writes to the Hub; see [`RepositoryCare`] for arguments and errors."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return care().push(Path(folder), repo_id, **kwargs)
