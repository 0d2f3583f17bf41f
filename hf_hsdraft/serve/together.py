"""Answers of a server that are decoded together, on its decoding thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ..batching.scheduler import ContinuousBatching, FinishedText
from ..generate.attachment import Attachment


class Together:
    """Decodes calls together that are submitted while others are decoded.

    Args:
        make: makes the batch; called again after an error of a whole batch, which all its calls get.
        run: runs a function on the decoding thread, after those before it.
        attachment: counts what was drafted.
    """

    def __init__(
        self, make: Callable[[], ContinuousBatching], run: Callable[[Callable[[], None]], Any], attachment: Attachment
    ) -> None:
        self._make, self._run, self._attachment = make, run, attachment
        self.batching = make()
        self._new = deque[tuple[Mapping[str, Any], int | None, Future[Any]]]()
        self._futures: dict[int, Future[Any]] = {}
        self._counted = time.perf_counter()

    def submit(self, arguments: Mapping[str, Any], seed: int | None) -> Future[Any]:
        """Returns the future output of `generate()` with these arguments; see `ContinuousBatching.submit`."""
        future = Future[Any]()
        self._new.append((arguments, seed, future))
        self._run(self._work)
        return future

    def _work(self) -> None:
        """Decodes until all is done; runs on the decoding thread."""
        self._counted = time.perf_counter()
        while True:
            while self._new:
                arguments, seed, future = self._new.popleft()
                if future.set_running_or_notify_cancel():
                    self._futures[self.batching.submit(arguments, seed)] = future
            if not self.batching.busy:
                return
            try:
                done = self.batching.step()
            except Exception as error:
                futures, self._futures, self.batching = self._futures, {}, self._make()
                for future in futures.values():
                    future.set_exception(error)
                return
            for each in done:
                self._end(each)

    def _end(self, done: FinishedText) -> None:
        if done.statistics is not None and done.error is None:
            now = time.perf_counter()
            self._attachment.count(done.statistics, now - self._counted)
            self._counted = now
        future = self._futures.pop(done.index)
        if done.error is None:
            future.set_result(done.output)
        else:
            future.set_exception(done.error)
