"""Past texts on disk: one append-only file for each target, which several processes share.

A file begins with a header: `MAGIC`, a random number of this generation of the file, and the digest of target and
tokenizer. Records follow, each with its length, its CRC-32, and its tokens. Writers hold a lock; readers need none:
they read complete records from where they stopped, and ignore a torn one at the end, which the next writer cuts off. A
file that is rewritten or erased gets another number, so that every process drops what it knew of the old one.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from .past_texts import START, Record

MAGIC = b"hsdraft-history1"
SUFFIX = ".history"
_LOCK, _PATIENCE = ".history.lock", 20.0  # seconds that a writer waits for others
_NUMBER, _KEY = 16, 32  # bytes
_HEADER = len(MAGIC) + _NUMBER + _KEY
_RECORD = struct.Struct(f"<II{len(START)}s")  # number of tokens; CRC-32 of number, `Record.start` and tokens; `start`


@dataclass(frozen=True)
class News:
    """What a reader finds."""

    fresh: bool  # whether the file is another one than before, so that earlier records no longer hold
    records: list[Record]


class HistoryFile:
    """The file of one target in a folder, as one reader or writer sees it. Not for several threads at once.

    Args:
        key: digest of target and tokenizer, 32 bytes. A file with another key is no history of this target: it is not
            read, and the next writer replaces it.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path, self._key = path, key
        self._number = b""  # of the generation that was read
        self._end = 0  # of the complete records that were read

    def check_place(self) -> None:
        """Creates the folder, which only its owner can read; raises an OSError where nothing can be written."""
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OSError(f'history="{folder}" cannot be used ({error}): name a folder that can be written') from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the folder; raises an OSError if another process holds it for too long."""
        with FileLock(self.path.parent / _LOCK, timeout=_PATIENCE, mode=0o600):
            yield

    def read(self) -> News:
        """Returns the complete records that were added since the last call, or all of them if the file is another."""
        try:
            with self.path.open("rb") as file:
                header = file.read(_HEADER)
                number = header[len(MAGIC) : len(MAGIC) + _NUMBER]
                if len(header) < _HEADER or header != MAGIC + number + self._key:
                    return self._none()
                size = os.fstat(file.fileno()).st_size
                fresh = number != self._number or size < self._end
                self._number, self._end = number, _HEADER if fresh else self._end
                file.seek(self._end)
                records, read = _parsed(file.read() if size > self._end else b"")
        except FileNotFoundError:
            return self._none()
        self._end += read
        return News(fresh, records)

    def _none(self) -> News:
        fresh, self._number, self._end = bool(self._number), b"", 0
        return News(fresh, [])

    def append(self, record: Record) -> None:
        """Appends a record. The caller holds the lock, and has read all that there is."""
        if not self._number:
            self.rewrite([record])
            return
        packed = _packed(record)
        with self.path.open("r+b") as file:
            file.truncate(self._end)  # without what a killed process has left
            file.seek(self._end)
            file.write(packed)
        self._end += len(packed)

    def rewrite(self, records: Sequence[Record]) -> None:
        """Replaces all records. The caller holds the lock. Readers that have the old file open may read on."""
        number = os.urandom(_NUMBER)
        descriptor, partial = tempfile.mkstemp(prefix=".history-", dir=self.path.parent)  # readable by the owner only
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + number + self._key)
                for record in records:
                    file.write(_packed(record))
                self._end = file.tell()
            os.replace(partial, self.path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        self._number = number

    def erase(self) -> None:
        with self.locked():
            self.path.unlink(missing_ok=True)
            for left in self.path.parent.glob(".history-*"):  # of processes that were killed
                left.unlink(missing_ok=True)


def read_all(path: Path) -> list[Record]:
    """Returns the records of any history file; raises a ValueError if it is none."""
    content = path.read_bytes()
    if len(content) < _HEADER or not content.startswith(MAGIC):
        raise ValueError(f"{path} is no history: expected a file that drafting with the option `history` has written")
    return _parsed(content[_HEADER:])[0]


def _packed(record: Record) -> bytes:
    tokens = np.ascontiguousarray(record.tokens, dtype="<i4").tobytes()
    count = len(record.tokens)
    return _RECORD.pack(count, _checksum(count, record.start, tokens), record.start) + tokens


def _checksum(count: int, start: bytes, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(count.to_bytes(4, "little") + start))


def _parsed(content: bytes) -> tuple[list[Record], int]:
    """Returns the complete records at the beginning of `content`, and how many bytes they take."""
    records, begin = list[Record](), 0
    while begin + _RECORD.size <= len(content):
        count, checksum, start = _RECORD.unpack_from(content, begin)
        end = begin + _RECORD.size + 4 * count
        tokens = content[begin + _RECORD.size : end]
        if end > len(content) or _checksum(count, start, tokens) != checksum:
            break
        records.append(Record(np.frombuffer(tokens, dtype="<i4").astype(np.int32), start))
        begin = end
    return records, begin
