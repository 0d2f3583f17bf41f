"""What a cascade asks of its levels beyond what every drafter can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ...core.draft_tree import DraftTree
from ...drafters.base.protocol import Accepted, Ask, Drafter
from ...drafters.language_model.lm_trial import ability_of
from .lm_reader import LMReader


@runtime_checkable
class Supposing(Protocol):
    """A drafter whose sessions may be able to take back what they were told.

    Attributes:
        supposes: whether they are: [`HSDrafter`] needs a wide window for it.
    """

    supposes: bool


@runtime_checkable
class Settling(Protocol):
    """A drafter with options that need drafts of a text that stays.

    Attributes:
        settled_options: names of those of its `own_options` that keep their defaults where tokens are taken back.
    """

    settled_options: Sequence[str]


@runtime_checkable
class SupposingSession(Protocol):
    """A session of a drafter that supposes."""

    kind: tuple[Any, ...]

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]: ...

    def observe(self, news: Sequence[Accepted]) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def suppose(self, news: Sequence[Accepted]) -> None:
        """Goes on from tokens that may be taken back: another model has chosen them, the target has not seen them.

        They stand after what was observed, and hold until the next news of the same text, supposed or observed. A
        session that reads hidden states gets those of the supposed tokens too, and has to get them before each draft.
        """


@runtime_checkable
class Verifying(Protocol):
    """A drafter with a language model, by which it can verify the drafts of another drafter."""

    @property
    def verifying_model(self) -> Any: ...


def supposes(drafter: Drafter) -> bool:
    """Whether the sessions of a drafter can take back what they were told."""
    return isinstance(drafter, Supposing) and drafter.supposes


def model_of(drafter: Drafter) -> Any:
    """Returns the language model by which a drafter verifies; `None` if it has none."""
    return drafter.verifying_model if isinstance(drafter, Verifying) else None


def reader_of(drafter: Drafter, rows: int, most_pending: int, taps: Sequence[int] = ()) -> LMReader:
    """Returns what reads texts by a drafter's language model; see `LMReader`."""
    model = model_of(drafter)
    return LMReader(model, rows, ability_of(model).kinds, most_pending, taps)
