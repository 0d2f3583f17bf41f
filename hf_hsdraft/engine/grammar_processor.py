"""A grammar that constrains one text: xgrammar's logits processor as a function of the text.

`xgrammar.contrib.hf.LogitsProcessor` keeps a matcher for each row, and takes the last token of each text at each call.
A draft tree has several texts, and the rows of a batch advance at different times. So here the matcher moves to the
text in question: it rolls back to the shared prefix and advances from there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..core.draft_tree import DraftTree


class GrammarProcessor:
    """The grammar of text `row`. Masks tokens as xgrammar's `processor` does, and leaves that processor unchanged."""

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
            pairs = enumerate(zip(tokens, self._read, strict=False))
            shared = next((place for place, (new, old) in pairs if new != old), len(tokens))
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
