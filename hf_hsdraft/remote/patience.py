"""How long a device retries a server that is unreachable or overloaded."""

from __future__ import annotations

import time

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds


class Patience:
    """Waits between tries, doubling the pause, for `seconds` in total; with 0 the first error is raised."""

    def __init__(self, seconds: float) -> None:
        self._end, self._pause = time.monotonic() + seconds, _FIRST_PAUSE

    def wait(self, error: Exception, least: float = 0.0) -> float:
        """Waits until the next try, at least `least` seconds; returns the seconds. Raises `error` if the time is up."""
        seconds = max(self._pause, least)
        if time.monotonic() + seconds > self._end:
            raise error
        time.sleep(seconds)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return seconds
