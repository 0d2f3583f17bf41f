"""Past texts on disk: an SQLite file for each target, which several processes share.

Its `user_version` is a random number that changes when texts leave it, so that every process drops what it knew of the
old ones. What is deleted is overwritten, and the file shrinks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from .past_texts import Record

SUFFIX = ".history"
_PATIENCE = 20.0  # seconds to wait for other processes
# Not synchronous: a killed process leaves a whole file; after a power failure, a damaged one is made again.
_SETTINGS = "PRAGMA synchronous=OFF", "PRAGMA secure_delete=ON"
_TABLE = "CREATE TABLE texts (id INTEGER PRIMARY KEY, start BLOB, tokens BLOB)"


@contextlib.contextmanager
def transaction(path: Path, write: bool = False) -> Iterator[sqlite3.Connection]:
    """Opens a history file, which is created if it is missing and can be read by its owner only.

    Raises an OSError if the file cannot be used, and a ValueError if it is no history or damaged.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        with contextlib.closing(sqlite3.connect(path, _PATIENCE, isolation_level=None)) as file:
            new = not path.stat().st_size
            for setting in (*_SETTINGS, *["PRAGMA auto_vacuum=FULL"] * new):
                file.execute(setting)
            file.execute("BEGIN IMMEDIATE" if write or new else "BEGIN")
            if not generation(file):  # a new one
                file.execute(_TABLE)
                replace(file)
            yield file
            file.execute("COMMIT")
    except (OSError, sqlite3.OperationalError) as error:
        raise OSError(f'history="{path.parent}" cannot be used ({error}): name a folder that can be written') from error
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"{path} is no history or damaged ({error}): expected a file that drafting with the option `history` has "
            "written"
        ) from error


def generation(file: sqlite3.Connection) -> int:
    """Returns a number that is another one when texts have left the file."""
    return int(file.execute("PRAGMA user_version").fetchone()[0])


def records_after(file: sqlite3.Connection, number: int = 0) -> dict[int, Record]:
    """Returns the records with greater numbers, in their order."""
    found = file.execute("SELECT id, start, tokens FROM texts WHERE id > ? ORDER BY id", (number,))
    return {each: Record(np.frombuffer(raw, "<i4").astype(np.int32), start) for each, start, raw in found}


def append(file: sqlite3.Connection, record: Record) -> int:
    """Adds a record, and returns its number."""
    raw = record.tokens.astype("<i4").tobytes()
    return file.execute("INSERT INTO texts (start, tokens) VALUES (?, ?)", (record.start, raw)).lastrowid or 0


def replace(file: sqlite3.Connection, records: Iterable[Record] = ()) -> None:
    """Replaces all records."""
    file.execute("DELETE FROM texts")
    file.execute(f"PRAGMA user_version = {secrets.randbits(30) + 1}")
    for record in records:
        append(file, record)


def count(file: sqlite3.Connection) -> tuple[int, int]:
    """Returns the number of records, and of their tokens."""
    texts, raw = file.execute("SELECT COUNT(*), COALESCE(SUM(LENGTH(tokens)), 0) FROM texts").fetchone()
    return texts, raw // 4


def remove(path: Path) -> None:
    """Deletes a damaged file, and the journal of a process that was killed."""
    for each in (path, path.with_name(f"{path.name}-journal")):
        each.unlink(missing_ok=True)
