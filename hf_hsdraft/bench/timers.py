"""Timers around functions that exist already, for as long as somebody looks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .machine import synchronise


class Timers:
    """Seconds by part. Of functions within functions only the innermost runs, so nothing is counted twice.

    Args:
        parts: all there are; outermost: the one whose function is a round; it is given what no other part takes of one.
    """

    def __init__(self, device: torch.device, parts: Sequence[str], outermost: str) -> None:
        self.seconds = dict.fromkeys(parts, 0.0)
        self._outermost = outermost
        self.rounds = 0
        self.total = 0.0
        self._device = device
        self._open: list[str] = []
        self._last = self._begin = 0.0

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._open and part != self._outermost:  # not in a round: the prompt's forward
                return function(*args, **kwargs)
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def _now(self) -> float:
        synchronise(self._device)
        return time.perf_counter()

    def _enter(self, part: str) -> None:
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        else:
            self._begin = now
        self._open.append(part)
        self._last = now

    def _leave(self) -> None:
        now = self._now()
        self.seconds[self._open.pop()] += now - self._last
        self._last = now
        if not self._open:
            self.rounds += 1
            self.total += now - self._begin


@contextmanager
def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Within, `owner.name` is what `change` makes of it; a class, a module or a single object may own it.

    Raises:
        AttributeError: there is no such function.
    """
    own = vars(owner).get(name)
    present = getattr(owner, name)  # bound, if it is a class method
    changed = change(present)
    setattr(owner, name, staticmethod(changed) if isinstance(own, classmethod | staticmethod) else changed)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
