"""Where this package keeps files for later processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """A folder of the user's cache, which may not exist yet; raises an OSError for a user without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
    except RuntimeError as error:
        raise OSError("the user has no home folder: set XDG_CACHE_HOME to a folder for caches") from error
    return cache.absolute() / "hf_hsdraft" / name


def private_folder(name: str) -> Path:
    """The same for files that are run; raises an OSError if other users could write there."""
    folder = cache_folder(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise OSError(f"{folder} can be written to by others: expected a folder of this user alone")
    return folder
