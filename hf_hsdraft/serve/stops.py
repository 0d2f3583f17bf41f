"""Stop strings as OpenAI's servers treat them: decoding ends with the first one, and the answer ends before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the first stop string in a text begins; `None` if there is none."""
    return min((place for place in map(text.find, stops) if place >= 0), default=None)


def cut(text: str, stops: Sequence[str]) -> str:
    """Returns a text up to its first stop string."""
    return text[: first_stop(text, stops)]


class StopWatch:
    """Tells whether the new tokens of a text hold a stop string; special tokens may be part of one."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        # A token holds a byte or more, a special one none, and the first may be the end of a character.
        self._reach = max((len(stop.encode()) for stop in stops), default=0) + 16

    def reached(self, ids: Sequence[int]) -> bool:
        """Returns whether the new tokens `ids` of a text, which held no stop string before the last, hold one."""
        tail = ids[-self._reach :]
        return bool(self._stops) and any(
            first_stop(self._tokenizer.decode(tail, skip_special_tokens=skip), self._stops) is not None
            for skip in (True, False)
        )


class CutStream:
    """A `DecodeStream` that holds back what may become a stop string, and ends before the first one."""

    def __init__(self, stream: Any, stops: Sequence[str]) -> None:
        self._stream, self._stops = stream, stops
        self._held, self._ended = "", False

    def step(self, tokenizer: Any, token: int) -> str | None:
        """Returns the text that can be shown after one more token; `None` for none."""
        piece = self._stream.step(tokenizer, token)
        if piece is None or self._ended:
            return None
        text = self._held + piece
        place = first_stop(text, self._stops)
        self._ended = place is not None
        shown = len(text) - self._possible(text) if place is None else place
        self._held = "" if self._ended else text[shown:]
        return text[:shown] or None

    def rest(self) -> str:
        """Returns what is held back once the text has ended."""
        return self._held

    def _possible(self, text: str) -> int:
        """Length of the longest end of a text that a stop string begins with."""
        longest = min(max(map(len, self._stops), default=0) - 1, len(text))
        ends = (length for length in range(longest, 0, -1) if text.endswith(tuple(s[:length] for s in self._stops)))
        return next(ends, 0)


class CutTokenizer:
    """Stands in for a tokenizer: answers that it decodes or parses end before the first stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._real, self._stops = tokenizer, stops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return cut(self._real.decode(*args, **kwargs), self._stops)

    def parse_response(self, response: Any, *args: Any, **kwargs: Any) -> Any:
        return self._real.parse_response(cut(self._real.decode(response), self._stops), *args, **kwargs)
