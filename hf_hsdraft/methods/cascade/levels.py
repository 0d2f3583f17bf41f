"""What a cascade requires of its levels beyond the drafter protocol, and how their language models read chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.tensors import embedded_tokens, shared_length
from ...drafters.base.protocol import Accepted, Drafter
from ...runtime.target_limits import furthest_position, text_config
from ..language_model.lm_drafter import CausalLMDrafter
from ..language_model.lm_texts import LMTexts, ability_of, groups_of_rows, kind_of
from .supposing import SupposingSession


class LMReader:
    """Reads texts and the drafts after them with a language model, so that the drafts can be verified.

    Args:
        most_pending: greatest number of tokens of a text that may be taken back.
        taps: indices of hidden states to return too.

    `vocab_size` is the number of tokens that the model knows, `room` the number that it has positions for, `kind` a
    hashable key of the time of its forwards.
    """

    def __init__(self, model: Any, rows: int, most_pending: int, taps: Sequence[int] = ()) -> None:
        kinds = ability_of(model).kinds  # empty if it reads one text at a time
        config = text_config(model)
        self.vocab_size = min(config.vocab_size, embedded_tokens(model))
        self.kind = kind_of(model)
        self._groups = [LMTexts(model, group, kinds, most_pending) for group in groups_of_rows(rows, kinds)]
        self._known: dict[int, list[int]] = {row: [] for row in range(rows)}
        self._taps = taps
        self._states: dict[int, list[torch.Tensor]] = {row: [] for row in range(rows)}  # at the tokens known
        self.room = furthest_position(model)
        self._model = model  # the texts do not keep it alive

    def read(self, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Returns logits `[n, V]` after the last n tokens of each text, in one forward if the model can.

        Texts include drafted tokens; `counts` holds n, at least 1. Cached tokens that match a text are not read
        again; the others are taken back.
        """
        logits: dict[int, torch.Tensor] = {}
        for group in self._groups:
            if any(row in texts for row in group.rows):
                logits.update(self._of_group(group, texts, counts))
        return logits

    def _of_group(
        self, group: LMTexts, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        wanted = [texts.get(row) for row in group.rows]
        group.take_back(wanted, [counts.get(row, 0) for row in group.rows])
        lengths = group.kept
        new = [[] if text is None else text[length:] for text, length in zip(wanted, lengths, strict=True)]
        output = group.read_states(new, max(counts[row] for row in group.rows if row in texts), self._taps)
        self._known.update({row: list(texts[row]) for row in group.rows if row in texts})
        if self._taps:
            for row, length, tokens, states in zip(group.rows, lengths, new, output.taps, strict=True):
                self._states[row][length:] = states[len(states) - len(tokens) :]
        return {row: output.logits[place, -counts[row] :] for place, row in enumerate(group.rows) if row in texts}

    def states(self, row: int, text: Sequence[int]) -> Sequence[torch.Tensor]:
        """Returns hidden states `[taps * D]` at the first tokens of a text, as far as they have been read."""
        return self._states[row][: shared_length(self._known[row], text)]

    def keep(self, rows: Sequence[int]) -> None:
        for group in self._groups:
            group.keep(rows)
        self._groups = [group for group in self._groups if group.rows]


def model_of(drafter: Drafter) -> Any:
    """Returns the language model that a drafter verifies with, or None."""
    return drafter.model if isinstance(drafter, CausalLMDrafter) else None


class StateFeed:
    """Feeds the session below a middle model; `reader` has the taps of that session's drafter."""

    def __init__(self, lower: SupposingSession, reader: LMReader) -> None:
        self._lower, self._reader = lower, reader
        self._told: dict[int, int] = {}  # positions of each text that the session has observed

    def tell(self, row: int, settled: Sequence[int], held: Sequence[int]) -> bool:
        """Feeds the session a text; returns whether it knows all of it, so that it can draft.

        With tokens x_i, the model's state h_i goes with x_{i+1}. Pairs within `settled`, which the target has
        accepted, are observed; those with `held` tokens are supposed.
        """
        text = [*settled, *held]
        states = self._reader.states(row, text)[: len(text) - 1]
        told, sure = self._told.get(row, 0), min(len(states), len(settled) - 1)
        if told < sure:
            self._lower.observe([_news(row, text, states, told, sure)])
            self._told[row] = sure
        if len(states) > sure:
            self._lower.suppose([_news(row, text, states, sure, len(states))])
        else:
            self._lower.suppose([Accepted.of_tokens(row, [])])
        return len(states) == len(text) - 1


def _news(row: int, text: Sequence[int], states: Sequence[torch.Tensor], begin: int, end: int) -> Accepted:
    following = list(text[begin + 1 : end + 1])
    earlier = text[:1] if begin == 0 else ()
    taps, places = torch.stack(list(states[begin:end])), torch.arange(begin, end)
    return Accepted(row, following, taps, places, torch.tensor(following), earlier)
