"""Connections of a device to one server, shared by calls on any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .link import Address, Link, LinkLost, ServerRefused
from .patience import Patience

_IDLE_LINKS = 4  # kept for later calls


class LinkPool:
    """Connections to a server; raises `LinkLost` or `ServerRefused` if it cannot connect.

    Args:
        patience: seconds to retry a lost connection or an overloaded server. The first connection retries only an
            overload: the address may be wrong.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, address: Address, patience: float, timeout: float) -> None:
        self._address, self.patience, self._timeout = address, patience, timeout
        self._lock, self._idle = threading.Lock(), list[Link]()
        link = _patiently(lambda: Link(address, timeout), patience, (ServerRefused,))
        self.hello = link.hello
        self.give_back(link)

    def take(self) -> Link:
        """Returns an unused connection; raises `LinkLost`, or `ServerRefused`, also if the target has changed."""
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            if idle is None:
                break
            if idle.is_open:
                return idle
            idle.close()
        link = Link(self._address, self._timeout)
        if link.hello.identity != self.hello.identity:
            link.close()
            raise ServerRefused(
                "target", "the server has another target than before, or the same one in another dtype: connect again"
            )
        return link

    def give_back(self, link: Link) -> None:
        with self._lock:
            keep = len(self._idle) < _IDLE_LINKS
            if keep:
                self._idle.append(link)
        if not keep:
            link.close()

    def ask(self, question: Callable[[Link], Any]) -> Any:
        """Returns the answer to a question that needs no text. Retries on another connection if one ends."""

        def once() -> Any:
            link = self.take()
            try:
                answer = question(link)
            except BaseException:  # an answer may still come
                link.close()
                raise
            self.give_back(link)
            return answer

        return _patiently(once, self.patience, (LinkLost, ServerRefused))

    def close(self) -> None:
        with self._lock:
            links, self._idle = self._idle, []
        for link in links:
            link.close()


def _patiently(step: Callable[[], Any], patience: float, waited_for: tuple[type[Exception], ...]) -> Any:
    """Retries a step on the given errors; of refusals, only on an overload."""
    waiting = Patience(patience)
    while True:
        try:
            return step()
        except waited_for as error:
            if isinstance(error, ServerRefused) and error.reason != "overloaded":
                raise
            waiting.wait(error, getattr(error, "retry_seconds", 0.0))
