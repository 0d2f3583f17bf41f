"""Finds a drafter's files, local or on the Hub, and explains why the Hub returned nothing or damaged files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .drafter_files import (
    DESCRIBED,
    METHOD_FILES,
    WEIGHTS,
    DamagedFile,
    check_is_drafter,
    listed_files,
    sha256,
)

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


def taken_for_hub(kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Pops the Hub's arguments and the subfolder from the arguments of a load."""
    hub = {name: value for name in HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
    return hub, kwargs.pop("subfolder", None) or ""


def find_folder(name: str | os.PathLike[str], patterns: Sequence[str], subfolder: str = "", **hub: Any) -> Path:
    """Returns the folder of a drafter's files: `name` itself, or a snapshot of a repository of the Hub.

    `patterns` are fetched from the Hub, with arguments of `HUB_ARGUMENTS`. Raises an OSError if there is no such folder
    or repository, or the Hub cannot be reached and nothing complete is cached.
    """
    name = os.fspath(name)
    if os.path.isdir(name):
        return Path(name) / subfolder
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:  # a Hub name has at most one slash
        raise OSError(f"no such drafter folder: {os.path.abspath(name)}")
    wanted = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in patterns]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, **hub)) / subfolder
    except (HFValidationError, HTTPError, OSError) as error:
        raise OSError(_why_not_fetched(name, hub.get("revision") or "main", error)) from error


def fetch(name: str | os.PathLike[str], model_type: str, subfolder: str = "", **hub: Any) -> Path:
    """Returns a drafter's folder with all that loading needs; weights are fetched only if it is a drafter.

    Raises the errors of `find_folder` and `check_is_drafter`.
    """
    folder = find_folder(name, DESCRIBED, subfolder, **hub)
    check_is_drafter(folder, model_type)
    if not os.path.isdir(name):
        commit = folder.parents[len(Path(subfolder).parts) - 1].name if subfolder else folder.name
        names = [*(listed_files(folder) or [WEIGHTS]), *METHOD_FILES]
        folder = find_folder(name, names, subfolder, **{**hub, "revision": commit})  # of the same state
    return folder


@contextmanager
def loading(name: Any, offline: bool = False) -> Iterator[None]:
    """Deletes damaged files from the Hub's cache, to be fetched by the next call, and raises a ValueError for them."""
    try:
        yield
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


def _why_not_fetched(name: str, revision: str, error: Exception) -> str:
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
