"""A drafter without a network, based on n-grams of the current and other texts ("Cacheback")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers import GenerationConfig
from transformers.utils import logging

from ...core.checks import is_integer
from ...core.refusals import DraftingRefused
from ...core.tuning import NGRAM_DEPTH
from ...runtime.target_limits import text_config
from ..base.auto_drafter import Found, register_finder
from ..base.draft_options import default_options
from ..base.plain_config import AnyTarget
from ..base.protocol import Call
from ..base.registry import TREES, register_drafter
from ..base.saved_drafter import WeightlessDrafter, give_options
from .ngrams import NGRAM_LEADERS, FollowerTable, NgramCache, NgramSession

logger = logging.get_logger(__name__)

_MOST_TOKENS = NGRAM_LEADERS  # of `texts`


@dataclass(frozen=True)
class CachebackConfig(AnyTarget):
    model_type: ClassVar[str] = "cacheback"


class CachebackDrafter(WeightlessDrafter):
    """Training-free n-gram drafting for any target ("Cacheback": tables of leaders and followers).

        out = model.generate(**inputs, assistant_model=CachebackDrafter())

    Exact, as every drafter here. Fast if a text repeats itself or its prompt, as summaries, extraction and code do;
    otherwise it drafts little and costs little.

    Args:
        texts: token ids of similar texts. Their n-grams are consulted when the current text has no match. Of more than
            131,072 tokens the last are kept: a table holds as many n-grams.
        ngram_length: longest leader in tokens, 1 to 16.
        options: drafting options: `tree_size`, `beam_width` (1 drafts a chain), `num_assistant_tokens`, `tree_sizing`,
            `node_cost` and `depth_cost`, `assistant_confidence_threshold`, `packed_weights`,
            `compiled_layers`.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    config_class = CachebackConfig
    num_draft_steps = NGRAM_DEPTH
    least_ngram_length = 1

    def __init__(self, texts: Sequence[Sequence[int]] = (), ngram_length: int = 4, **options: Any) -> None:
        self.config = CachebackConfig()
        self.generation_config = self.default_generation_config()
        try:
            give_options(self, {}, {"ngram_length": ngram_length, **options})
        except TypeError as unknown:
            raise ValueError(str(unknown)) from None
        self.texts = [[int(token) for token in text] for text in _last(texts)]
        self.most_token = max((max(text) for text in self.texts if text), default=-1)

    @cached_property
    def frozen(self) -> list[FollowerTable]:
        """The tables of `texts`, made by the first call: a large one takes seconds."""
        if not self.texts:
            return []
        cache = NgramCache(self.generation_config.ngram_length)
        for text in self.texts:
            cache.extend([*text, -1], counted=False)  # which ends all n-grams
        return cache.own

    @classmethod
    def of_document(cls, document: Mapping[str, Any], where: Path) -> CachebackDrafter:
        texts = document.get("texts", [])
        lists = isinstance(texts, list) and all(isinstance(text, list) for text in texts)
        texts = _last(texts) if lists else [[None]]
        if not all(is_integer(token) for text in texts for token in text):
            raise ValueError(f"{where} is damaged: expected lists of token ids as texts")
        return cls(texts)

    def document(self) -> dict[str, Any]:
        return {"texts": self.texts}

    def default_generation_config(self) -> GenerationConfig:
        """`beam_width=1` drafts a chain; other beam options have no effect."""
        return default_options(NGRAM_DEPTH, tree_size=24, beam_width=24)

    def check(self, target: Any) -> None:
        vocab_size = text_config(target).vocab_size
        if self.most_token >= vocab_size:
            raise DraftingRefused(
                f"the texts of this CachebackDrafter hold token {self.most_token}, the target's vocabulary has only "
                f"{vocab_size}: they have to be encoded by the target's tokenizer"
            )

    def session(self, call: Call) -> NgramSession:
        return NgramSession(call, self.frozen)


def _last(texts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """The last `_MOST_TOKENS` tokens; a warning says what is left out."""
    texts = [text for text in texts if len(text)]
    left, count = _MOST_TOKENS, sum(map(len, texts))
    if count <= left:
        return texts
    logger.warning(f"of the {count:,} tokens of a CachebackDrafter's texts only the last {left:,} are used")
    kept = list[Sequence[int]]()
    for text in reversed(texts):
        kept.append(text[max(len(text) - left, 0) :])
        left -= len(kept[-1])
        if not left:
            break
    return kept[::-1]


register_drafter(CachebackConfig.model_type, CachebackConfig, CachebackDrafter)

_FOUND = Found(
    "n-grams",
    "CachebackDrafter",
    "for any target: repeats phrases of the text and its prompt",
    0,
    'model.generate(**inputs, assistant_model="ngrams")',
    trained=False,
    made=lambda target: CachebackDrafter(),
    drafts=f"{TREES}, without a forward",
)
register_finder("ngrams", lambda target, local_files_only: iter([_FOUND]))
