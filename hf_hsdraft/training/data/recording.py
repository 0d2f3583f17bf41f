"""Hidden states that the target computes while it answers, kept so that nothing is read again for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ...core.draft_tree import DraftTree
from ...drafters.base.draft_options import default_options
from ...drafters.base.protocol import Accepted, Ask, Call, Drafter, Session
from ...drafters.lookup.cacheback import CachebackConfig
from ...runtime.target_loading import is_sharded


class TapRecorder(Drafter):
    """An assistant that drafts nothing, and keeps the tapped hidden states of each row of the last call.

    Rows that have ended leave the batch, and compiled layers serve it, as in any drafted call.

    Args:
        taps: indices into `hidden_states`, ascending.

    """

    num_draft_steps = 1

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps, self.config = tuple(taps), CachebackConfig()
        self.generation_config = self.default_generation_config()
        self._session: _Recording | None = None

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.num_draft_steps, tree_size=1, beam_width=1)

    def session(self, call: Call) -> Session:
        self._session = _Recording(call.rows)
        return self._session

    def taken(self) -> list[torch.Tensor]:
        """Returns what the last call read, and forgets it: of each row `[n, taps * D]`, padding left out.

        The list is empty where nothing was recorded.
        """
        session, self._session = self._session, None
        if session is None or not all(session.news):
            return []
        taken: list[torch.Tensor] = []
        while session.news:  # each row's news is dropped once it is joined
            taken.append(torch.cat([each.taps for each in session.news.pop()]))
        return taken[::-1]


class _Recording(Session):
    free, listens = True, True  # it observes each round at once, whatever can be drafted
    takes_ngrams = False

    def __init__(self, rows: int) -> None:
        self.news: list[list[Accepted]] = [[] for _ in range(rows)]

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [DraftTree.root(ask.root) for ask in asks]

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self.news[each.row].append(each)


def can_record(target: Any) -> bool:
    """Whether recording saves time: on CPUs, where reading a text again takes as long as writing it."""
    return bool(target.device.type == "cpu" and not hasattr(target, "hf_device_map") and not is_sharded(target))
