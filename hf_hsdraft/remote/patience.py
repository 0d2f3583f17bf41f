"""How long a device retries a server that is unreachable or overloaded."""

from __future__ import annotations

import time

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds


class Patience:
    """Waits between tries, doubling the pause.

    Args:
        seconds: limit over all tries; with 0 the first error is raised.
    """

    def __init__(self, seconds: float) -> None:
        self._end, self._pause = time.monotonic() + seconds, _FIRST_PAUSE

    def wait(self, error: Exception, least: float = 0.0) -> float:
        """Waits until the next try; returns the seconds.

        Args:
            error: raised if the limit would be exceeded.
            least: minimum of the pause, in seconds.
        """
        seconds = max(self._pause, least)
        if time.monotonic() + seconds > self._end:
            raise error
        time.sleep(seconds)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return seconds
