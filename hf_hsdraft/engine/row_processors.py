"""Logits processors of a batch whose rows are at different lengths.

Plain decoding calls a processor with all rows at once. With a drafter rows reach their next tokens at different times,
so each is processed as a batch of one: ids `[1, L]`, scores `[1, V]`. The result is that of plain decoding if the
processor treats each row alone. For the library's classes that is known here; for others the caller has to declare it.

A processor may have a method `prune(input_ids, tree)` that takes nodes which it would forbid out of a draft tree, so
that they are not verified in vain. Only the scores decide what is emitted.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ..core.draft_tree import DraftTree
from ..core.refusals import DraftingRefused
from ..core.tensors import shared_length


class GrammarProcessor:
    """The grammar of text `row`. Masks tokens as xgrammar's `processor` does, and leaves that processor unchanged.

    `xgrammar.contrib.hf.LogitsProcessor` keeps a matcher for each row, and takes the last token of each text at each
    call. A draft tree has several texts, and the rows of a batch advance at different times. So here the matcher moves
    to the text in question: it rolls back to the shared prefix and advances from there.
    """

    def __init__(self, processor: Any, row: int) -> None:
        self._xgrammar = sys.modules["xgrammar"]
        grammars = processor.compiled_grammars
        self._matcher = self._xgrammar.GrammarMatcher(grammars[row if len(grammars) > 1 else 0])
        self._mask = self._xgrammar.allocate_token_bitmask(1, processor.full_vocab_size)
        self._begin: int | None = None  # length of the prompt, which the grammar ignores
        self._read: list[int] = []  # the tokens that the matcher has taken

    @staticmethod
    def takes(processor: Any) -> bool:
        """Whether this is xgrammar's logits processor for transformers, found without importing xgrammar."""
        kind = type(processor)
        return (kind.__module__, kind.__name__) == ("xgrammar.contrib.hf", "LogitsProcessor")

    @staticmethod
    def check(processor: Any, rows: int) -> None:
        """Raises a ValueError if an xgrammar processor has grammars for another number of texts."""
        count = len(processor.compiled_grammars)
        if count not in (1, rows):
            raise ValueError(
                f"xgrammar's LogitsProcessor has {count} grammars and the batch {rows} texts: expected one grammar for "
                "all texts, or one for each"
            )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[1, V]` after a text `[1, L]`, minus infinity where the grammar forbids a token. Writes to `scores`.

        The first text is the prompt. Raises a ValueError if the grammar forbids a token of the text.
        """
        self._go_to(input_ids)
        if self._matcher.is_terminated():  # no new mask: like xgrammar, keep the last one
            last = self._read[-1]
            self._matcher.rollback(1)
            self._matcher.fill_next_token_bitmask(self._mask, 0)
            self._matcher.accept_token(last)
        else:
            self._matcher.fill_next_token_bitmask(self._mask, 0)
        masked = scores if scores.device.type == "cuda" else scores.cpu()
        self._xgrammar.apply_token_bitmask_inplace(masked, self._mask.to(masked.device))
        return masked.to(scores.device)

    def prune(self, input_ids: torch.Tensor, tree: DraftTree) -> DraftTree:
        """The tree without nodes that the grammar forbids after a text `[1, L]` and their path.

        Nothing follows the end of a text. A text beyond the grammar's end is no longer constrained.
        """
        self._go_to(input_ids)
        if len(tree) == 1 or self._matcher.is_terminated():
            return tree
        children = tree.children()
        kept = {0}

        def visit(node: int) -> None:
            for token, child in children[node].items():
                if not self._matcher.is_terminated() and self._matcher.accept_token(token):
                    kept.add(child)
                    visit(child)
                    self._matcher.rollback(1)

        visit(0)
        return tree if len(kept) == len(tree) else tree.part(kept)

    def _go_to(self, input_ids: torch.Tensor) -> None:
        """Moves the matcher to a text `[1, L]`."""
        if self._begin is None:
            self._begin = input_ids.shape[1]
        tokens = input_ids[0, self._begin :].tolist()
        shared = len(self._read)
        if tokens[:shared] != self._read:
            shared = shared_length(tokens, self._read)
            self._matcher.rollback(len(self._read) - shared)
            del self._read[shared:]
        for token in tokens[shared:]:
            if self._matcher.is_terminated():
                return
            if not self._matcher.accept_token(token):
                raise ValueError(
                    f"the text holds token {token} where the grammar forbids it: another logits processor puts it there"
                )
            self._read.append(token)


class _LeastLength:
    """As a processor of the library that forbids an end before some length, without a mask of the whole vocabulary."""

    def __init__(self, processor: Any) -> None:
        new = type(processor) is logits_process.MinNewTokensLengthLogitsProcessor
        self._least = processor.prompt_length_to_skip + processor.min_new_tokens if new else processor.min_length
        self._ends: torch.Tensor = processor.eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[-1] >= self._least:
            return scores
        ends = self._ends.to(scores.device)
        return scores.index_fill(1, ends[(ends >= 0) & (ends < scores.shape[-1])], -torch.inf)


def _of_library(*names: str) -> tuple[type, ...]:
    """Classes of the library by name, as far as the installed version has them."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# These treat each row alone, and keep no state between calls.
_ROW_WISE = _of_library(
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "WatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
)
# These do so too, but hold data for each row in the field named here.
_HOLDS_ROWS = {
    logits_process.EncoderNoRepeatNGramLogitsProcessor: "generated_ngrams",
    logits_process.EncoderRepetitionPenaltyLogitsProcessor: "encoder_input_ids",
    logits_process.RepetitionPenaltyLogitsProcessor: "prompt_ignore_length",  # a tensor where prompts are padded
}
# Reads only the scores of the first new token, for all rows at once; later it returns scores unchanged.
_READS_THE_START = _of_library("WhisperNoSpeechDetection")
# These keep a state of all rows at the same length.
_NOT_IN_BATCHES = _of_library("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


def check_processors(processors: LogitsProcessorList, rows: int) -> None:
    """Raises a DraftingRefused if one of these processors cannot process single rows of a batch.

    Raises a ValueError for one made for another number of rows: such a call fails without a drafter too.
    """
    for one in processors:
        if GrammarProcessor.takes(one):
            GrammarProcessor.check(one, rows)
        elif rows > 1:
            _check_row_wise(one)


def _check_row_wise(processor: Any) -> None:
    name = type(processor).__name__
    if isinstance(processor, _NOT_IN_BATCHES):
        raise DraftingRefused(
            f"{name} keeps a state that the rows of a batch share, and with a drafter the rows are at different "
            f"lengths; call generate() for each prompt, or {DraftingRefused.PLAINLY}"
        )
    if not is_row_wise(processor):
        raise DraftingRefused(
            f"{name} is not known to treat each row of a batch alone. With a drafter the rows are at different "
            "lengths, so each row is processed as a batch of one (input_ids [1, L], scores [1, V]). If the result "
            "is the same then, set row_wise = True on the processor or its class; otherwise call generate() for "
            f"each prompt, or {DraftingRefused.PLAINLY}"
        )


def is_row_wise(processor: Any) -> bool:
    """Whether a processor is known to treat each text alone, and to keep no state between calls."""
    if isinstance(processor, _NOT_IN_BATCHES):
        return False
    return GrammarProcessor.takes(processor) or _is_known(processor) or bool(getattr(processor, "row_wise", False))


def _is_known(processor: Any) -> bool:
    kind = type(processor)
    return kind in (*_ROW_WISE, *_HOLDS_ROWS, *_READS_THE_START, logits_process.PrefixConstrainedLogitsProcessor)


class RowProcessors:
    """The processors of a call for single rows: as `generate()` prepared them, accepted by `check_processors`."""

    def __init__(self, processors: LogitsProcessorList, rows: int) -> None:
        self._all = processors
        self._of_rows = [LogitsProcessorList(_for_row(one, row, rows) for one in processors) for row in range(rows)]

    def __len__(self) -> int:
        return len(self._all)

    def __call__(self, row: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[1, V]` of one row after its text `[1, L]`. May write to `scores`."""
        return self._of_rows[row](ids, scores)

    def prune(self, row: int, ids: torch.Tensor, tree: DraftTree) -> DraftTree:
        """A row's draft tree after its text `[1, L]`, without nodes that a processor is known to forbid."""
        for one in self._of_rows[row]:
            if hasattr(one, "prune"):
                tree = one.prune(ids, tree)
        return tree

    def of_alike(self, rows: Sequence[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[n, V]` of rows after their texts `[n, L]` of equal length, as in plain decoding. May write to them.

        Processors that only the caller declares row-wise get single rows here too, as those with data for each row do
        where some rows are missing.
        """
        every = len(rows) == len(self._of_rows)
        for place, one in enumerate(self._all):
            if every if _holds_rows(one) else _is_known(one):
                scores = LogitsProcessorList([one])(ids, scores)
            else:
                singly = [LogitsProcessorList([self._of_rows[row][place]]) for row in rows]
                parts = zip(singly, ids.split(1), scores.split(1), strict=True)
                scores = torch.cat([process(*part) for process, *part in parts])
        return scores


def _holds_rows(processor: Any) -> bool:
    """Whether a known processor has data for each row of a batch."""
    kind = type(processor)
    if kind is logits_process.PrefixConstrainedLogitsProcessor or kind in _READS_THE_START:
        return True
    return kind in _HOLDS_ROWS and isinstance(getattr(processor, _HOLDS_ROWS[kind]), torch.Tensor | list)


def _for_row(processor: Any, row: int, rows: int) -> Any:
    """The processor for a batch of this row alone, with the row's part of its state."""
    if GrammarProcessor.takes(processor):
        return GrammarProcessor(processor, row)
    kind = type(processor)
    if kind in (logits_process.MinLengthLogitsProcessor, logits_process.MinNewTokensLengthLogitsProcessor):
        return _LeastLength(processor)
    if rows == 1:
        return processor
    if kind is logits_process.PrefixConstrainedLogitsProcessor:
        allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        return kind(lambda batch_id, ids: allowed(prompt, ids), num_beams=1)
    field = _HOLDS_ROWS.get(kind)
    held = None if field is None else getattr(processor, field)
    if field is None or not isinstance(held, torch.Tensor | list):
        return processor
    own = copy.copy(processor)
    place = row // max(rows // len(held), 1)  # several rows may share a prompt
    setattr(own, field, held[place : place + 1])
    if kind is logits_process.EncoderNoRepeatNGramLogitsProcessor:
        own.batch_size = 1
    return own
