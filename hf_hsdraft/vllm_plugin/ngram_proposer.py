"""N-grams of the current text as a proposer for vLLM (method `custom_class`). Does not import vLLM.

vLLM gives a proposer the tokens of each row, but not the row's request, and rows move when requests end. So tables are
matched to rows by their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.tuning import NGRAM_DEPTH
from ..drafters.lookup.ngrams import NgramCache

_LENGTH = 4  # of the longest leader, as `ngram_length` is by default
# Maximum total length of kept texts without new tokens. Tables take about 0.9 KB per token.
_WAITING_TOKENS = 2**16


@dataclass
class _Text:
    tokens: np.ndarray
    cache: NgramCache

    def begins(self, tokens: np.ndarray) -> bool:
        """Whether this text is a prefix of the tokens."""
        count = len(self.tokens)
        if count > len(tokens) or (count and self.tokens[-1] != tokens[count - 1]):  # rejects most others quickly
            return False
        return bool(np.array_equal(self.tokens, tokens[:count]))


class NgramProposer:
    """Drafts chains by the n-grams of each text ("Cacheback", section 3), as `CachebackDrafter` with `beam_width=1`.

    Usage:

        LLM(model, speculative_config={
            "method": "custom_class",
            "model": "hf_hsdraft.vllm_plugin.ngram_proposer.NgramProposer",
            "num_speculative_tokens": 5,
        })
    """

    def __init__(self, vllm_config: Any) -> None:
        self._depth = min(vllm_config.speculative_config.num_speculative_tokens, NGRAM_DEPTH)
        self._longest = vllm_config.model_config.max_model_len
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._most = vllm_config.scheduler_config.max_num_seqs
        self._texts: list[_Text] = []  # most recently used first

    def load_model(self, target: Any) -> None:
        """Does nothing. vLLM's CPU runner calls it for every proposer."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns drafted tokens for each row; none for a row that is still reading its prompt.

        Args:
            sampled_token_ids: each row's new tokens in this step, empty while it reads its prompt.
            num_tokens_no_spec: `[rows]`, length of each text, this step's tokens included.
            token_ids_cpu: `[rows, max_model_len]`, the tokens.
            slot_mappings: unused.
        """
        waiting, used = self._texts, []
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            if not sampled or length >= self._longest:
                drafts.append([])
                continue
            tokens = token_ids_cpu[row, :length].copy()
            text = self._text_of(tokens, waiting)
            used.append(text)
            depth = min(self._depth, self._longest - length)
            known = text.cache.last == tokens[-1]  # false for an id beyond the vocabulary
            drafts.append(list(text.cache.draft(depth, depth, width=1).tokens[1:]) if known else [])
        self._texts = [*used, *self._kept(waiting)]
        return drafts

    def _kept(self, waiting: list[_Text]) -> list[_Text]:
        """The most recently used texts without new tokens, which have ended or wait to be scheduled."""
        kept, tokens = [], 0
        for text in waiting[: self._most]:
            tokens += len(text.tokens)
            if tokens > _WAITING_TOKENS:
                break
            kept.append(text)
        return kept

    def _text_of(self, tokens: np.ndarray, waiting: list[_Text]) -> _Text:
        """Takes the longest prefix of the tokens out of `waiting`, or starts a text, and extends its tables."""
        fitting = [text for text in waiting if text.begins(tokens)]
        text = max(fitting, key=lambda each: len(each.tokens), default=None)
        if text is None:
            text = _Text(tokens[:0], NgramCache(_LENGTH, vocab_size=self._vocab_size))
        else:
            waiting[:] = [each for each in waiting if each is not text]
        text.cache.extend(tokens[len(text.tokens) :].tolist())
        text.tokens = tokens
        return text
