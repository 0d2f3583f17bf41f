"""Whether this process is the command `hsdraft`, and its Ctrl-C: one line and status 130, without a traceback.

Importing this prepares a command for a Ctrl-C while it starts: an exception would meet half-imported modules.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

STATUS = 130  # 128 and the number of SIGINT, as of shells
SAID = "stopped"


def is_command() -> bool:
    """Whether this process is `hsdraft`, which parses its options before it loads PyTorch.

    The command line is read as it was given: `sys.argv` begins with -m while Python looks for a module, and processes
    that multiprocessing starts copy it from their parent.
    """
    given = sys.orig_argv[-len(sys.argv) :] if sys.argv else []
    name = os.path.basename(given[0]).removeprefix("-m") if given else ""
    return name in ("hsdraft", "hsdraft.exe", "hf_hsdraft.cli")


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
