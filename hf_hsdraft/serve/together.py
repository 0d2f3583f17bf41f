"""Answers of a server that are decoded together, on its decoding thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ..batching.requests import FinishedText
from ..batching.scheduler import ContinuousBatching


class Together:
    """Decodes calls together that are submitted while others are decoded.

    Args:
        make: makes the batch; called again after an error of a whole batch, which all its calls get.
        run: runs a function on the decoding thread, after those before it.
    """

    def __init__(self, make: Callable[[], ContinuousBatching], run: Callable[[Callable[[], None]], Any]) -> None:
        self._make, self._run = make, run
        self.batching = make()
        self._new = deque[tuple[Mapping[str, Any], int | None, Callable[[], None], Future[Any]]]()
        self._futures: dict[int, tuple[Future[Any], Callable[[], None]]] = {}

    def submit(self, arguments: Mapping[str, Any], seed: int | None, check: Callable[[], None]) -> Future[Any]:
        """Returns the future output of `generate()` with these arguments; see `ContinuousBatching.submit`.

        `check` is called before every round, and ends the call by raising an error, also while it waits.
        """
        future = Future[Any]()
        self._new.append((arguments, seed, check, future))
        self._run(self._work)
        return future

    def _work(self) -> None:
        """Decodes until all is done; runs on the decoding thread."""
        try:
            while self._take_new() or self.batching.busy:
                self._drop()
                for done in self.batching.step():
                    self._end(done)
        except Exception as error:
            futures, self._futures = self._futures, {}
            for future, _ in futures.values():
                future.set_exception(error)
            self.batching.close()
            self.batching = self._make()

    def _take_new(self) -> bool:
        """Submits what is new; returns whether there was something."""
        found = False
        while self._new:
            arguments, seed, check, future = self._new.popleft()
            if future.set_running_or_notify_cancel():
                self._futures[self.batching.submit(arguments, seed)] = future, check
                found = True
        return found

    def _drop(self) -> None:
        """Ends calls that have to end."""
        for index, (future, check) in list(self._futures.items()):
            try:
                check()
            except Exception as error:
                self.batching.cancel(index)
                del self._futures[index]
                future.set_exception(error)

    def _end(self, done: FinishedText) -> None:
        if done.index not in self._futures:  # it was dropped
            return
        future, _ = self._futures.pop(done.index)
        if done.error is None:
            future.set_result(done.output)
        else:
            future.set_exception(done.error)
