"""The compressed draft vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...drafters.base.draft_options import leave_folder
from .conversations import TokenizedConversation

# Relative gain in tokens per round for a relative gain in coverage. If each depth is right with probability a, a round
# emits 1 / (1 - a) tokens in the long run, and this is a / (1 - a): 1.5 for a = 0.6.
_GAIN = 1.5


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a drafter can propose, ascending, and the share of all answer tokens that they cover, 0 to 1."""

    ids: list[int]
    coverage: float


def choose_draft_vocabulary(
    conversations: Iterable[TokenizedConversation], vocab_size: int, draft_vocab_size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """Picks the `draft_vocab_size` most frequent answer tokens (Lyanna, compressed vocabulary; FR-Spec).

    Ids in `always`, such as the end of a turn, are picked however rare they are.
    """
    counts = answer_counts(conversations, vocab_size)
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(torch.long).max
    ids = ranked.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
    return DraftVocabulary(ids.tolist(), float(counts[ids].sum() / counts.sum().clamp(min=1)))


def paying_size(conversations: Sequence[TokenizedConversation], vocab_size: int, column_cost: float) -> int:
    """Returns the size of a draft vocabulary that promises most tokens per second, 1 to `vocab_size`.

    A token's logit costs `column_cost`, see `TrainableFamily.column_cost`. A drafted token outside the vocabulary is
    wrong. Each half of the conversations ranks tokens for the other half, on which coverage is measured. Tokens that
    neither has are ranked by their ids, which tokenizers give by frequency.
    """
    halves = [answer_counts(conversations[start::2], vocab_size) for start in (0, 1)]
    covered = torch.zeros(vocab_size, dtype=torch.float64)
    for ranking, counts in zip(halves, reversed(halves), strict=True):
        covered += counts[ranking.argsort(descending=True, stable=True)].cumsum(0)
    return best_size(covered, column_cost)


def best_size(covered: torch.Tensor, column_cost: float) -> int:
    """`covered` are the tokens `[V]` that the first 1, 2, ... tokens of the vocabulary cover."""
    coverage = covered / covered[-1].clamp(min=1e-9)
    return int((_GAIN * coverage.log() - column_cost * torch.arange(1, len(coverage) + 1)).argmax()) + 1


def answer_counts(conversations: Iterable[TokenizedConversation], vocab_size: int) -> torch.Tensor:
    """Counts each token in the answers: `[V]`, int64."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for conversation in conversations:
        counts += torch.bincount(conversation.input_ids[conversation.answer_mask], minlength=vocab_size)
    return counts


@torch.no_grad()
def with_draft_vocabulary(drafter: Any, ids: Sequence[int], output_rows: torch.Tensor) -> Any:
    """Returns a copy of a drafter with the draft vocabulary `ids`, ascending, which keeps what the drafter has learned.

    Rows of known tokens are kept. Rows of new tokens are predicted from the target's output rows `[V, D]`, by the
    linear map that fits the known tokens best.
    """
    old_ids, new_ids = drafter.draft_vocab_ids(), torch.tensor(ids)
    fields = drafter.config.to_dict() | {"draft_vocab_ids": list(ids), "draft_vocab_size": len(ids)}
    changed = type(drafter)(type(drafter.config).from_dict(fields)).to(drafter.device, drafter.dtype)
    changed.generation_config = copy.deepcopy(drafter.generation_config)
    leave_folder(changed)  # it belongs to the old vocabulary
    place = torch.full((drafter.config.vocab_size,), -1)
    place[old_ids] = torch.arange(len(old_ids))
    place = place[new_ids]
    rows = output_rows.detach().cpu().float()
    weights = drafter.state_dict()
    for name in ("injector.up.weight", "lm_head.weight"):
        if name in weights:
            old = weights[name].cpu().float()
            guessed = rows[new_ids] @ torch.linalg.lstsq(rows[old_ids], old, driver="gelsd").solution
            weights[name] = torch.where((place >= 0)[:, None], old[place], guessed).to(drafter.dtype)
    changed.load_state_dict(weights)
    return changed
