"""Drafters that are saved as a folder of the package's own making: in formats of other projects, or without weights."""

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
from ...hub.drafter_files import CONFIG, OPTIONS, WEIGHTS, check_is_drafter, find_folder, read_json, taken_for_hub
from ...hub.fetching import loading
from ...hub.model_card import write_card
from ...hub.pretrained_drafter import stored_options
from ...hub.publication import bring_known, complete_folder
from ...hub.pushing import push
from .formats import recognise
from .loading_arguments import Placement
from .protocol import Drafter


class SavedDrafter(Drafter):
    """A drafter that is saved with its options and a card. A family says by `write` what else its folder holds."""

    loaded_from: Path | None = None  # holds recipe, figures and files of methods, if any

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Writes configuration, and weights if there are any; `kwargs` are those of `save_pretrained`."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Writes configuration, weights if there are any, drafting options and a card.

        Args:
            save_directory: created if missing. Its files are replaced when all are written.
            kwargs: as every model of transformers takes them; they mean nothing here.

        Raises:
            ValueError: a drafting option is wrong.
        """
        self.check_options()
        folder = Path(save_directory)
        with complete_folder(folder) as partial:
            self.write(partial, **kwargs)
            self.generation_config.save_pretrained(partial)
            if self.loaded_from is not None:
                bring_known(self.loaded_from, partial)
            write_card(partial, folder.resolve().name)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Sends what `save_pretrained` writes to the Hub; see `hub.pushing.push` for arguments and errors."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push(Path(folder), repo_id, **kwargs)


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


class PublishedDrafter(SavedDrafter):
    """A drafter that other projects publish. It is saved in the format of the package speculators, which vLLM reads."""

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
        name, (hub, subfolder) = pretrained_model_name_or_path, taken_for_hub(kwargs)
        with loading(name, bool(hub.get("local_files_only"))):
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
        files = self.in_files(target_name)
        super().save_pretrained(save_directory, files=files)
        if LOOSE_MASK not in files.loose:
            (Path(save_directory) / LOOSE_MASK).unlink(missing_ok=True)  # that of a former drafter

    def write(self, folder: Path, files: SpeculatorsFiles) -> None:  # type: ignore[override]
        weights = {name: tensor.detach().contiguous().cpu() for name, tensor in files.tensors.items()}
        (folder / CONFIG).write_text(json.dumps(files.document, indent=2) + "\n", encoding="utf-8")
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        for name, tensor in files.loose.items():
            torch.save(tensor.detach().cpu(), folder / name)


class WeightlessDrafter(SavedDrafter):
    """A drafter that is saved as a configuration and options.

    Attributes:
        config_class: class of its configuration, with the `model_type` that its family is registered by.
        shown_fields: what `hsdraft info` shows of its config.json.
    """

    config_class: Any
    shown_fields: Sequence[str] = ()

    @classmethod
    def of_document(
        cls, document: Mapping[str, Any], stored: Mapping[str, Any], given: Mapping[str, Any], where: Path
    ) -> Any:
        """Makes a drafter of what its files say.

        Args:
            document: what its config.json holds.
            stored: drafting options that were saved.
            given: options of the call that loads it, which go before those.
            where: path of the config.json, for messages.

        Raises:
            ValueError: the document is damaged, or an option is wrong.
        """
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Returns what its config.json holds, beside the type and the version."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads what `save_pretrained` wrote.

        Args:
            pretrained_model_name_or_path: Folder or Hub name.
            kwargs: As `AutoDrafter.from_pretrained` takes them. Dtype and device mean nothing here.

        Raises:
            OSError: There is no such folder or repository.
            ValueError: It holds something else, or an option is wrong.
        """
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
