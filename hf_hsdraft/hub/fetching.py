"""Remedies for errors of loading: why the Hub returned nothing, and damaged files in its cache."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .drafter_files import DamagedFile, NotFetched, sha256


@contextmanager
def loading(name: Any, offline: bool = False) -> Iterator[None]:
    """Explains why the Hub returned nothing, and deletes damaged files from its cache, to be fetched by the next call.

    Raises an OSError if a repository is missing or cannot be reached, and a ValueError for a damaged file.
    """
    try:
        yield
    except NotFetched as error:
        raise OSError(_why_not_fetched(error)) from error.__cause__
    except DamagedFile as error:
        if os.path.isdir(name):
            remedy = "copy it again, or download it again"
        elif not (damaged := [path for path in error.paths if _is_damaged(path)]):
            remedy = "the cache holds what the Hub sent"
        elif offline or constants.is_offline_mode():
            remedy = "the copy in the cache is damaged: repeat the call online"
        else:
            remedy = _forget(damaged)
        raise ValueError(f"{error}; {remedy}") from error


def _why_not_fetched(failure: NotFetched) -> str:
    error, name, revision = failure.__cause__, failure.name, failure.revision
    elsewhere = f"there is no drafter folder {os.path.abspath(name)}, and"
    if isinstance(error, HFValidationError):
        return f"{elsewhere} as a Hub name: {error}"
    if isinstance(error, GatedRepoError):
        return f"{elsewhere} {name} on the Hub is gated: ask for access there, then log in"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{elsewhere} no repository {name} on the Hub that may be read without logging in, or with the token in "
            "use: look for a typing error (a name is user/name), or log in (`hf auth login`)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the repository {name} has no revision {revision!r}"
    if isinstance(error, LocalEntryNotFoundError):
        return (
            f"{elsewhere} {name} at {revision!r} is not complete in the cache, while the Hub cannot be reached, has no "
            "such repository (a name is user/name), or offline mode is on"
        )
    kind = "" if isinstance(error, HfHubHTTPError) else f"{type(error).__name__}: "
    return (
        f"{elsewhere} {name} at {revision!r} could not be fetched: {kind}{error}. Only complete files are in the "
        "cache; repeat the call"
    )


def _is_damaged(path: Path) -> bool:
    """Whether a cached file does not match its name: its SHA-256, or as a git blob its SHA-1."""
    name = path.resolve().name
    if not path.is_file() or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name):
        return path.is_file()  # unknown in a cache without links
    if len(name) == 64:
        return sha256(path) != name
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != name


def _forget(damaged: Sequence[Path]) -> str:
    """Deletes files of the cache; returns what to do next."""
    try:
        for path in damaged:
            path.resolve().unlink(missing_ok=True)  # snapshots are links, where the system has them
            path.unlink(missing_ok=True)
    except OSError:  # a read-only cache
        return "delete it from the cache"
    return "it was removed from the cache: repeat the call to download it again"
