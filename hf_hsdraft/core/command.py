"""Whether this process is the command `hsdraft`, and its Ctrl-C: one line and status 130, also while it starts."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

STATUS = 130  # 128 and the number of SIGINT, as of shells
SAID = "stopped"


def is_command() -> bool:
    """Whether this process is `hsdraft`, which parses its options before it loads PyTorch.

    Processes that multiprocessing starts copy `sys.argv` from their parent; only their command line tells.
    """
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name == "-m":  # while Python looks for the module that it will run
        name = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    is_child = any("multiprocessing" in each for each in sys.orig_argv[1:4])
    return name in ("hsdraft", "hsdraft.exe", "hf_hsdraft.cli", "hf_hsdraft.cli.main") and not is_child


def end_at_once() -> None:
    """Lets Ctrl-C end this process without an exception. Leaves handlers alone that are not Python's."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Undoes `end_at_once`: Ctrl-C raises a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: Any) -> None:
    clean = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""  # after a spinner, which hides the cursor
    os.write(2, f"{clean}{SAID}\n".encode())
    os._exit(STATUS)


if is_command():
    end_at_once()
