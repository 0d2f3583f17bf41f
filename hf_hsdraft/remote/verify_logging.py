"""Logging of connections: none, as a line may hold a token."""

from __future__ import annotations

import logging


def silent_logger() -> logging.Logger:
    """Returns a logger that writes nothing, whatever level others log at.

    The library of the connections writes the headers of a handshake to its log, and with them the token.
    """
    silent = logging.Logger("hf_hsdraft.remote.connection", logging.CRITICAL + 1)
    silent.propagate = False
    return silent
