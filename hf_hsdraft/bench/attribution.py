"""Attributes time to parts of a program. The interpreter reports which functions run; none of them is replaced."""

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
    """Counts the seconds of each part of a program.

    Where functions call one another, only the innermost counts, so no time is counted twice. The interpreter
    reports the start and end of every Python function, which itself takes time, most of all in parts with many
    small functions. There are no reports within the `leaf`, a part and the module whose forward it is, so it takes
    no longer than usual. `outermost` is a part and its function: it gets the function's time that no other part
    takes, and time outside the function is not counted. The device is synchronised whenever a part begins or ends.
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
        self._open: list[str] = []  # the parts that have begun, the innermost last
        self._last = 0.0  # time when the last part began or ended

    @property
    def total(self) -> float:
        """Seconds of the outermost function: the sum of all parts."""
        return sum(self.seconds.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the functions that this thread runs within the context."""
        before = sys.getprofile()
        hooks = [
            self._module.register_forward_pre_hook(self._leaf_begins),
            self._module.register_forward_hook(self._leaf_ends, always_call=True),
        ]
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)
            for hook in hooks:
                hook.remove()

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        part = self._parts.get(frame.f_code)
        if part is None:
            return
        if event == "call":
            self._enter(part)
        elif event == "return":  # an exception is reported as a return too
            self._leave()

    def _leaf_begins(self, *_: Any) -> None:
        sys.setprofile(None)
        self._enter(self._leaf)

    def _leaf_ends(self, *_: Any) -> None:
        self._leave()
        sys.setprofile(self._on_event)

    def _now(self) -> float:
        synchronise(self._device)
        return time.perf_counter()

    def _enter(self, part: str) -> None:
        if not self._open and part != self._outermost:  # outside the outermost function
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
