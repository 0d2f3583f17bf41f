"""Logging without secrets: nothing of connections, as a line may hold a token; failures without what devices sent."""

from __future__ import annotations

import logging
import traceback

logger = logging.getLogger("hf_hsdraft.remote")


def log_failure(what: str, error: BaseException) -> None:
    """Logs what failed and where. The error's text is left out: it may hold what a device sent."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", what, type(error).__name__, where)


def silent_logger() -> logging.Logger:
    """Returns a logger that writes nothing, whatever level others log at.

    websockets logs the headers of a handshake, and with them the token.
    """
    silent = logging.Logger("hf_hsdraft.remote.connection", logging.CRITICAL + 1)
    silent.propagate = False
    return silent
