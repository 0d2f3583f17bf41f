"""Where this package keeps files for later processes, and which of them it may run.

Compiled code runs as this user: no other user may be able to write or exchange its file or a folder on the way to it.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH  # by users besides the owner
_MOST_LINKS = 40  # on a path, as in Linux


def cache_folder(name: str) -> Path:
    """A folder of the user's cache, which may not exist yet; raises an OSError for a user without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
    except RuntimeError as error:
        raise OSError("the user has no home folder: set XDG_CACHE_HOME to a folder for caches") from error
    return cache.absolute() / "hf_hsdraft" / name


def private_folder(name: str) -> Path:
    """A folder that this user alone can change, with its parents; made if missing.

    It is in the user's cache. Where other users could exchange that, a warning says why, and it is a temporary folder,
    which is removed at the end of the process. Raises an OSError if that is no better.
    """
    try:
        return _own_folder(cache_folder(name))
    except (OSError, RuntimeError) as error:  # the latter without a home
        logger.warning_once(f"{error}. Until then, what is compiled is kept for this process only")
        return _own_folder(_of_this_process() / name)


def check_place(path: str | os.PathLike[str], make: bool = False, links: int = _MOST_LINKS) -> Path:
    """Returns a folder's path without links, at most so many; `make` makes the folder if it is missing.

    Raises an OSError if there is none, or if another user could exchange it. Each link and folder of its path must
    belong to this user or root, and no other user may write to the folders, except to sticky ones, as `/tmp`, where
    entries keep their owners.
    """
    path = Path(path).absolute()
    for entry in (*reversed(path.parents), path):
        if make and not os.path.lexists(entry):
            entry.mkdir(mode=0o700, exist_ok=True)
        _check(entry)
        if entry.is_symlink():
            if not links:
                raise OSError(f"{path} has too many links: expected a folder")
            return check_place(entry.parent / os.readlink(entry) / path.relative_to(entry), make, links - 1)
    return Path(os.path.normpath(path))


def is_own(path: Path) -> bool:
    """Whether a file or folder, no link, belongs to this user, and no other user can write to it. Not for its parents.

    In a `private_folder`, such a file may be run.
    """
    try:
        found = path.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & _WRITABLE)


def is_private(place: str | os.PathLike[str]) -> bool:
    """Whether this user alone can change or exchange a folder, which exists."""
    try:
        return is_own(check_place(place))
    except OSError:
        return False


def compiler_places() -> dict[str, str]:
    """Variables of the environment by which compilers keep in a private folder what they run or include later.

    PyTorch's default is a folder of a known name in `/tmp`, which any user may have made before.
    """
    names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR"
    return dict.fromkeys(names, str(private_folder("compiler")))


def check_temporary_folders() -> None:
    """Raises an OSError if another user could exchange what a library of C++ unpacks into a temporary folder."""
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        check_place(os.environ.get(name) or tempfile.gettempdir())


def _own_folder(path: Path) -> Path:
    folder = check_place(path, make=True)
    if not is_own(folder):
        raise _refused(folder)
    return folder


def _check(entry: Path) -> None:
    """Raises an OSError unless a link or folder belongs to this user or root, and the latter alone write to it."""
    found = entry.lstat()
    is_link = stat.S_ISLNK(found.st_mode)
    if not is_link and not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{entry} is no folder: remove it, or name a folder by XDG_CACHE_HOME or TMPDIR")
    if not hasattr(os, "getuid"):
        return
    open_to_others = found.st_mode & _WRITABLE and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (os.getuid(), 0) or (open_to_others and not is_link):
        raise _refused(entry)


def _refused(entry: Path) -> OSError:
    found = entry.lstat()
    return OSError(
        f"{entry} can be written to by others (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}), and "
        f"compiled code is kept below it: expected a folder that user {os.getuid()} alone can change; run "
        f"`chmod go-w {entry}` if it is yours, or name another folder by XDG_CACHE_HOME or TMPDIR"
    )


@functools.cache
def _of_this_process() -> Path:
    folder, process = Path(tempfile.mkdtemp(prefix="hf_hsdraft-", dir=check_place(tempfile.gettempdir()))), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
