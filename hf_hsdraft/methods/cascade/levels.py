"""What a cascade requires of its levels beyond the drafter protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ...core.draft_tree import DraftTree
from ...drafters.base.protocol import Accepted, Ask, Drafter
from ...drafters.language_model.lm_ability import ability_of
from .lm_reader import LMReader


@runtime_checkable
class Supposing(Protocol):
    """A drafter whose sessions can take tokens back if `supposes`: [`HSDrafter`] needs a wide window for it."""

    supposes: bool


@runtime_checkable
class Settling(Protocol):
    """A drafter with `settled_options`: names in `own_options` that only work on text that is never taken back.

    They keep their defaults where tokens can be taken back.
    """

    settled_options: Sequence[str]


@runtime_checkable
class SupposingSession(Protocol):
    kind: tuple[Any, ...]

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]: ...

    def observe(self, news: Sequence[Accepted]) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def suppose(self, news: Sequence[Accepted]) -> None:
        """Continues from tokens that may be taken back: another model has chosen them, the target has not seen them.

        They follow what was observed, and hold until the next news of the same text, supposed or observed. A
        session that reads hidden states gets those of the supposed tokens too, and must get them before each draft.
        """


@runtime_checkable
class Verifying(Protocol):
    @property
    def verifying_model(self) -> Any: ...


def supposes(drafter: Drafter) -> bool:
    return isinstance(drafter, Supposing) and drafter.supposes


def model_of(drafter: Drafter) -> Any:
    """Returns the language model that a drafter verifies with, or None."""
    return drafter.verifying_model if isinstance(drafter, Verifying) else None


def reader_of(drafter: Drafter, rows: int, most_pending: int, taps: Sequence[int] = ()) -> LMReader:
    """Returns an `LMReader` of a drafter's language model; see there for arguments."""
    model = model_of(drafter)
    return LMReader(model, rows, ability_of(model).kinds, most_pending, taps)
