"""What commands say on standard error while they work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console

EVERY = 5.0  # seconds between two lines where no terminal shows progress
errors = Console(stderr=True)


def tell(line: str) -> None:
    """Prints a line on standard error as it is, without markup, colours and line breaks."""
    errors.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def working(doing: str) -> Iterator[None]:
    """Says what takes a while: beside a spinner in a terminal, elsewhere by a line at once and every few seconds."""
    if errors.is_terminal:
        from rich.live import Live
        from rich.spinner import Spinner

        # Not `Console.status`, which replaces the standard streams: libraries keep those that they find when imported.
        with Live(Spinner("dots", doing), console=errors, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield
        return
    ended, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(EVERY):
            tell(f"{doing}: {time.monotonic() - began:.0f} s")

    tell(doing)
    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()
