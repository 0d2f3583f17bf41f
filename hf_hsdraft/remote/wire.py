"""The binary form of messages: msgpack, with the size of every part bounded before it is allocated.

A message is a dataclass, sent as a list of its code and its fields in order. Decoding creates only numbers, strings,
bytes and flat containers of them, so a message cannot carry code. Nor does a log hold what was sent.
"""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, TypeVar, cast, get_type_hints

import msgpack

MOST_TEXT = 2**17  # bytes of a text
MOST_ITEMS = 2**12  # items of a list
MOST_NAMES = 64  # items of a map, and characters of a name
MOST_INT = 2**63 - 1


class WireError(ValueError):
    """An unexpected or malformed message."""


@dataclass(frozen=True)
class Message:
    """One message. Each class has a unique code, and a check for each field."""

    code: ClassVar[int]

    def __init_subclass__(cls, code: int) -> None:
        cls.code = code


M = TypeVar("M", bound=Message)
Check = Callable[[Any], bool]  # annotates a field: Annotated[int, whole(0, 9)]


def whole(least: int = 0, most: int = MOST_INT) -> Check:
    """Checks integers in a range."""
    return lambda value: type(value) is int and least <= value <= most


def real(least: float = 0.0, most: float = 1e9) -> Check:
    """Checks finite numbers in a range."""
    return lambda value: type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def flag() -> Check:
    return lambda value: type(value) is bool


def words(most: int = MOST_TEXT) -> Check:
    """Checks strings of at most so many characters."""
    return lambda value: type(value) is str and len(value) <= most


def digest() -> Check:
    """Checks hexadecimal SHA-256 digests."""
    return lambda value: type(value) is str and re.fullmatch("[0-9a-f]{64}", value) is not None


def packed(width: int) -> Check:
    """Checks bytes in items of `width` bytes. The size of the whole message bounds their number."""
    return lambda value: type(value) is bytes and len(value) % width == 0


def settings() -> Check:
    """Checks maps of names to numbers, booleans, `None` and short lists of integers."""
    return lambda value: type(value) is dict and all(is_setting(*each) for each in value.items())


def layers() -> Check:
    """Checks lists of layer indices."""
    return lambda value: type(value) is list and all(type(one) is int and 0 <= one < 2**16 for one in value)


def is_setting(name: Any, value: Any) -> bool:
    """Whether a name and its value can be sent: a number, a boolean, `None`, or a list of integers."""
    if type(name) is not str or len(name) > MOST_NAMES:
        return False
    if type(value) is list:
        return len(value) <= MOST_ITEMS and all(type(one) is int and abs(one) <= MOST_INT for one in value)
    return value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))


@cache
def _checks(kind: Any) -> dict[str, Check]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name].__metadata__[0] for each in fields(kind)}


def encode(message: Message) -> bytes:
    return msgpack.packb([message.code, *(getattr(message, each.name) for each in fields(message))])


def decode(data: Any, expected: Mapping[int, type[M]]) -> M:
    """Parses a message of the `expected` classes, by code. The connection has bounded its size.

    Raises a WireError for anything else, with a text that says what is wrong but contains nothing of the data.
    """
    if not isinstance(data, bytes):
        raise WireError("a message of text came in: expected bytes")
    try:
        values = msgpack.unpackb(
            data,
            max_str_len=MOST_TEXT,
            max_bin_len=len(data),
            max_array_len=MOST_ITEMS,
            max_map_len=MOST_NAMES,
            max_ext_len=0,
        )
    except Exception:  # of many types, and their texts may contain the data
        raise WireError("the bytes are no msgpack, or hold more items than a message has") from None
    kind = expected.get(values[0]) if type(values) is list and values and type(values[0]) is int else None
    if kind is None:
        raise WireError("there is no message with this code here")
    checks = _checks(cast(Any, kind))
    if len(values) != len(checks) + 1:
        raise WireError(f"{kind.__name__} has {len(checks)} fields: {len(values) - 1} came in")
    for (name, check), value in zip(checks.items(), values[1:], strict=True):
        if not check(value):
            raise WireError(f"{kind.__name__}.{name} is of another type, or out of range")
    return kind(*values[1:])


def by_code(*kinds: type[M]) -> dict[int, type[M]]:
    return {kind.code: kind for kind in kinds}


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
