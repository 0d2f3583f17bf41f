"""Whose time it is: seconds by part of a program, told by the functions that run. Nothing is put in their place."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from .machine import synchronise


class Attribution:
    """Seconds by part. Of functions within functions only the innermost counts, so no time is counted twice.

    The interpreter tells of every Python function that begins and ends. That takes time of its own, in parts of many
    small functions most. Within a leaf it is not asked, so a leaf takes as long as ever.

    Args:
        device: waited for whenever a part begins or ends.
        functions: those of each part.
        leaf: a part, and the module whose forward it is.
        outermost: a part, and its function. The part is given what no other part takes of the function's time; what
            runs outside the function is not counted.

    Attributes:
        seconds: by part; total: of the outermost function, all parts together.
    """

    def __init__(
        self,
        device: torch.device,
        functions: Mapping[str, Sequence[Callable[..., Any]]],
        leaf: tuple[str, nn.Module],
        outermost: tuple[str, Callable[..., Any]],
    ) -> None:
        (self._leaf, self._module), (self._outermost, function) = leaf, outermost
        self._parts: dict[CodeType, str] = {_code(each): part for part, those in functions.items() for each in those}
        self._parts[_code(function)] = self._outermost
        self.seconds = dict.fromkeys([*functions, self._leaf, self._outermost], 0.0)
        self._device = device
        self._open: list[str] = []
        self._last = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within, the functions that this thread runs are counted."""
        before = sys.getprofile()
        hooks = [
            self._module.register_forward_pre_hook(self._leaf_begins),
            self._module.register_forward_hook(self._leaf_ends, always_call=True),
        ]
        sys.setprofile(self._told)
        try:
            yield
        finally:
            sys.setprofile(before)
            for hook in hooks:
                hook.remove()

    def _told(self, frame: FrameType, event: str, argument: Any) -> None:
        part = self._parts.get(frame.f_code)
        if part is None:
            return
        if event == "call":
            self._enter(part)
        elif event == "return":  # also by an exception
            self._leave()

    def _leaf_begins(self, *_: Any) -> None:
        sys.setprofile(None)
        self._enter(self._leaf)

    def _leaf_ends(self, *_: Any) -> None:
        self._leave()
        sys.setprofile(self._told)

    def _now(self) -> float:
        synchronise(self._device)
        return time.perf_counter()

    def _enter(self, part: str) -> None:
        if not self._open and part != self._outermost:  # not in a round: the prompt's forward
            return
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._open.append(part)
        self._last = now

    def _leave(self) -> None:
        if not self._open:
            return
        now = self._now()
        self.seconds[self._open.pop()] += now - self._last
        self._last = now


def _code(function: Any) -> CodeType:
    return inspect.unwrap(function).__code__
