"""Logging of connections: none, as a line may hold a token. And of failures, without what devices have sent."""

from __future__ import annotations

import logging
import traceback

logger = logging.getLogger("hf_hsdraft.remote")


def log_failure(what: str, error: BaseException) -> None:
    """Writes what has failed and where. The text of the error is left out: it may hold what a device has sent."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", what, type(error).__name__, where)


def silent_logger() -> logging.Logger:
    """Returns a logger that writes nothing, whatever level others log at.

    The library of the connections writes the headers of a handshake to its log, and with them the token.
    """
    silent = logging.Logger("hf_hsdraft.remote.connection", logging.CRITICAL + 1)
    silent.propagate = False
    return silent
