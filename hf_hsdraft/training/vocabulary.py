"""The compressed draft vocabulary: the tokens the target actually writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .conversations import TokenizedConversation


@dataclass(frozen=True)
class DraftVocabulary:
    """Token ids a drafter can propose.

    Attributes:
        ids: ascending token ids.
        coverage: share of the counted answer tokens that are among them, 0 to 1.
    """

    ids: list[int]
    coverage: float


def choose_draft_vocabulary(
    conversations: Iterable[TokenizedConversation], vocab_size: int, draft_vocab_size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """Picks the most frequent answer tokens (Lyanna, compressed vocabulary; FR-Spec).

    Args:
        always: ids included whatever their count, such as the end-of-turn token.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for conversation in conversations:
        counts += torch.bincount(conversation.input_ids[conversation.answer_mask], minlength=vocab_size)
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(torch.long).max
    ids = ranked.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
    return DraftVocabulary(ids.tolist(), float(counts[ids].sum() / counts.sum().clamp(min=1)))
