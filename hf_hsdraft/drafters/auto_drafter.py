"""Loading a drafter of any family."""

from __future__ import annotations

import os
from typing import Any

from . import families  # noqa: F401  # they register themselves
from .by_config import load_by_config


class AutoDrafter:
    """Loads drafters; which family one belongs to is read from its config.json, and for other formats from its tensors.

    Drafters that other projects publish are loaded as they are, without conversion and without code of theirs.

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
            ValueError: it is of no family and of no format that is known, or its files contradict each other.
        """
        return load_by_config(pretrained_model_name_or_path, *args, **kwargs)
