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
            args, kwargs: these are the same for all families:
                - `revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`, `force_download`: for the Hub;
                - `dtype` (or `torch_dtype`): of the weights, that of the files by default;
                - `device_map`: one device for the weights, or "auto", as a drafter follows its target anyway;
                - `attn_implementation`: of a language model. All others compute attention by themselves, and take
                  "sdpa" and "eager", which change nothing there;
                - drafting options by name.
                Beyond them a language model takes what `AutoModelForCausalLM.from_pretrained` takes, a drafter that
                `hsdraft train` made fields of its configuration, and a P-EAGLE drafter `mask_token_id`, where its files
                do not name it.

        Raises:
            OSError: there is no such folder or repository, or it holds no configuration.
            TypeError: an argument is unknown. The message names it.
            ValueError: it is of no family and of no format that is known, or its files contradict each other.
        """
        return load_by_config(pretrained_model_name_or_path, *args, **kwargs)
