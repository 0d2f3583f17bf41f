"""Writes files atomically: a file gets its name when it is complete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_complete(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, then renames it. After an error there is no new file.

    Raises:
        OSError: the file cannot be written. If the disk is full, the message says so, and what to do.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")  # hidden, because a killed process leaves it
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


def check_place(path: Path) -> None:
    """Raises an OSError if a file cannot be written. Its folder may be missing, and is not created."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: expected a file there, or nothing; move it away")
    above = next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{above} is a file: expected a folder there, or nothing; name another folder")
    try:
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=above):
            pass
    except OSError as error:
        raise OSError(f"{path.parent} cannot be written ({error}): name another folder") from error


def check_empty(folder: Path) -> None:
    """Raises a FileExistsError if a folder that is to be written holds something already."""
    unfinished = ".saving-"  # `complete_folder` in a process that was killed
    if folder.exists() and (not folder.is_dir() or any(not p.name.startswith(unfinished) for p in folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: name a new folder")


def write_json(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2) + "\n"
    write_complete(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_kept(path: Path, remedy: str) -> dict[str, Any]:
    """Returns the JSON object that an earlier run kept; empty if there is no such file.

    Raises:
        ValueError: the file is damaged. The message names it and the remedy.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document, dict):
            return document
        why = f"it holds {type(document).__name__}, not an object"
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is damaged ({why}): {remedy}")


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception says that the disk is full, also where a library has wrapped the system's error."""
    code = getattr(error, "errno", None)
    return code in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC).lower() in str(error).lower()


def disk_full(path: Path) -> OSError:
    free = shutil.disk_usage(path.parent if path.parent.exists() else Path("/")).free
    return OSError(
        errno.ENOSPC,
        f"the disk is full ({free / 1e6:,.0f} MB left): {path} could not be written. Everything finished before it is "
        "kept; free some space and run the same command again",
    )
