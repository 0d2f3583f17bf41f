"""Loading a drafter of any family."""

from __future__ import annotations

import os
from typing import Any

from ..common.checks import few, printable
from ..repository.care import care
from ..repository.drafter_files import CONFIG, HUB_ARGUMENTS, find_folder, read_json
from . import families  # noqa: F401  # they register themselves
from .registry import FAMILIES


class AutoDrafter:
    """Loads drafters; which family one belongs to is read from its config.json.

    drafter = AutoDrafter.from_pretrained("user/SmolLM2-135M-Instruct-hsdraft")
    """

    def __init__(self) -> None:
        raise TypeError("AutoDrafter is not made by itself: call AutoDrafter.from_pretrained(name)")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Loads a drafter.

        Args:
            pretrained_model_name_or_path: folder or Hub name of a drafter.
            args, kwargs: as the family's own `from_pretrained` takes them.

        Raises:
            OSError: there is no such folder or repository, or it holds no configuration.
            ValueError: its `model_type` is of no family that is registered.
        """
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
        with care().loading(pretrained_model_name_or_path, offline=bool(hub.get("local_files_only"))):
            folder = find_folder(pretrained_model_name_or_path, (CONFIG,), kwargs.get("subfolder") or "", **hub)
            config = read_json(folder / CONFIG)
        found = config.get("model_type")
        own = "auto_map" in config
        family = FAMILIES.get(found) if isinstance(found, str) else None
        if family is None:
            raise ValueError(
                f"{printable(pretrained_model_name_or_path)} has model_type={printable(found)!r}, which is no family "
                f"of drafters: expected {few(sorted(FAMILIES))}"
                + ("; import the module that registers it, or use AutoModel and trust_remote_code=True" if own else "")
            )
        return family.drafter.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
