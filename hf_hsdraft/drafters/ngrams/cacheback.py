"""A drafter without a network, which drafts by n-grams of the running text and of other texts ("Cacheback")."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import GenerationConfig

from ...common.checks import is_integer
from ...common.refusals import DraftingRefused
from ...common.tuning import TUNING
from ...repository.care import care
from ...repository.drafter_files import (
    CONFIG,
    FORMAT_VERSION,
    HUB_ARGUMENTS,
    OPTIONS,
    check_is_drafter,
    find_folder,
    read_json,
)
from ...repository.pretrained_drafter import stored_options
from ...repository.publication import complete_folder
from ...target.target_limits import text_config
from ..draft_options import MOST_LEADING, default_options
from ..protocol import DraftCall, Drafter
from ..special_tokens import ANY, AnySpecialTokens
from .ngram_cache import FollowerTable, NgramCache
from .ngram_session import NgramSession

_OPTIONS = (
    "assistant_confidence_threshold",
    "beam_width",
    "depth_cost",
    "node_cost",
    "num_assistant_tokens",
    "packed_weights",
    "tree_size",
    "tree_sizing",
)


@dataclass(frozen=True)
class CachebackConfig:
    """What transformers asks an assistant's configuration for."""

    model_type: ClassVar[str] = "cacheback"

    vocab_size: Any = ANY  # equal to the vocabulary size of any target

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> AnySpecialTokens:
        """Returns a configuration that a pipeline finds equal to any target's."""
        return AnySpecialTokens(self)


class CachebackDrafter(Drafter):
    """Training-free drafting by n-grams, for any target ("Cacheback": tables of leaders and their followers).

        out = model.generate(**inputs, assistant_model=CachebackDrafter())

    It is exact, as every drafter here is. It is quick where a text repeats itself or its prompt, as summaries,
    extraction and code do. Elsewhere it drafts little and costs little.

    Args:
        texts: token ids of texts like those to come. Their n-grams are asked where the running text has none.
        ngram_length: number of tokens of the longest leader, 1 to 16.
        options: drafting options: `tree_size`, `beam_width` (1 drafts a chain), `num_assistant_tokens`, `tree_sizing`,
            `node_cost` and `depth_cost`, `assistant_confidence_threshold`, `packed_weights`.

    Raises:
        ValueError: `ngram_length` is out of range, or an option is unknown.
    """

    num_draft_steps = TUNING.ngram_depth
    least_ngram_length = 1
    supposes = True
    why_not_exported = "it has no weights: other programs look n-grams up by methods of their own"

    def __init__(self, texts: Sequence[Sequence[int]] = (), ngram_length: int = 4, **options: Any) -> None:
        if not is_integer(ngram_length) or not 1 <= ngram_length <= MOST_LEADING:
            raise ValueError(
                f"ngram_length={ngram_length!r} is invalid: expected an integer from 1 to {MOST_LEADING}; without "
                "n-grams there is nothing to draft"
            )
        self.config = CachebackConfig()
        self.generation_config = self.default_generation_config()
        self.generation_config.ngram_length = ngram_length
        for name, value in options.items():
            if name not in _OPTIONS:
                raise ValueError(f"{name} is no option of a CachebackDrafter: expected one of {', '.join(_OPTIONS)}")
            setattr(self.generation_config, name, value)
        self.texts = [[int(token) for token in text] for text in texts]
        self.frozen: list[FollowerTable] = _tables_of(self.texts, ngram_length) if self.texts else []
        self.most_token = max((max(text) for text in self.texts if text), default=-1)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> CachebackDrafter:
        """Loads what `save_pretrained` wrote.

        Args:
            pretrained_model_name_or_path: Folder or Hub name.
            kwargs: `revision`, `subfolder` and what else the Hub is asked with; options. A `dtype` means nothing here.

        Raises:
            OSError: There is no such folder or repository.
            ValueError: It holds something else, or an option is wrong.
        """
        hub = {name: value for name in HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
        name, subfolder = pretrained_model_name_or_path, kwargs.pop("subfolder", None) or ""
        kwargs.pop("dtype", None)
        with care().loading(name, bool(hub.get("local_files_only"))):
            folder = find_folder(name, (CONFIG, OPTIONS), subfolder, **hub)
            check_is_drafter(folder, CachebackConfig.model_type)
            texts = read_json(folder / CONFIG).get("texts", [])
            options = stored_options(folder / OPTIONS)
        if not isinstance(texts, list) or not all(
            isinstance(text, list) and all(map(is_integer, text)) for text in texts
        ):
            raise ValueError(f"{folder / CONFIG} is damaged: expected lists of token ids as texts")
        length = kwargs.pop("ngram_length", options.pop("ngram_length", 4))
        drafter = cls(texts, length, **kwargs)
        for option, value in options.items():
            if option not in kwargs:
                setattr(drafter.generation_config, option, value)
        return drafter

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Writes options, texts and a card into a folder; there are no weights.

        Args:
            save_directory: Created if missing.
            kwargs: As every model of transformers takes them; they mean nothing here.

        Raises:
            ValueError: A drafting option is wrong.
        """
        self.check_options()
        folder = Path(save_directory)
        document = {"model_type": CachebackConfig.model_type, "format_version": FORMAT_VERSION, "texts": self.texts}
        with complete_folder(folder) as partial:
            (partial / CONFIG).write_text(json.dumps(document) + "\n", encoding="utf-8")
            self.generation_config.save_pretrained(partial)
            care().write_card(partial, folder.resolve().name)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Sends what `save_pretrained` writes to the Hub; see [`RepositoryCare`] for arguments and errors."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return care().push(Path(folder), repo_id, **kwargs)

    def default_generation_config(self) -> GenerationConfig:
        """Returns the drafting options. `beam_width=1` drafts a chain; other options of a beam have no effect."""
        return default_options(TUNING.ngram_depth, tree_size=24, beam_width=24)

    def check(self, target: Any) -> None:
        vocab_size = text_config(target).vocab_size
        if self.most_token >= vocab_size:
            raise DraftingRefused(
                f"the texts of this CachebackDrafter hold token {self.most_token}, the target's vocabulary has only "
                f"{vocab_size}: they have to be encoded by the target's tokenizer"
            )

    def session(self, call: DraftCall) -> NgramSession:
        return NgramSession(call, self.frozen)


def _tables_of(texts: Sequence[Sequence[int]], length: int) -> list[FollowerTable]:
    """Returns the tables of some texts, for leaders of up to `length` tokens. No n-gram goes over the end of a text."""
    cache = NgramCache(length)
    for text in texts:
        cache.extend([*text, -1])
    return cache.own
