"""Drafters without weights of their own: all that they are stands in their config.json."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.checks import FORMAT_VERSION
from ...hub.drafter_files import (
    CONFIG,
    HUB_ARGUMENTS,
    OPTIONS,
    check_is_drafter,
    find_folder,
    read_json,
)
from ...hub.fetching import loading
from ...hub.model_card import write_card
from ...hub.pretrained_drafter import stored_options
from ...hub.publication import complete_folder
from ...hub.pushing import push
from .loading_arguments import Placement
from .protocol import Drafter


class WeightlessDrafter(Drafter):
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
        hub = {name: value for name in HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
        name, subfolder = pretrained_model_name_or_path, kwargs.pop("subfolder", None) or ""
        Placement.taken_from(kwargs)
        with loading(name, bool(hub.get("local_files_only"))):
            folder = find_folder(name, (CONFIG, OPTIONS), subfolder, **hub)
            check_is_drafter(folder, cls.config_class.model_type)
            document, options = read_json(folder / CONFIG), stored_options(folder / OPTIONS)
        return cls.of_document(document, options, kwargs, folder / CONFIG)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Writes configuration, options and a card into a folder; there are no weights.

        Args:
            save_directory: Created if missing.
            kwargs: As every model of transformers takes them; they mean nothing here.

        Raises:
            ValueError: A drafting option is wrong.
        """
        self.check_options()
        folder = Path(save_directory)
        head = {"model_type": self.config_class.model_type, "format_version": FORMAT_VERSION}
        with complete_folder(folder) as partial:
            (partial / CONFIG).write_text(json.dumps({**head, **self.document()}) + "\n", encoding="utf-8")
            self.generation_config.save_pretrained(partial)
            write_card(partial, folder.resolve().name)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Sends what `save_pretrained` writes to the Hub; see `hub.pushing.push` for arguments and errors."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push(Path(folder), repo_id, **kwargs)
